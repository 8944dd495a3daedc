"""What measures found in saved models and data: tables `measures/NAME`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from raysim.report import NoData
from raysim.report.canvas import (
    COLUMN,
    INK,
    PAGE,
    SEQUENTIAL,
    Canvas,
    colour,
    dash,
    every_nth,
    heat_map,
    legend,
    scatter,
    whole_rounds,
)
from raysim.report.observed import pearson
from raysim.report.runs import Group, Run

BEST = "#d55e00"


def measured(run: Run, name: str) -> tuple[dict[str, np.ndarray], dict]:
    """Columns of a measure's table, and its options and facts. Raises `NoData` where it was not taken."""
    try:
        about = json.loads(run[f"measures/{name}"].schema.metadata[b"raysim.measure"])
    except KeyError:
        raise NoData(f"`raysim measure {name} {run.folder}` has not been run.") from None
    return run.columns(f"measures/{name}"), about


def _measured(groups: Sequence[Group], name: str) -> list[tuple[int, str, list[dict[str, np.ndarray]]]]:
    """Number and label of the groups, and the tables of their runs; without those that have none."""
    held = []
    for i, group in enumerate(groups):
        tables = []
        for run in group.runs:
            try:
                tables.append(measured(run, name)[0])
            except NoData:
                continue
        if tables:
            held.append((i, group.label, tables))
    if not held:
        raise NoData(f"`raysim measure {name}` has not been run.")
    return held


def _last(table: dict[str, np.ndarray], *columns: str) -> list[np.ndarray]:
    """Columns at the last of the measured rounds."""
    there = table["round"] == table["round"].max()
    return [table[column][there] for column in columns]


def _mean_curves(
    groups: Sequence[Group], name: str, x: str, y: str, scale: float = 1.0
) -> tuple[Canvas, Axes, list[tuple[int, np.ndarray, np.ndarray, Line2D]]]:
    """`y` against `x` of a measure, at the last measured round, the mean over seeds that have the same options."""
    figure = Canvas(COLUMN, 2.3)
    axes = figure.add_subplot()
    drawn, labels = [], []
    for i, label, tables in _measured(groups, name):
        places = _last(tables[0], x)[0]
        alike = [_last(t, y)[0] for t in tables if np.array_equal(_last(t, x)[0], places)]
        mean = scale * np.mean(alike, 0)
        (line,) = axes.plot(places, mean, color=colour(i), linestyle=dash(i))
        drawn.append((i, places, mean, line))
        labels.append(label)
    if len(groups) > 1:
        legend(figure, [line for *_, line in drawn], labels)
    return figure, axes, drawn


def correlation(groups: Sequence[Group]) -> Canvas:
    """Sum of each client's weights λ over the rounds against what the client has (FedLAW, table 11).

    Its samples, its heterogeneity degree and their product, and Pearson's r over all clients shown."""
    held = [(i, label, {k: np.concatenate([t[k] for t in tables]) for k in tables[0]}) for i, label, tables in
            _measured(groups, "correlation")]  # fmt: skip
    figure = Canvas(PAGE, 2.3)
    panels = figure.subplots(1, 3, sharey=True)
    words = {"samples": "samples", "degree": "heterogeneity degree", "product": "samples × degree"}
    for axes, (column, label) in zip(panels, words.items(), strict=True):
        dots = scatter(axes, [(i, label, np.stack([t[column], t["weight"]], 1)) for i, label, t in held])
        every = np.concatenate([t[column] for _, _, t in held]), np.concatenate([t["weight"] for _, _, t in held])
        axes.set_title(f"r = {pearson(*every):.3f}", loc="left")
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 4))
    panels[0].set_ylabel("sum of weights λ")
    legend(figure, dots, [label for _, label, _ in held] if len(groups) > 1 else [])
    return figure


def histogram(groups: Sequence[Group]) -> Canvas:
    """Share of the global model's parameters by their value, at the last measured round."""
    figure = Canvas(COLUMN, 2.3)
    axes = figure.add_subplot()
    lines, labels = [], []
    for i, label, tables in _measured(groups, "histogram"):
        low, high = _last(tables[0], "low", "high")
        alike = [_last(t, "share", "near_zero", "near") for t in tables if np.array_equal(_last(t, "low")[0], low)]
        share, near_zero, near = np.mean(alike, 0)
        edges = np.append(low, high[-1])
        lines.append(axes.stairs(100 * share, edges, color=colour(i), linestyle=dash(i), linewidth=1.2))
        told = f"{100 * near_zero[0]:.1f} % smaller than {near[0]:g}"
        labels.append(f"{label}: {told}" if len(groups) > 1 else told)
    axes.set(xlabel="value of the parameter", ylabel="parameters (% a bin)", ylim=(0, None))
    legend(figure, lines, labels)
    return figure


