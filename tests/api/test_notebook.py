"""raysim in a notebook: live rounds, a run as a cell's value, and a sentence for a mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kernel
import nbformat
import pytest
from conftest import tiny

import raysim
from raysim.config import to_dict
from raysim.errors import Explained
from raysim.report import ReportError

CELLS = (
    "import json, raysim\nsettings = json.loads({settings!r})",
    "run = raysim.run(settings, out='run')",
    "run",
    "raysim.run(settings, rounds__totl=3)",
    "run['round']",
)


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(raysim.__file__).parents[1]))
    settings = json.dumps(to_dict(tiny()))
    cells = [nbformat.v4.new_code_cell(cell.format(settings=settings)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    kernel.execute(notebook, tmp_path, allow_errors=True)
    started, ran, shown, typo, no_table = (cell.outputs for cell in notebook.cells)
    assert started == []
    [live] = ran  # and no warning beside it
    assert live.data["text/plain"].startswith("round 3/3   accuracy")
    for html in (live.data["text/html"], shown[0].data["text/html"]):
        assert "fedavg, 3 of 3 rounds, finished" in html
        assert "<th>final (%)</th>" in html
        assert "test accuracy (%)" in re.sub("<[^>]*>", "", html[html.index("<svg") :])
    assert '<progress value="3" max="3">' in live.data["text/html"]
    [error] = typo
    assert error.traceback == [
        "ConfigError: rounds.totl: unknown field (set to 3). Did you mean 'total'? "
        "It takes total, until, participation, selection, evaluate_every, checkpoint_every, min_clients, on_client_failure."
    ]
    [error] = no_table
    assert error.traceback[0].startswith("NoTable: the run has no table 'round'; there are rounds, clients")


def test_errors_of_our_own_are_sentences() -> None:
    """All that a user can meet, but for what one process tells another."""
    inside = {
        "ClientFailure",
        "HostLost",
        "StateLost",
        "StateUnreadable",
        "FolderGone",
        "Foreign",
        "UnsafeName",
        "GroupingError",
    }
    found: dict[str, str] = {}
    for path in Path(raysim.__file__).parent.rglob("*.py"):
        found |= dict(re.findall(r"^class (\w+)\(([^)]*)\):", path.read_text(), re.MULTILINE))

    def leads_to(name: str, ends: tuple[str, ...]) -> bool:
        bases = found.get(name, "").split(", ")
        return any(base.endswith(ends) or (base != name and leads_to(base, ends)) for base in bases)

    ours = {name for name in found if leads_to(name, ("Error", "Exception")) and not name.startswith("_")} - inside
    assert {"ConfigError", "DataError", "ModelError", "NoTable"} <= ours
    assert not {name for name in ours if not leads_to(name, ("Explained",))}


def test_a_run_without_scores_or_rounds_shows_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raysim.stream(tiny(), out=tmp_path / "<run>") as simulation:
        next(simulation)
        simulation.save()
    html: Any = raysim.load(tmp_path / "<run>")._repr_html_()
    assert "fedavg, 1 of 3 rounds, stopped" in html
    assert "&lt;run&gt;" in html and "<run>" not in html
    assert "training loss" in re.sub("<[^>]*>", "", html)
    error = ReportError("why")
    assert isinstance(error, Explained)
