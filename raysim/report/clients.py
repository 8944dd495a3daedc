"""Who the clients are, how good their models are, and what each weighs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.lines import Line2D

from raysim.report import NoData, blocks
from raysim.report.canvas import COLUMN, INK, SHADED, Canvas, colour, dash, heat_map, legend, name_rows, whole_rounds
from raysim.report.clouds import scatter_groups
from raysim.report.folder import RunFolder
from raysim.report.groups import Group, runs_of
from raysim.report.partition import partition_chart

SPLITS = {"train": "training", "test": "test", "val": "held out"}


def partition(run: RunFolder) -> Canvas:
    """Training samples of each client by class: a bubble's area, or with more than 100 clients a colour, is their number."""
    shares = run.shares
    if shares.counts is None:
        raise NoData("The run's partition was written without labels, by an older raysim.")
    return partition_chart(shares.counts, shares.classes, f"{shares.data}, {len(shares.counts)} clients")


def sizes(run: RunFolder) -> Canvas:
    """Samples of each client, the largest client first."""
    held = {name: sizes for name, sizes in run.shares.sizes.items() if sizes.any()}
    order = np.argsort(-run.shares.sizes["train"], kind="stable")
    figure = Canvas(COLUMN, 1.9)
    axes = figure.add_subplot()
    edges = blocks.edges(len(order))
    floor = np.zeros(len(edges) - 1)
    bars = []
    for i, samples in enumerate(held.values()):
        top = floor + blocks.means(samples[order])
        bars.append(axes.stairs(top, edges, baseline=floor, fill=True, color=colour(i), alpha=0.85))
        floor = top
    axes.set(xlabel="clients, by training samples", ylabel="samples", xlim=(0, len(order)), ylim=(0, None))
    whole_rounds(axes)
    axes.grid(visible=False, axis="x")
    legend(figure, bars, [SPLITS[name] for name in held])
    return figure


def client_accuracy(groups: Sequence[Group]) -> Canvas:
    """Share of the clients whose own models have at most each test accuracy, when last tested, in all runs together.

    A triangle marks the mean accuracy of the worst tenth of the clients, who are shaded."""
    held = []
    for group in groups:
        shares = [_accuracies(run) for run in group.runs]
        if any(len(one) for one in shares):
            held.append((group.number, group.label, 100 * np.sort(np.concatenate(shares))))
    if not held:
        raise NoData("No run has accuracies of its clients' own models (evaluate.personal).")
    figure = Canvas(COLUMN, 2.4)
    axes = figure.add_subplot()
    axes.axhspan(0, 10, color=SHADED, linewidth=0)
    lines = []
    for i, _, values in held:
        ends = blocks.edges(len(values))
        below = 100 * ends / len(values)
        low = values[np.maximum(ends - 1, 0)]
        lines += axes.step(low, below, where="post", color=colour(i), linestyle=(0, dash(i)))
        tenth = values[: max(1, len(values) // 10)].mean()
        axes.plot(tenth, 5, marker="v", color=colour(i), markersize=5, clip_on=False, zorder=5, markeredgecolor="white")
    axes.set(xlabel="client's test accuracy (%)", ylabel="clients with at most this (%)", ylim=(0, 100))
    named = [*zip(lines, (label for _, label, _ in held), strict=True)] if len(groups) > 1 else []
    worst = Line2D([], [], color=INK, linestyle="", marker="v", markersize=5, markeredgecolor="white")
    legend(figure, [*(line for line, _ in named), worst], [*(label for _, label in named), "mean of the worst tenth"])
    return figure


def _accuracies(run: RunFolder) -> np.ndarray:
    """Accuracies of the clients tested at the last evaluation, as fractions; none where the task has no accuracy."""
    tested = run.columns("personal")
    if not len(tested["round"]):
        return np.empty(0)
    last = (tested["round"] == tested["round"].max()) & (tested["samples"] > 0)
    shares = np.asarray(tested["correct"][last] / tested["samples"][last], np.float64)
    return shares[~np.isnan(shares)]


def weights(run: RunFolder) -> Canvas:
    """Aggregation weight λ of each client in each round, the largest client on top. Blank: it was not in the round.

    Of more than 2,000 clients, neighbours share a line, which has the mean of those that were in the round."""
    table = run.columns("clients")
    aggregated = ~np.isnan(table["weight"])
    if not aggregated.any():
        raise NoData("No client's model has been aggregated.")
    size = run.shares.sizes["train"]
    order = np.argsort(-size, kind="stable")
    place = blocks.block_of(len(size))[np.argsort(order)]
    rows = len(blocks.edges(len(size))) - 1
    values = blocks.cells(
        (place[table["client"][aggregated]], table["round"][aggregated]), 100 * table["weight"][aggregated],
        (rows, int(table["round"].max()) + 1),
    )  # fmt: skip
    height = float(np.clip(0.8 + 0.12 * rows, 1.8, 3.4))
    figure = Canvas(COLUMN, height)
    axes = figure.add_subplot()
    heat_map(axes, values, "aggregation weight λ (%)", left=1)
    axes.set(xlabel="round", ylabel="client, largest on top")
    whole_rounds(axes)
    if rows == len(order):
        name_rows(axes, [str(client) for client in order], height - 0.8)
    else:
        axes.set_yticks([])
    return figure


def weights_by_size(groups: Sequence[Group]) -> Canvas:
    """Aggregation weight λ of each client in each round against its share of the round's training samples.

    On the dashed line, a client weighs as much as in FedAvg."""
    figure, axes, clouds, dots = scatter_groups(groups, _share_and_weight, "No client's model has been aggregated.")
    top = max(cloud.points.max() for cloud in clouds)
    line = axes.plot([0, top], [0, top], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set(xlabel="share of the round's samples (%)", ylabel="aggregation weight λ (%)")
    legend(figure, [*dots, *line], [*(cloud.label for cloud in clouds), "by samples"])
    return figure


def weigh_by_size(groups: Sequence[Group]) -> bool:
    """Whether every client has weighed as much as its share of the samples, as in FedAvg."""
    return all(np.allclose(*_share_and_weight(run).T) for run in runs_of(groups))


def _share_and_weight(run: RunFolder) -> np.ndarray:
    """[n, 2]: share of the round's aggregated samples (%) and weight (%) of every client and round."""
    table = run.columns("clients")
    aggregated = ~np.isnan(table["weight"])
    rounds, samples, weight = (
        table["round"][aggregated],
        table["samples"][aggregated].astype(float),
        table["weight"][aggregated],
    )
    totals = np.bincount(rounds, samples)
    return 100 * np.stack([samples / totals[rounds], weight], 1) if len(rounds) else np.empty((0, 2))