def rescaling(groups: Sequence[Group], variant: str) -> Canvas:
    """Loss or accuracy of the global model times a factor, at the last measured round; a diamond marks the best factor."""
    label, scale, best = {"loss": ("loss (nats)", 1, np.argmin), "accuracy": ("accuracy (%)", 100, np.argmax)}[variant]
    figure, axes, drawn = _mean_curves(groups, "rescaling", "factor", variant, scale)
    for i, x, y, _ in drawn:
        axes.plot(x[best(y)], y[best(y)], "D", color=colour(i), markersize=5, markeredgecolor="white", zorder=5)
    axes.axvline(1, color=INK, linewidth=0.6, zorder=1)
    axes.set(xlabel="factor c of the model", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure


def slice_(groups: Sequence[Group]) -> Canvas:
    """Loss along the first eigenvector of the loss's Hessian, a unit vector, at the last measured round."""
    figure, axes, _ = _mean_curves(groups, "slice", "step", "loss")
    axes.set(xlabel="step a along v₁", ylabel="loss of w + a·v₁ (nats)")
    return figure


def hessian(groups: Sequence[Group], variant: str) -> Canvas:
    """Largest eigenvalues of the loss's Hessian at the last measured round.

    `first` and `ratio` are the first, and the first over the last of them, over the measured rounds."""
    if variant == "spectrum":
        figure, axes, drawn = _mean_curves(groups, "hessian", "index", "eigenvalue")
        for *_, line in drawn:
            line.set_marker("o")
        axes.set(xlabel="index", ylabel="eigenvalue of the Hessian", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return figure
    figure = Canvas(COLUMN, 2.2)
    axes = figure.add_subplot()
    held, lines = _measured(groups, "hessian"), []
    if all(len(np.unique(tables[0]["round"])) == 1 for *_, tables in held):
        raise NoData("The Hessian was measured in a single round.")
    last = max(int(t["index"].max()) for _, _, tables in held for t in tables)
    for i, _, tables in held:
        rounds = np.unique(tables[0]["round"])
        values = [_first_or_ratio(t, variant) for t in tables if np.array_equal(np.unique(t["round"]), rounds)]
        lines += axes.plot(rounds + 1, np.mean(values, 0), color=colour(i), linestyle=dash(i), marker="o")
    axes.set(xlabel="round", ylabel="λ₁ of the Hessian" if variant == "first" else f"λ₁ / λ{last} of the Hessian")
    whole_rounds(axes)
    legend(figure, lines, [label for _, label, _ in held] if len(groups) > 1 else [])
    return figure


def _first_or_ratio(table: dict[str, np.ndarray], variant: str) -> np.ndarray:
    first = table["eigenvalue"][table["index"] == 1]
    return first if variant == "first" else first / table["eigenvalue"][table["index"] == table["index"].max()]


def simplex(run: Run, variant: str) -> Canvas:
    """Loss of all mixtures of three clients' models; the square is the mixture by samples, the star the best.

    `surface` is that of the last measured round, `optima` has the best mixture of every measured round."""
    table, about = measured(run, "simplex")
    corners = np.array([[0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])
    weights = np.stack([table[f"lambda_{i}"] for i in (1, 2, 3)], 1)
    figure = Canvas(COLUMN, 2.9)
    axes = figure.add_subplot()
    axes.set_aspect("equal")
    axes.axis("off")
    axes.plot(*corners[[0, 1, 2, 0]].T, color=INK, linewidth=0.8)
    for corner, client, side in zip(corners, about["clients"], ("top", "top", "bottom"), strict=True):
        away = 0.04 if side == "bottom" else -0.04
        axes.text(corner[0], corner[1] + away, f"client {client}", ha="center", va=side, fontsize=7)
    rounds = np.unique(table["round"])
    best = np.array(
        [weights[there][np.argmin(table["loss"][there])] for t in rounds for there in [table["round"] == t]]
    )
    (square,) = axes.plot(
        *(np.array(about["p"]) @ corners), "s", color="white", markersize=6, markeredgecolor=INK, zorder=4, linestyle=""
    )
    marks, labels = [square], ["by samples"]
    if variant == "surface":
        there = table["round"] == rounds[-1]
        x, y = (weights[there] @ corners).T
        shades: Any = axes.tricontourf(x, y, table["loss"][there], levels=16, cmap=SEQUENTIAL)
        marks += axes.plot(*(best[-1] @ corners), "*", color=BEST, markersize=9, markeredgecolor="white", linestyle="")
        labels.append("best")
        shown = f"loss (nats), round {rounds[-1] + 1}"
    else:
        x, y = (best @ corners).T
        axes.plot(x, y, color="#888888", linewidth=0.6, zorder=2)
        shades = axes.scatter(x, y, c=rounds + 1, cmap=SEQUENTIAL, s=16, zorder=3, linewidths=0)
        shown = "round of the best mixture"
    bar = figure.colorbar(shades, ax=axes, pad=0.02, fraction=0.05, label=shown)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=variant == "optima"))
    legend(figure, marks, labels)
    return figure


def transport(run: Run) -> Canvas:
    """Distance between clients' data, by optimal transport, and between their updates (FedLWS, figure 5).

    On the right one against the other, with Spearman's rank correlation."""
    table, _ = measured(run, "transport")
    clients = np.unique(np.concatenate([table["client"], table["other"]]))
    places = np.searchsorted(clients, table["client"]), np.searchsorted(clients, table["other"])
    figure = Canvas(PAGE, 2.3)
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    words = {"data_distance": "distance of data (OT)", "update_distance": "distance of updates (1 − cos)"}
    every = every_nth(len(clients), 6)
    for axes, (column, title) in zip(panels, words.items(), strict=False):
        matrix = np.full((len(clients), len(clients)), np.nan)  # the diagonal is blank: zeros would take the colours
        matrix[places], matrix[places[::-1]] = table[column], table[column]
        heat_map(axes, matrix, title)
        axes.set(xlabel="client", ylabel="client")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(0, len(clients), every), [str(c) for c in clients[::every]])
    panels[2].scatter(table["data_distance"], table["update_distance"], s=10, color=colour(0), alpha=0.7, linewidths=0)
    panels[2].set(xlabel=words["data_distance"], ylabel="distance of updates")
    rank = pearson(*(_ranks(table[column]) for column in words))
    panels[2].set_title(f"rank correlation {rank:.2f}", loc="left")
    return figure


