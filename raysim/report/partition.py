"""The partition at a glance: one bubble for each client and class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from raysim.report import need

if TYPE_CHECKING:
    from raysim.report.canvas import Canvas

SOFT = 3000  # more bubbles than this are pixels in a vector file


def bubble_chart(counts: np.ndarray, classes: Sequence[str], title: str) -> Canvas:
    """`counts` [N, C], training samples by client and class; a bubble's area is its count.

    Raises `MissingExtra` where matplotlib is missing.
    """
    need("matplotlib.figure")
    from matplotlib.ticker import MaxNLocator

    from raysim.report.canvas import COLOURS, COLUMN, PAGE, Canvas, styled

    clients, labels = counts.shape
    rim, head = 0.35 + 0.07 * min(16, max(map(len, classes))), 0.75  # inches for names and titles
    width = np.clip(rim + 0.3 * clients, COLUMN, PAGE)
    height = np.clip(head + 0.3 * labels, 1.6, 9)
    with styled():
        figure = Canvas(width, height)
        axes = figure.add_subplot()
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
            rasterized=len(client) > SOFT,
        )
        axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, labels - 0.3), xlabel="client", ylabel="class")
        axes.xaxis.set_major_locator(MaxNLocator(min(clients, 20), integer=True, steps=[1, 2, 5, 10]))
        every = int(np.ceil(0.13 / down))
        axes.set_yticks(range(0, labels, every), [name[:16] for name in classes[::every]])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.suptitle(f"{title}; largest bubble: {counts.max():,} samples", fontsize=8, x=0.01, ha="left")
    return figure
