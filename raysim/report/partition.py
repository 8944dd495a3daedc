"""The partition at a glance: a bubble for each client and class, or with many clients a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raysim.report import blocks, need

if TYPE_CHECKING:
    from raysim.report.canvas import Canvas

WIDE = 100  # bubbles of more clients than this touch


def partition_chart(counts: np.ndarray, classes: Sequence[str], title: str) -> Canvas:
    """`counts` [N, C], training samples by client and class, as the areas of bubbles or the colours of a map.

    Raises `MissingExtra` where matplotlib is missing.
    """
    need("matplotlib.figure")
    from matplotlib.ticker import MaxNLocator

    from raysim.report.canvas import COLOURS, COLUMN, PAGE, panel, styled

    clients, labels = counts.shape
    rim, head = 0.35 + 0.07 * min(16, max(map(len, classes))), 0.75  # inches for names and titles
    width = np.clip(rim + 0.3 * clients, COLUMN, PAGE)
    height = np.clip(head + 0.3 * labels, 1.6, 9)
    if clients > WIDE:
        return _map(counts, classes, title, float(height))
    with styled():
        figure, axes = panel(width, height)
        client, label = np.nonzero(counts)
        across, down = (width - rim) / (clients + 0.4), (height - head) / (labels + 0.4)  # inches of a cell
        # points²: the largest bubble just fits its cell; where cells are narrow it may cover its neighbours' rims
        largest = (0.9 * 72 * min(0.3, down, max(across, 0.2))) ** 2
        sizes = largest * counts[client, label] / max(counts.max(), 1)
        axes.scatter(
            client,
            label,
            s=sizes,
            color=COLOURS[0],
            alpha=0.7,
            linewidths=0,
            clip_on=False,
        )
        axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, labels - 0.3), xlabel="client", ylabel="class")
        axes.xaxis.set_major_locator(MaxNLocator(min(clients, 20), integer=True, steps=[1, 2, 5, 10]))
        every = int(np.ceil(0.13 / down))
        axes.set_yticks(range(0, labels, every), [name[:16] for name in classes[::every]])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.suptitle(f"{title}; largest bubble: {counts.max():,} samples", fontsize=8, x=0.01, ha="left")
    return figure


def _map(counts: np.ndarray, classes: Sequence[str], title: str, height: float) -> Canvas:
    """Blank: the client has no sample of the class. Of very many clients, neighbours are one column, with their mean."""
    from raysim.report.canvas import PAGE, heat_map, name_rows, panel, styled

    shares = blocks.means(counts.astype(float)).T[::-1]  # [C, columns], the first class at the bottom, as with bubbles
    alike = shares.shape[1] < len(counts)
    with styled():
        figure, axes = panel(PAGE, min(height, 4.5))
        words = f"samples, mean of {len(counts) // shares.shape[1]} neighbours" if alike else "samples"
        heat_map(axes, np.where(shares > 0, shares, np.nan), f"{title}; {words}")
        axes.set(xlabel="client", ylabel="class")
        step = len(counts) / shares.shape[1]
        axes.xaxis.set_major_formatter(lambda place, _: f"{round(place * step)}")
        name_rows(axes, list(classes)[::-1], min(height, 4.5) - 0.75)
    return figure
