"""A notebook's kernel: a process of its own, asked over sockets in a folder, so that no other one can take its port."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nbformat import NotebookNode

ENDLESS = 10**6  # seconds: pytest's is the only time-out


def execute(notebook: NotebookNode, folder: Path, allow_errors: bool = False, **options: Any) -> None:
    """Run all cells in `folder` and put their outputs into the notebook."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    with TemporaryDirectory(prefix="nb", dir="/tmp") as sockets:  # short, as the name of a socket must be
        NotebookClient(
            notebook, kernel_name="python3", allow_errors=allow_errors, startup_timeout=ENDLESS, iopub_timeout=ENDLESS,
            config=Config(KernelManager={"transport": "ipc", "connection_file": f"{sockets}/kernel.json"}),
            resources={"metadata": {"path": str(folder)}},
        ).execute(**options)  # fmt: skip
