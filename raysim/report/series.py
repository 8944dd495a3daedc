"""Curves: one for each configuration, as the mean over its seeds with a band of one standard deviation to each side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from raysim.report import NoData
from raysim.report.canvas import COLUMN, Canvas, colour, dash, legend, whole_rounds
from raysim.report.folder import RunFolder
from raysim.report.groups import Group

FEW = 25  # so many points are marked one by one


@dataclass(frozen=True, eq=False)
class Curve:
    """What the runs of a configuration have recorded."""

    number: int  # of the configuration: its colour and its dashes
    label: str
    x: np.ndarray  # [n]
    values: np.ndarray  # [seeds, n]

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.values.mean(0))


def plot(axes: Axes, number: int, x: np.ndarray, y: np.ndarray, **style: Any) -> Line2D:
    """A line in the colour and the dashes of that number."""
    mark = "o" if len(x) <= FEW else None
    (line,) = axes.plot(x, y, **{"color": colour(number), "linestyle": dash(number), "marker": mark} | style)
    return line


def plot_rounds(axes: Axes, number: int, values: np.ndarray) -> Line2D:
    """A line of `values` [rounds] over the rounds, counted from 1, that have one."""
    present = np.flatnonzero(~np.isnan(values))
    return plot(axes, number, present + 1, values[present])


def plot_curves(axes: Axes, curves: Sequence[Curve]) -> list[Line2D]:
    lines = []
    for curve in curves:
        lines.append(plot(axes, curve.number, curve.x, curve.mean))
        if len(curve.values) > 1:
            std = curve.values.std(0, ddof=1)
            axes.fill_between(
                curve.x, curve.mean - std, curve.mean + std, color=colour(curve.number), alpha=0.18, linewidth=0
            )
    return lines


def over_rounds(
    groups: Sequence[Group], series: Callable[[RunFolder], np.ndarray], label: str
) -> tuple[Canvas, Axes, list[Curve]]:
    """A curve of each configuration. `series` gives a value [rounds] for each round, NaN where a run has none."""
    figure = Canvas(COLUMN, 2.3)
    axes = figure.add_subplot()
    curves = []
    for i, group in enumerate(groups):
        found = [values for run in group.runs if (~np.isnan(values := series(run))).any()]
        if not found:
            continue
        values = np.stack([one[: min(map(len, found))] for one in found])
        shared = np.flatnonzero(~np.isnan(values).any(0))  # where a seed lacks a round, the mean would jump
        curves.append(Curve(i, group.label, shared + 1, values[:, shared]))
    if not curves:
        raise NoData(f"No run has recorded this: {' '.join(label.split())}.")
    lines = plot_curves(axes, curves)
    axes.set(xlabel="round", ylabel=label)
    whole_rounds(axes)
    if len(groups) > 1:
        legend(figure, lines, [curve.label for curve in curves])
    return figure, axes, curves
