"""Scores against what they cost: rounds, bytes, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.ticker import MaxNLocator

from raysim.report import NoData
from raysim.report.canvas import COLUMN, Canvas, colour, decades, legend, whole_rounds
from raysim.report.folder import of_loss
from raysim.report.groups import Group, runs_of
from raysim.report.series import Curve, plot_curves
from raysim.report.summary import COSTS, GLOBAL, METRIC, final, judged_by

AGAINST = {"rounds": "round", "uplink": "MB up", "traffic": "MB", "time": "s"}
"""What a figure calls the costs of `summary.COSTS`."""


def accuracy(groups: Sequence[Group], against: str) -> Canvas:
    """Test accuracy of the global model; the band is one standard deviation over seeds to each side of the mean."""
    return _curves(groups, "accuracy", "test accuracy (%)", against, 100)


def loss(groups: Sequence[Group], against: str) -> Canvas:
    """Test loss of the global model, mean and standard deviation over seeds."""
    return _curves(groups, "loss", of_loss("test loss", runs_of(groups)), against)


def train_loss(groups: Sequence[Group], against: str) -> Canvas:
    """Mean training loss of each round's clients in their last local epoch."""
    return _curves(groups, "train_loss", of_loss("training loss", runs_of(groups)), against)


def personal(groups: Sequence[Group], against: str) -> Canvas:
    """Accuracy of the clients' own models on their own test samples: correct samples over all samples."""
    return _curves(groups, "personal_accuracy_micro", "personal test accuracy (%)", against, 100)


def worst(groups: Sequence[Group], against: str) -> Canvas:
    """Mean accuracy of the tenth of the clients whose own models do worst on their own test samples."""
    return _curves(groups, "personal_accuracy_worst10", "accuracy, worst tenth (%)", against, 100)


def metric(groups: Sequence[Group], name: str) -> Canvas:
    """A further metric of the task, of the global model on the test samples."""
    return _curves(groups, f"{METRIC}{name}", name.replace("_", " "), "rounds")


def _curves(groups: Sequence[Group], column: str, label: str, against: str, scale: float = 1.0) -> Canvas:
    cost = AGAINST[against]
    curves = [curve for i, group in enumerate(groups) if (curve := _curve(i, group, column, cost, scale)) is not None]
    if not curves:
        raise NoData(f"No run has recorded the {label.partition(' (')[0]}.")
    unit, divisor = _time(max(curve.x[-1] for curve in curves)) if cost == "s" else ("", 1.0)
    figure = Canvas(COLUMN, 2.3)
    axes = figure.add_subplot()
    lines = plot_curves(axes, [replace(curve, x=curve.x / divisor) for curve in curves])
    axes.set_ylabel(label)
    if scale == 100:  # an axis of accuracies ends where accuracies end
        low, high = axes.get_ylim()
        axes.set_ylim(-1 if low < 0 else low, 101 if high > 100 else max(high, 1))
    axes.set_xlabel(
        {"round": "round", "MB up": "sent by clients (MB)", "MB": "sent up and down (MB)", "s": f"time ({unit})"}[cost]
    )
    if cost == "round":
        whole_rounds(axes)
    elif cost != "s":
        axes.set_xscale("log")
        decades(axes.xaxis)
    if len(groups) > 1:
        legend(figure, lines, [curve.label for curve in curves])
    return figure


def _curve(number: int, group: Group, column: str, cost: str, scale: float) -> Curve | None:
    """Of the rounds that all runs of the group have: where one run ends before the others, the mean would jump."""
    tables = [run.columns("rounds") for run in group.runs]
    if any(column not in table for table in tables):
        return None
    recorded = [np.flatnonzero(~np.isnan(table[column])) for table in tables]
    shared = set.intersection(*(set(table["round"][rows]) for table, rows in zip(tables, recorded, strict=True)))
    if not shared:
        return None
    recorded = [rows[np.isin(t["round"][rows], list(shared))] for t, rows in zip(tables, recorded, strict=True)]
    x = np.stack([COSTS[cost](table)[rows] for table, rows in zip(tables, recorded, strict=True)])
    y = np.stack([table[column][rows] for table, rows in zip(tables, recorded, strict=True)])
    return Curve(number, group.label, x.mean(0), scale * y)


def _time(longest: float) -> tuple[str, float]:
    """The unit in which times up to `longest` seconds read best, and its seconds."""
    return next(
        (unit, size) for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if longest >= 3 * size or unit == "s"
    )


def final_scores(groups: Sequence[Group]) -> Canvas:
    """Score at the end of each run (circles), and mean and standard deviation over the seeds of each configuration."""
    by = judged_by(runs_of(groups))
    held = [(g.label, 100 * np.array([s for run in g.runs if (s := final(run, by)) is not None])) for g in groups]
    held = [(label, values) for label, values in held if len(values)]
    if not held:
        raise NoData("No run has been evaluated.")
    figure = Canvas(COLUMN, 0.7 + 0.24 * len(held))
    axes = figure.add_subplot()
    for row, (_, values) in enumerate(held):
        axes.plot(
            values, np.full(len(values), row), "o", color=colour(0), markersize=3.5, markerfacecolor="none", alpha=0.7
        )
        std = values.std(ddof=1) if len(values) > 1 else None
        axes.errorbar(values.mean(), row, xerr=std, fmt="D", color=colour(1), markersize=3.5, capsize=2.5, linewidth=1)
    axes.set_yticks(range(len(held)), [label for label, _ in held])
    axes.set_ylim(len(held) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("final test accuracy (%)" if by == GLOBAL else "final personal test accuracy (%)")
    axes.tick_params(axis="y", length=0)
    return figure
