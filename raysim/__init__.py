"""raysim: federated learning simulated with Ray actors and PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysim.report.runs import Run

__version__ = "0.1.0"


def load(folder: str | Path) -> Run:
    """A run to look at: `load(folder)["rounds"]` is an Arrow table, `load(folder).figure("accuracy")` a figure."""
    from raysim.report.runs import Run

    return Run(folder)
