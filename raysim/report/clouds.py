"""Clouds of points, one for each configuration, and correlations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection

from raysim.report import NoData
from raysim.report.canvas import COLUMN, Canvas, colour, mark, panel
from raysim.report.folder import RunFolder
from raysim.report.groups import Group

DOTS = 5000  # of a cloud; of more, every n-th is drawn


class Cloud(NamedTuple):
    number: int  # of the configuration: its colour and its mark
    label: str
    points: np.ndarray  # [n, 2]


def scatter(axes: Axes, clouds: Iterable[Cloud]) -> list[PathCollection]:
    found = []
    for i, _, points in clouds:
        x, y = points[:: -(-len(points) // DOTS)].T
        style: dict[str, Any] = {"color": colour(i), "marker": mark(i), "alpha": 0.6, "linewidths": 0}
        found.append(axes.scatter(x, y, s=14, rasterized=len(x) > 2000, **style))
    return found


def scatter_groups(
    groups: Sequence[Group], points: Callable[[RunFolder], np.ndarray], missing: str
) -> tuple[Canvas, Axes, list[Cloud], list[PathCollection]]:
    """A figure with a cloud of each configuration, of the `points` [n, 2] of all its runs. One without points is left
    out. Raises `NoData` with the text `missing` where none has any."""
    found = [Cloud(g.number, g.label, np.concatenate([points(run) for run in g.runs])) for g in groups]
    clouds = [cloud for cloud in found if len(cloud.points)]
    if not clouds:
        raise NoData(missing)
    figure, axes = panel(COLUMN, 2.5)
    return figure, axes, clouds, scatter(axes, clouds)


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation; NaN where one of them is constant."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.corrcoef(a, b)[0, 1])


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation; NaN where one of them is constant."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2)[place])
