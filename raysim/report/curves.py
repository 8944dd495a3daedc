"""Scores against what they cost: rounds, bytes, time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from raysim.report import NoData
from raysim.report.canvas import COLUMN, INK, Canvas, colour, decades, legend, mark, named_rows, panel
from raysim.report.folder import of_loss
from raysim.report.groups import Group, runs_of
from raysim.report.series import Chart, Curve
from raysim.report.summary import GLOBAL, METRIC, PERSONAL, counted, final, judged_by, total

ENDS = {GLOBAL: "final test accuracy (%)", PERSONAL: "final personal test accuracy (%)"}
RUN_MEAN = (("o", "none"), ("D", None))  # marks of a run and of a mean, and how they are filled


def accuracy(groups: Sequence[Group], against: str) -> Chart:
    """Test accuracy of the global model, mean and standard deviation over seeds."""
    return _over(groups, "accuracy", "test accuracy (%)", against)


def loss(groups: Sequence[Group], against: str) -> Chart:
    """Test loss of the global model, mean and standard deviation over seeds."""
    return _over(groups, "loss", of_loss("test loss", runs_of(groups)), against)


def train_loss(groups: Sequence[Group], against: str) -> Chart:
    """Mean training loss of each round's clients in their last local epoch."""
    return _over(groups, "train_loss", of_loss("training loss", runs_of(groups)), against)


def personal(groups: Sequence[Group], against: str) -> Chart:
    """Accuracy of the clients' own models on their own test samples: correct samples over all samples."""
    return _over(groups, "personal_accuracy_micro", "personal test accuracy (%)", against)


def worst(groups: Sequence[Group], against: str) -> Chart:
    """Mean accuracy of the tenth of the clients whose own models do worst on their own test samples."""
    return _over(groups, "personal_accuracy_worst10", "accuracy, worst tenth (%)", against)


def metric(groups: Sequence[Group], name: str) -> Chart:
    """A further metric of the task, of the global model on the test samples."""
    return _over(groups, f"{METRIC}{name}", name.replace("_", " "), "rounds")


def _over(groups: Sequence[Group], column: str, label: str, against: str) -> Chart:
    percent = label.endswith("(%)")
    curves = [curve for group in groups if (curve := _curve(group, column, 100 if percent else 1)) is not None]
    return Chart(curves, label, against, percent, named=len(groups) > 1)


def _curve(group: Group, column: str, scale: float) -> Curve | None:
    """Of the rounds that all runs of the group have: where one run ends before the others, the mean would jump. Runs that
    failed are shown where the group has no others."""
    runs = counted(group.runs) or group.runs
    tables = [run.columns("rounds") for run in runs]
    if any(column not in table for table in tables):
        return None
    recorded = [table["round"][~np.isnan(table[column])] for table in tables]
    shared = reduce(np.intersect1d, recorded)
    if not len(shared):
        return None
    values = np.stack([table[column][np.searchsorted(table["round"], shared)] for table in tables])
    return Curve.of(group, runs, shared, scale * values)


def final_scores(groups: Sequence[Group]) -> Canvas:
    """Score at the end of each run. Of several seeds: circles are the runs, a diamond their mean with one deviation."""
    by = judged_by(runs_of(groups))
    held = _ends(groups, by)
    figure, axes = panel(COLUMN, 0.7 + 0.24 * len(held))
    for row, (group, values) in enumerate(held):
        shade = colour(group.number)
        if len(values) > 1:
            axes.plot(
                values, np.full(len(values), row), "o", color=shade, markersize=3.5, markerfacecolor="none", alpha=0.7
            )
        std = values.std(ddof=1) if len(values) > 1 else None
        axes.errorbar(values.mean(), row, xerr=std, fmt="D", color=shade, markersize=3.5, capsize=2.5, linewidth=1)
    named_rows(figure, axes, [group.label for group, _ in held])
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_xlabel(ENDS[by])
    if any(len(values) > 1 for _, values in held):
        style: dict[str, Any] = {"color": INK, "linestyle": "", "markersize": 3.5}
        marks = [Line2D([], [], marker=mark, markerfacecolor=face, **style) for mark, face in RUN_MEAN]
        legend(figure, marks, ["a run", "mean ± 1 std over seeds"])
    return figure


def pareto(groups: Sequence[Group]) -> Canvas:
    """Score at the end against what clients have sent by then, means over seeds with one standard deviation.

    Of the configurations on the line, none has a better score for fewer bytes. The others are beaten in both."""
    by = judged_by(runs_of(groups))
    held = [(g, v, np.mean([total(run, "MB up") or 0.0 for run in counted(g.runs)])) for g, v in _ends(groups, by)]
    if len(held) < 2:
        raise NoData("A comparison of scores and bytes needs two configurations.")
    figure, axes = panel(COLUMN, 2.5)
    dots: list[Any] = []
    for group, values, sent in held:
        std = values.std(ddof=1) if len(values) > 1 else None
        style: dict[str, Any] = {"fmt": mark(group.number), "color": colour(group.number)}
        dots.append(axes.errorbar(sent, values.mean(), yerr=std, markersize=4.5, capsize=2, **style))
    best = front(np.array([sent for *_, sent in held]), np.array([values.mean() for _, values, _ in held]))
    x, y = np.array([(held[i][2], held[i][1].mean()) for i in best]).T
    (line,) = axes.step(x, y, where="post", color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    if x.min() > 0:
        axes.set_xscale("log")
        decades(axes.xaxis)
    axes.set(xlabel="sent by clients (MB)", ylabel=ENDS[by])
    legend(figure, [*dots, line], [*(group.label for group, *_ in held), "best for its bytes"])
    return figure


def equally_costly(groups: Sequence[Group]) -> bool:
    """Whether clients have sent as much in every run."""
    return len({total(run, "MB up") for run in counted(runs_of(groups))}) < 2


def front(cost: np.ndarray, score: np.ndarray) -> list[int]:
    """Those to which no other is at most as costly and at least as good, the cheapest first."""
    found: list[int] = []
    for i in np.lexsort((-score, cost)).tolist():
        if not found or score[i] > score[found[-1]]:
            found.append(i)
    return found


def _ends(groups: Sequence[Group], by: str) -> list[tuple[Group, np.ndarray]]:
    """The score (%) at the end of each run [seeds], of the groups that have any."""
    held = [(g, 100 * np.array([s for run in counted(g.runs) if (s := final(run, by)) is not None])) for g in groups]
    if not any(len(values) for _, values in held):
        raise NoData("No run has been evaluated.")
    return [(group, values) for group, values in held if len(values)]
