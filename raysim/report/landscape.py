"""The loss around the model: measures of its slices, its Hessian, mixtures of models, and the way of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from raysim.report import NoData
from raysim.report.canvas import COLUMN, INK, SEQUENTIAL, Canvas, colour, dash, legend, panel, whole_rounds
from raysim.report.folder import RunFolder, of_loss
from raysim.report.groups import Group, runs_of
from raysim.report.measured import at_last_round, measured, tables_of

BEST = "#d55e00"
CORNERS = np.array([[0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])  # of the triangle of all mixtures


def _mean_curves(
    groups: Sequence[Group], name: str, x: str, y: str, scale: float = 1.0, mark: str = ""
) -> tuple[Canvas, Axes, list[tuple[int, np.ndarray, np.ndarray, Line2D]]]:
    """`y` against `x` of a measure, at the last measured round, the mean over seeds that have the same options. `mark` is
    what diamonds are."""
    figure, axes = panel(COLUMN, 2.3)
    drawn, labels = [], []
    for i, label, tables in tables_of(groups, name):
        places = at_last_round(tables[0], x)[0]
        alike = [at_last_round(t, y)[0] for t in tables if np.array_equal(at_last_round(t, x)[0], places)]
        mean = scale * np.mean(alike, 0)
        (line,) = axes.plot(places, mean, color=colour(i), linestyle=(0, dash(i)))
        drawn.append((i, places, mean, line))
        labels.append(label)
    lines = [line for *_, line in drawn]
    if len(groups) == 1:
        lines, labels = [], []
    if mark:
        lines.append(Line2D([], [], color=INK, linestyle="", marker="D", markersize=5, markeredgecolor="white"))
        labels.append(mark)
    legend(figure, lines, labels)
    return figure, axes, drawn


def rescaling(groups: Sequence[Group], variant: str) -> Canvas:
    """Loss or accuracy of the global model times a factor, at the last measured round; a diamond marks the best factor."""
    label, scale, best = {
        "loss": (of_loss("loss", runs_of(groups)), 1, np.argmin),
        "accuracy": ("accuracy (%)", 100, np.argmax),
    }[variant]
    figure, axes, drawn = _mean_curves(groups, "rescaling", "factor", variant, scale, "best factor")
    for i, x, y, _ in drawn:
        axes.plot(x[best(y)], y[best(y)], "D", color=colour(i), markersize=5, markeredgecolor="white", zorder=5)
    axes.axvline(1, color=INK, linewidth=0.6, zorder=1)
    axes.set(xlabel="factor c of the model", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure


def slice_(groups: Sequence[Group]) -> Canvas:
    """Loss along the first eigenvector of the loss's Hessian, a unit vector, at the last measured round."""
    figure, axes, _ = _mean_curves(groups, "slice", "step", "loss")
    axes.set(xlabel="step a along v₁", ylabel=of_loss("loss of w + a·v₁", runs_of(groups)))
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
    figure, axes = panel(COLUMN, 2.2)
    held, lines = tables_of(groups, "hessian"), []
    if all(len(np.unique(tables[0]["round"])) == 1 for *_, tables in held):
        raise NoData("The Hessian was measured in a single round.")
    last = max(int(t["index"].max()) for _, _, tables in held for t in tables)
    for i, _, tables in held:
        rounds = np.unique(tables[0]["round"])
        values = [_first_or_ratio(t, variant) for t in tables if np.array_equal(np.unique(t["round"]), rounds)]
        lines += axes.plot(rounds + 1, np.mean(values, 0), color=colour(i), linestyle=(0, dash(i)), marker="o")
    axes.set(xlabel="round", ylabel="λ₁ of the Hessian" if variant == "first" else f"λ₁ / λ{last} of the Hessian")
    whole_rounds(axes)
    legend(figure, lines, [label for _, label, _ in held] if len(groups) > 1 else [])
    return figure


def _first_or_ratio(table: dict[str, np.ndarray], variant: str) -> np.ndarray:
    first = table["eigenvalue"][table["index"] == 1]
    last = table["eigenvalue"][table["index"] == table["index"].max()]
    return np.asarray(first if variant == "first" else first / last)


