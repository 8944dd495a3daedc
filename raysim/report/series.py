"""Line charts: what they show, apart from how it is drawn. `Chart.canvas` draws one for paper, a page for a screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from raysim.report import NoData
from raysim.report.canvas import COLUMN, INK, Canvas, colour, dash, decades, legend, mark, panel, whole_rounds
from raysim.report.folder import RunFolder
from raysim.report.groups import Group
from raysim.report.summary import COSTS

FEW = 25  # so many points are marked one by one

AGAINST = {"rounds": "round", "uplink": "MB up", "traffic": "MB", "time": "s", "clock": "simulated s"}
"""What a figure calls the costs of `summary.COSTS`."""
LABELS = {
    "rounds": "round",
    "uplink": "sent by clients (MB)",
    "traffic": "sent up and down (MB)",
    "time": "time (s)",
    "clock": "simulated time (s)",
}


def axes_of(run: RunFolder) -> list[str]:
    """The costs that a run has: simulated time only with a clock."""
    clock = np.isfinite(COSTS["simulated s"](run.columns("rounds"))).all()
    return [axis for axis in AGAINST if axis != "clock" or clock]


OVER_SEEDS = "± 1 std over seeds"  # what the band of a configuration is


@dataclass(frozen=True, eq=False)
class Curve:
    """Values over rounds, of one run or as the mean of several."""

    number: int  # its colour and its dashes
    label: str
    runs: tuple[RunFolder, ...]  # whose rounds these are
    rounds: np.ndarray  # [n] from 0
    mean: np.ndarray  # [n]
    std: np.ndarray | None = None  # [n] how far a band reaches to each side

    @classmethod
    def of(cls, group: Group, runs: Sequence[RunFolder], rounds: np.ndarray, values: np.ndarray) -> Curve:
        """Of `values` [seeds, n]."""
        std = values.std(0, ddof=1) if len(values) > 1 else None
        return cls(group.number, group.label, tuple(runs), rounds, values.mean(0), std)

    @classmethod
    def one(cls, number: int, label: str, run: RunFolder, values: np.ndarray) -> Curve:
        """Of one run's `values` [rounds], where it has them."""
        there = np.flatnonzero(~np.isnan(values))
        return cls(number, label, (run,), there, values[there])

    def spent(self, against: str) -> np.ndarray:
        """[n] what had been spent at the end of each of the rounds, the mean over the runs. Raises `NoData` where a run does
        not count that."""
        if any(against not in axes_of(run) for run in self.runs):
            raise NoData(f"{self.label} has no simulated time: its clock is not set.")
        tables = [run.columns("rounds") for run in self.runs]
        spent = [COSTS[AGAINST[against]](table)[np.searchsorted(table["round"], self.rounds)] for table in tables]
        return np.asarray(np.mean(spent, 0))


@dataclass(frozen=True, eq=False)
class Chart:
    """A line chart of curves over rounds, or over what the rounds had cost. A curve without points is left out; where none
    is left, it raises `NoData`."""

    curves: list[Curve]
    label: str  # of the vertical axis, with its unit
    against: str = "rounds"  # one of AGAINST
    percent: bool = False  # an axis of accuracies, which ends where they end
    log: bool = False
    zero: bool = False  # whether a line marks zero
    band: str = OVER_SEEDS  # what bands are
    marks: tuple[int | None, ...] = ()  # of each curve, the place of its diamond
    mark: str = ""  # what diamonds are
    named: bool = True  # whether a legend names the curves

    def __post_init__(self) -> None:
        object.__setattr__(self, "curves", [curve for curve in self.curves if len(curve.rounds)])
        if not self.curves:
            raise NoData(f"In no round have all seeds recorded this: {' '.join(self.label.split())}.")

    def canvas(self) -> Canvas:
        unit, divisor = ("", 1.0)
        if self.against == "time":
            unit, divisor = unit_of(max(curve.spent("time")[-1] for curve in self.curves))
        figure, axes = panel(COLUMN, 2.3)
        lines: list[Any] = []
        for curve in self.curves:
            x = curve.spent(self.against) / divisor
            lines.append(plot(axes, curve.number, x, curve.mean))
            if curve.std is not None:
                low, high = curve.mean - curve.std, curve.mean + curve.std
                axes.fill_between(x, low, high, color=colour(curve.number), alpha=0.18, linewidth=0)
        words = [curve.label for curve in self.curves]
        if not self.named:
            lines, words = [], []
        if any(curve.std is not None for curve in self.curves):
            lines, words = [*lines, Patch(color=INK, alpha=0.18, linewidth=0)], [*words, self.band]
        if self.zero:
            axes.axhline(0, color=INK, linewidth=0.6, zorder=1)
        if diamonds := self._diamonds(axes, divisor):
            lines, words = [*lines, diamonds[0]], [*words, self.mark]
        self._axes(axes, f"time ({unit})" if unit else LABELS[self.against])
        legend(figure, lines, words)
        return figure

    def _diamonds(self, axes: Axes, divisor: float) -> list[Line2D]:
        style: dict[str, Any] = {"markersize": 5, "markeredgecolor": "white", "zorder": 5, "linestyle": ""}
        return [
            axes.plot(
                curve.spent(self.against)[at] / divisor, curve.mean[at], "D", color=colour(curve.number), **style
            )[0]
            for curve, at in zip(self.curves, self.marks, strict=False)
            if at is not None
        ]

    def _axes(self, axes: Axes, words: str) -> None:
        axes.set(xlabel=words, ylabel=self.label)
        if self.percent:
            low, high = axes.get_ylim()
            axes.set_ylim(-1 if low < 0 else low, 101 if high > 100 else max(high, 1))
        if self.log:
            axes.set_yscale("log")
            decades(axes.yaxis)
        if self.against == "rounds":
            whole_rounds(axes)
        elif self.against != "time":
            axes.set_xscale("log")
            decades(axes.xaxis)


def unit_of(longest: float) -> tuple[str, float]:
    """The unit in which times up to `longest` seconds read best, and its seconds."""
    return next(
        (unit, size) for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if longest >= 3 * size or unit == "s"
    )


def plot(axes: Axes, number: int, x: np.ndarray, y: np.ndarray, **style: Any) -> Line2D:
    """A line in the colour, the dashes and the marks of that number."""
    own = {"color": colour(number), "linestyle": (0, dash(number)), "marker": mark(number) if len(x) <= FEW else None}
    (line,) = axes.plot(x, y, **{**own, **style})
    return line


def plot_rounds(axes: Axes, number: int, values: np.ndarray) -> Line2D:
    """A line of `values` [rounds] over the rounds, counted from 1, that have one."""
    present = np.flatnonzero(~np.isnan(values))
    return plot(axes, number, present + 1, values[present])


def over_rounds(groups: Sequence[Group], series: Callable[[RunFolder], np.ndarray], label: str, **looks: Any) -> Chart:
    """A curve of each configuration. `series` gives a value [rounds] for each round, NaN where a run has none; `looks`
    are further fields of the chart."""
    curves = []
    for group in groups:
        found = [(run, values) for run in group.runs if (~np.isnan(values := series(run))).any()]
        if not found:
            continue
        least = min(len(values) for _, values in found)
        values = np.stack([values[:least] for _, values in found])
        shared = np.flatnonzero(~np.isnan(values).any(0))  # where a seed lacks a round, the mean would jump
        curves.append(Curve.of(group, [run for run, _ in found], shared, values[:, shared]))
    return Chart(curves, label, named=len(groups) > 1, **looks)