def trajectory(run: Run) -> Canvas:
    """A client's models in their principal plane over the loss of its training samples (FedALA, figure 4).

    Circles are the starts of its training in each round, dots the ends."""
    table, about = measured(run, "trajectory")
    kind, x, y = table["kind"], table["x"], table["y"]
    grid = kind == "grid"
    wide, high = len(np.unique(x[grid])), len(np.unique(y[grid]))
    figure = Canvas(COLUMN, 2.9)
    axes = figure.add_subplot()
    loss = table["loss"][grid].reshape(high, wide)
    finite = np.isfinite(loss)
    levels = np.geomspace(max(loss[finite].min(), 1e-4 * loss[finite].max()), loss[finite].max(), 20)
    surface = axes.contourf(
        x[grid].reshape(high, wide), y[grid].reshape(high, wide), np.clip(loss, levels[0], levels[-1]),
        levels=levels, cmap=SEQUENTIAL, norm="log",
    )  # fmt: skip
    bar = figure.colorbar(surface, ax=axes, pad=0.02, fraction=0.06, ticks=levels[::5], format="%.2g")
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    start, end = kind == "start", kind == "end"
    axes.plot(np.stack([x[start], x[end]]), np.stack([y[start], y[end]]), color="white", linewidth=0.9)
    (begin,) = axes.plot(
        x[start], y[start], "o", color=colour(1), markerfacecolor="white", markersize=3.5, linestyle=""
    )
    (finish,) = axes.plot(x[end], y[end], "o", color=colour(1), markersize=3.5, linestyle="")
    for i in (0, -1):
        axes.annotate(
            str(table["round"][start][i] + 1), (x[start][i], y[start][i]), (4, 4), textcoords="offset points", fontsize=7,
            color="white", fontweight="bold",
        )  # fmt: skip
    axes.grid(False)
    axes.set_title(f"training loss of client {about['client']} (nats)", loc="left")
    shares = [f"{100 * share:.0f} %" for share in about["explained"]]
    axes.set(xlabel=f"first direction ({shares[0]} of variance)", ylabel=f"second ({shares[1]})")
    legend(figure, [begin, finish], ["start of training", "end"])
    return figure


def _ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks of equal values."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]