def simplex(run: RunFolder, variant: str) -> Canvas:
    """Loss of all mixtures of three clients' models; the square is the mixture by samples, the star the best.

    `surface` is that of the last measured round, `optima` has the best mixture of every measured round."""
    table, about = measured(run, "simplex")
    if not np.isfinite(table["loss"]).all():
        raise NoData("Some mixtures have a loss that is no number: a client's model has diverged.")
    places = np.stack([table[f"lambda_{i}"] for i in (1, 2, 3)], 1) @ CORNERS
    rounds = np.unique(table["round"])
    rows = [np.flatnonzero(table["round"] == t) for t in rounds]
    best = np.array([places[those][np.argmin(table["loss"][those])] for those in rows])  # [rounds, 2]
    figure, axes = _triangle(about["clients"])
    (square,) = axes.plot(
        *(np.array(about["p"]) @ CORNERS), "s", color="white", markersize=6, markeredgecolor=INK, zorder=4, linestyle=""
    )
    marks, labels = [square], ["by samples"]
    shades: Any
    if variant == "surface":
        x, y = places[rows[-1]].T
        shades = axes.tricontourf(x, y, table["loss"][rows[-1]], levels=16, cmap=SEQUENTIAL)
        marks += axes.plot(*best[-1], "*", color=BEST, markersize=9, markeredgecolor="white", linestyle="")
        labels.append("best")
        shown = f"{of_loss('loss', [run])}, round {rounds[-1] + 1}"
    else:
        x, y = best.T
        axes.plot(x, y, color="#888888", linewidth=0.6, zorder=2)
        shades = axes.scatter(x, y, c=rounds + 1, cmap=SEQUENTIAL, s=16, zorder=3, linewidths=0)
        shown = "round of the best mixture"
    bar = figure.colorbar(shades, ax=axes, pad=0.02, fraction=0.05, label=shown)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=variant == "optima"))
    legend(figure, marks, labels)
    return figure


def _triangle(clients: Sequence[int]) -> tuple[Canvas, Axes]:
    figure, axes = panel(COLUMN, 2.9)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.plot(*CORNERS[[0, 1, 2, 0]].T, color=INK, linewidth=0.8)
    for (x, y), client, side in zip(CORNERS, clients, ("top", "top", "bottom"), strict=True):
        axes.text(x, y + (0.04 if side == "bottom" else -0.04), f"client {client}", ha="center", va=side, fontsize=7)
    return figure, axes


def trajectory(run: RunFolder) -> Canvas:
    """A client's models in their principal plane over the loss of its training samples (FedALA, figure 4).

    Circles are the starts of its training in each round, dots the ends. The run beside has a colour of its own."""
    table, about = measured(run, "trajectory")
    way = table.get("way", np.zeros(len(table["kind"]), int))  # older tables have one
    beside = about.get("options", {}).get("beside")
    names = [run.folder.resolve().name, *([Path(beside).name] if beside else [])]
    figure, axes = panel(COLUMN, 2.9)
    _loss_surface(axes, table)
    marks: dict[str, Line2D] = {}
    for i, name in enumerate(names):
        here = {column: values[way == i] for column, values in table.items()}
        begin, finish = _way(axes, here, colour(1 + 2 * i))  # green is lost on the surface
        marks |= (
            {f"{name}, end": finish, f"{name}, start": begin} if beside else {"start of training": begin, "end": finish}
        )
    axes.grid(False)
    axes.set_title(of_loss(f"training loss of client {about['client']}", [run]), loc="left")
    shares = [f"{100 * share:.0f} %" for share in about["explained"]]
    axes.set(xlabel=f"first direction ({shares[0]} of variance)", ylabel=f"second ({shares[1]})")
    legend(figure, [*marks.values()], [*marks])
    return figure


def _way(axes: Axes, table: Mapping[str, np.ndarray], hue: str) -> tuple[Line2D, Line2D]:
    """One run's models: its starts and ends, joined in each round; the first and the last round have their numbers."""
    start, end = ({c: table[c][table["kind"] == kind] for c in ("round", "x", "y")} for kind in ("start", "end"))
    axes.plot([start["x"], end["x"]], [start["y"], end["y"]], color="white", linewidth=0.9)
    (begin,) = axes.plot(start["x"], start["y"], "o", color=hue, markerfacecolor="white", markersize=3.5, linestyle="")
    (finish,) = axes.plot(end["x"], end["y"], "o", color=hue, markersize=3.5, linestyle="")
    for i in (0, -1):
        axes.annotate(
            str(start["round"][i] + 1), (start["x"][i], start["y"][i]), (4, 4), textcoords="offset points", fontsize=7,
            color="white", fontweight="bold",
        )  # fmt: skip
    return begin, finish


def _loss_surface(axes: Axes, table: dict[str, np.ndarray]) -> None:
    """Contours of the rows of kind `grid`. Losses have a logarithmic scale, of four decades at most. Raises `NoData` where
    there is a single point, or no two losses above zero that differ."""
    grid = table["kind"] == "grid"
    x, y, loss = (table[column][grid] for column in ("x", "y", "loss"))
    shape = len(np.unique(y)), len(np.unique(x))
    finite = loss[np.isfinite(loss)]
    high = finite.max(initial=0.0)
    low = max(finite.min(initial=np.inf), 1e-4 * high)
    if min(shape) < 2 or not low < high:
        raise NoData(
            "The losses on the grid make no surface; `raysim measure trajectory` takes another grid and margin."
        )
    levels = np.geomspace(low, high, 20)
    surface = axes.contourf(
        x.reshape(shape), y.reshape(shape), np.clip(loss, levels[0], levels[-1]).reshape(shape),
        levels=levels, cmap=SEQUENTIAL, norm="log",
    )  # fmt: skip
    assert isinstance(axes.figure, Canvas)
    bar = axes.figure.colorbar(surface, ax=axes, pad=0.02, fraction=0.06, ticks=levels[::5], format="%.2g")
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
