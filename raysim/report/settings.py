"""Scores against a setting, on a numeric axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from raysim.report.canvas import COLUMN, INK, Canvas, legend, styled
from raysim.report.series import plot


@dataclass(frozen=True)
class Panel:
    """One score against one setting; `lines` has the setting, the mean and the standard deviation of each point."""

    score: str
    setting: str
    lines: dict[str, list[tuple[float, float, float]]]
    gain: bool = False  # whether a line marks zero


def panels_of(panels: Sequence[Panel]) -> Canvas:
    """A row for each score and a column for each setting."""
    rows = list(dict.fromkeys(panel.score for panel in panels))
    columns = list(dict.fromkeys(panel.setting for panel in panels))
    named = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    with styled():
        figure = Canvas(COLUMN * len(columns), 2.2 * len(rows))
        grid = figure.subplots(len(rows), len(columns), squeeze=False)
        handles = {}
        for panel in panels:
            axes = grid[rows.index(panel.score), columns.index(panel.setting)]
            for name, points in panel.lines.items():
                x, mean, std = np.array(points).T
                handles[name] = plot(axes, named.index(name), x, mean)
                axes.errorbar(x, mean, std, fmt="none", ecolor=handles[name].get_color(), capsize=2, linewidth=0.8)
            axes.set(xlabel=panel.setting, ylabel=panel.score)
            _scaled(axes, sorted({x for points in panel.lines.values() for x, *_ in points}))
            if panel.gain:
                axes.axhline(0, color=INK, linewidth=0.6, zorder=1)
        legend(figure, [handles[name] for name in named if name], [name for name in named if name])
    return figure


def _scaled(axes: Axes, places: Sequence[float]) -> None:
    """A logarithmic axis where its places span more than a decade and a half; zero is then a step to the left."""
    above = [place for place in places if place > 0]
    if above and max(above) / min(above) > 30:
        if 0 in places:
            axes.set_xscale("symlog", linthresh=min(above))
        else:
            axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
