"""The notebooks of docs/notebooks run from top to bottom, and keep the outputs of such a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    kept = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, now in zip(kept.cells, notebook.cells, strict=True):
        if before.cell_type == "code":
            said = [output.output_type for output in now.outputs if output.output_type != "stream"]
            assert [output.output_type for output in before.outputs if output.output_type != "stream"] == said
            assert "error" not in said


def test_there_are_three() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"first-federation", "own-method", "analysis"}
