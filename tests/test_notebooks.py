"""The notebooks of docs/notebooks run from top to bottom, and keep the outputs of such a run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import kernel
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def test_notebooks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    """With runs of two rounds, and all in one kernel, whose start takes longer: each in a folder of its own, without the
    names of the others."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    assert {path.stem for path in NOTEBOOKS} == {"first-federation", "own-method", "analysis"}
    kept = []
    for path in NOTEBOOKS:
        (tmp_path / path.stem).mkdir()
        clean = nbformat.v4.new_code_cell(f"%cd -q {tmp_path / path.stem}\n%reset -f")
        kept += [(path.stem, cell) for cell in (clean, *nbformat.read(path, as_version=4).cells)]
    notebook = nbformat.v4.new_notebook(cells=[cell for _, cell in kept])
    for cell in notebook.cells:
        cell.source = re.sub(r"rounds__total=\d+", "rounds__total=2", cell.source)
    kernel.execute(notebook, tmp_path, allow_errors=True)
    for (name, before), now in zip(kept, notebook.cells, strict=True):
        if before.cell_type == "code":
            with subtests.test(notebook=name, cell=before.source):
                said, shown = (
                    [output.output_type for output in cell.outputs if output.output_type != "stream"]
                    for cell in (before, now)
                )
                assert "error" not in shown, now.outputs
                assert said == shown
