"""What models get right: class by class, and client by client, from the measures `confusion` and `personalization`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raysim.report import NoData
from raysim.report.canvas import COLUMN, INK, PAGE, Canvas, colour, every_nth, heat_map, legend, mark, name_rows, panel
from raysim.report.clouds import scatter_groups
from raysim.report.folder import RunFolder
from raysim.report.groups import Group
from raysim.report.measured import measured, tables_of

ON_LIGHT = "#222222"  # text on the light half of a map's colours, also on a dark page
TOUCHING = 33  # marks that are apart in a column's width
WRITTEN = 12  # classes up to which a confusion matrix has numbers in its cells


def confusion(run: RunFolder) -> Canvas:
    """Of the test samples of each class, those that the final model takes for each class; on the diagonal it is right."""
    table, _ = measured(run, "confusion")
    counts = _matrix(table)
    with np.errstate(invalid="ignore"):
        shares = 100 * counts / counts.sum(1, keepdims=True)
    names = _names(run, len(counts))
    width = COLUMN if len(counts) <= 2 * WRITTEN else PAGE
    height = float(np.clip(0.9 + 0.2 * len(counts), 2.2, 0.85 * width))
    figure, axes = panel(width, height)
    heat_map(axes, shares, "test samples of the class (%)", limits=(0, 100))
    if len(counts) <= WRITTEN:
        for (row, column), share in np.ndenumerate(shares):
            if share >= 0.5:
                shade = "white" if share < 60 else ON_LIGHT
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=6, color=shade)
    name_rows(axes, names, height - 0.9)
    every = every_nth(len(names), 10 if width == COLUMN else 24)
    short = [name[:8] for name in names]
    axes.set_xticks(range(0, len(names), every), short[::every], rotation=90 if max(map(len, short)) > 2 else 0)
    axes.set(xlabel="taken for", ylabel="class")
    return figure


def class_accuracy(groups: Sequence[Group]) -> Canvas:
    """Share of the test samples of each class that the final model takes for it; bars are one std over seeds."""
    held = [(number, label, list(map(_matrix, tables))) for number, label, tables in tables_of(groups, "confusion")]
    classes, *others = sorted({len(counts) for _, _, matrices in held for counts in matrices})
    if others:
        raise NoData(f"Class by class, runs with {classes} classes cannot be compared with runs with {others[0]}.")
    wide = classes > 12 or classes * len(held) > TOUCHING
    figure, axes = panel(PAGE if wide else COLUMN, 2.4)
    marks = []
    for place, (number, _, matrices) in enumerate(held):
        counts = np.stack(matrices)  # [seeds, C, C]
        with np.errstate(invalid="ignore"):
            right = 100 * counts.diagonal(axis1=1, axis2=2) / counts.sum(2)
        x = np.arange(classes) + 0.8 * ((place + 0.5) / len(held) - 0.5)
        std = right.std(0, ddof=1) if len(right) > 1 else None
        style: dict[str, Any] = {"fmt": mark(number), "color": colour(number), "markersize": 3.5, "linewidth": 0.8}
        marks.append(axes.errorbar(x, right.mean(0), yerr=std, **style))
    names = _names(groups[0].first, classes)
    every = every_nth(classes, 24 if wide else 12)
    short = [name[:12] for name in names]
    axes.set_xticks(range(0, classes, every), short[::every], rotation=90 if max(map(len, short)) > 2 else 0)
    axes.set(xlabel="class", ylabel="test accuracy (%)", ylim=(None, 101))
    axes.grid(visible=False, axis="x")
    legend(figure, marks, [label for _, label, _ in held] if len(groups) > 1 else [])
    return figure


def personalization(groups: Sequence[Group]) -> Canvas:
    """Accuracy of the final global model and of each client's own one, on the client's own test samples.

    Clients above the dashed line gain by a model of their own."""
    missing = "`raysim measure personalization` has not been run, or not since the run has gone on."
    figure, axes, clouds, dots = scatter_groups(groups, _before_and_after, missing)
    low = min(cloud.points.min() for cloud in clouds)
    line = axes.plot([low, 100], [low, 100], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set(xlabel="client's accuracy with the global model (%)", ylabel="accuracy of its own model (%)")
    labels = [
        f"{cloud.label}: " * (len(groups) > 1)
        + f"mean {cloud.points[:, 0].mean():.1f} to {cloud.points[:, 1].mean():.1f}"
        for cloud in clouds
    ]
    legend(figure, [*dots, *line], [*labels, "alike"])
    return figure


def _before_and_after(run: RunFolder) -> np.ndarray:
    """[n, 2] accuracies (%) of every tested client."""
    try:
        table, _ = measured(run, "personalization")
    except NoData:
        return np.empty((0, 2))
    return 100 * np.stack([table["before"], table["after"]], 1)


def _matrix(table: dict[str, np.ndarray]) -> np.ndarray:
    """[C, C] test samples by class and by what they were taken for."""
    classes = int(table["label"].max()) + 1
    counts = np.zeros((classes, classes))
    counts[table["label"], table["predicted"]] = table["samples"]
    return counts


def _names(run: RunFolder, classes: int) -> Sequence[str]:
    there = run.shares.classes if "partition" in run.tables else ()
    return there if len(there) == classes else [str(c) for c in range(classes)]
