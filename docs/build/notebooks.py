"""Run the notebooks and keep their outputs: `python docs/build/notebooks.py`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in `folder`. Raises `CellExecutionError` where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}, record_timing=False).execute()
    return notebook


if __name__ == "__main__":
    for path in NOTEBOOKS:
        with TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)
