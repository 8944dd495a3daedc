"""The partition at a glance: one bubble for each client and class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

BUBBLE = "#0072b2"  # Okabe and Ito's blue: distinct for colour-blind readers; size alone carries the number
INK, GRID = "#333333", "#e6e6e6"


def bubble_chart(counts: np.ndarray, classes: Sequence[str], title: str, path: Path) -> None:
    """Write `counts` [N, C], training samples by client and class, as an image; a bubble's area is its count.

    Raises ImportError where matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ImportError("charts need matplotlib: pip install 'raysim[report]'") from None

    clients, labels = counts.shape
    width, height = np.clip((1.4 + 0.3 * clients, 1.6 + 0.3 * labels), (4.8, 2.4), (14, 12))  # inches
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    client, label = np.nonzero(counts)
    cell = min(0.3, (width - 1.4) / clients) * min(0.3, (height - 1.6) / labels)  # square inches to fill at most
    largest = 0.9 * cell * 72**2  # points²: where cells are square, the largest bubble just fits its own
    sizes = largest * counts[client, label] / max(counts.max(), 1)
    axes.scatter(client, label, s=sizes, color=BUBBLE, alpha=0.8, linewidths=0)

    axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, labels - 0.3), xlabel="client", ylabel="class")
    axes.xaxis.set_major_locator(MaxNLocator(min(clients, 25), integer=True, steps=[1, 2, 5, 10]))
    every = -(-labels // 40)
    axes.set_yticks(range(0, labels, every), [name[:16] for name in classes[::every]])
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.6)
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_title(f"largest bubble: {counts.max():,} samples", fontsize=8, color=INK, loc="right")
    figure.savefig(path)
