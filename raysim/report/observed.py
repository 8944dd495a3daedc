"""What the papers' instruments saw of every round: table `notes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from raysim.report import NoData
from raysim.report.canvas import (
    COLUMN,
    INK,
    PAGE,
    Canvas,
    colour,
    dash,
    decades,
    heat_map,
    legend,
    name_rows,
    scatter,
    whole_rounds,
)
from raysim.report.quantities import quantities
from raysim.report.runs import Group, Run, clouds

FEW = 25  # so many points are marked one by one
CLIENTS = 7  # so many clients have a line each

COHERENCES = {"mean": "mean cosine of updates", "paper": "local gradient coherence"}
HETEROGENEITIES = {
    "cosine": "heterogeneity coherence\n(cosine)",
    "overlap": "heterogeneity coherence\n(1 − total variation)",
}
BALANCES = {
    "fedlaw_ratio": "FedLAW's r\n‖γd‖ / ‖(1 − γ)w‖",
    "fedlws_ratio": "FedLWS's r\n‖(1 − γ)w‖ / ‖γd‖",
    "gamma": "shrink factor γ",
    "gradient": "global gradient ‖γd‖",
    "decay": "pull of shrinking ‖(1 − γ)w‖",
    "tau": "spread of the clients τ",
    "norm": "norm of the model ‖w‖",
    "moved": "step of the mean ‖d‖",
}
RATIOS = ("fedlaw_ratio", "fedlws_ratio")


def noted(run: Run, name: str) -> np.ndarray:
    """[rounds, ...] what an instrument saw, NaN where nothing; empty where it was not there."""
    found = quantities(run).get(name)
    return np.empty(0) if found is None else found.values


def coherence(groups: Sequence[Group], variant: str) -> Canvas:
    """Local gradient coherence of each round (FedLAW, definition 5.1): how much the clients' updates point one way.

    A diamond marks the critical point, the first round in which it is no longer positive."""
    figure, axes, drawn = _over_rounds(groups, lambda run: noted(run, f"coherence.{variant}"), COHERENCES[variant])
    axes.axhline(0, color=INK, linewidth=0.6, zorder=1)
    for i, x, mean in drawn:
        if (critical := critical_point(mean)) is not None:
            axes.plot(
                x[critical], mean[critical], "D", color=colour(i), markersize=5, markeredgecolor="white", zorder=5
            )
    return figure


def critical_point(values: np.ndarray) -> int | None:
    """Place of the first value that is not positive after one that is; None where there is none."""
    there = np.flatnonzero((values[1:] <= 0) & (values[:-1] > 0))
    return int(there[0]) + 1 if len(there) else None


def coherence_groups(run: Run) -> Canvas:
    """Mean cosine of the updates in each round, of all clients and of the groups that the instrument was given."""
    prefix = "coherence.mean"
    found = {name: q.values for name, q in quantities(run).items() if name.startswith(f"{prefix}_")}
    if not found:
        raise NoData("The instrument coherence was given no groups of clients.")
    figure = Canvas(COLUMN, 2.3)
    axes = figure.add_subplot()
    lines = []
    for i, (_, values) in enumerate(shown := [("all clients", noted(run, prefix)), *found.items()]):
        there = np.flatnonzero(~np.isnan(values))
        mark = "o" if len(there) <= FEW else None
        lines += axes.plot(there + 1, values[there], color=colour(i), linestyle=dash(i), marker=mark)
    axes.axhline(0, color=INK, linewidth=0.6, zorder=1)
    axes.set(xlabel="round", ylabel=COHERENCES["mean"])
    whole_rounds(axes)
    legend(figure, lines, [name.removeprefix(f"{prefix}_") for name, _ in shown])
    return figure


def heterogeneity(groups: Sequence[Group], variant: str) -> Canvas:
    """Heterogeneity coherence of each round (FedLAW, definition 5.2).

    How like the classes that the round weighed are to those of all clients."""
    return _over_rounds(groups, lambda run: noted(run, f"heterogeneity.{variant}"), HETEROGENEITIES[variant])[0]


def classes(run: Run) -> Canvas:
    """Classes that each round weighed: the mean of its clients' class shares by their weights λ."""
    values = noted(run, "heterogeneity.classes")  # [rounds, C]
    if not len(values):
        raise NoData("The run has no instrument heterogeneity.")
    names = run.shares.classes or [str(c) for c in range(values.shape[1])]
    height = float(np.clip(0.75 + 0.14 * len(names), 1.8, 3.4))
    figure = Canvas(COLUMN, height)
    axes = figure.add_subplot()
    heat_map(axes, 100 * values.T, "share of the class in the round (%)", left=1)
    axes.set(xlabel="round", ylabel="class")
    name_rows(axes, names, height - 0.75)
    whole_rounds(axes)
    return figure


def objective(run: Run) -> Canvas:
    """Training loss of each round's clients before and after their local training, weighted by size (FedALA, figure 5)."""
    figure = Canvas(COLUMN, 2.3)
    axes = figure.add_subplot()
    for i, moment in enumerate(("before", "after")):
        values = noted(run, f"objective.{moment}")
        if not len(values):
            raise NoData("The run has no instrument objective.")
        there = np.flatnonzero(~np.isnan(values))
        marker = "o" if len(there) <= FEW else None
        axes.plot(there + 1, values[there], color=colour(i), linestyle=dash(i), marker=marker)
    axes.set(xlabel="round", ylabel="training loss (nats)", yscale="log")
    decades(axes.yaxis)
    whole_rounds(axes)
    legend(figure, axes.get_lines(), ["before local training", "after"])
    return figure


def balance(groups: Sequence[Group], variant: str) -> Canvas:
    """What shrinking does in each round: the clients' pull against the decay of the old model.

    The r of FedLAW and the r of FedLWS are each other's inverse."""
    return _over_rounds(groups, lambda run: noted(run, f"balance.{variant}"), BALANCES[variant])[0]


def norm(groups: Sequence[Group]) -> Canvas:
    """Norm of the global model after each round."""

    def norms(run: Run) -> np.ndarray:
        table = run.columns("layers")
        return np.sqrt(np.bincount(table["round"], table["norm"] ** 2)) if len(table["round"]) else np.empty(0)

    return _over_rounds(groups, norms, "norm of the model ‖w‖")[0]


def _over_rounds(
    groups: Sequence[Group], series: Callable[[Run], np.ndarray], label: str
) -> tuple[Canvas, Axes, list[tuple[int, np.ndarray, np.ndarray]]]:
    """A curve of each group, mean and standard deviation over its seeds: the group's number, rounds, means."""
    figure = Canvas(COLUMN, 2.3)
    axes = figure.add_subplot()
    drawn, lines = [], []
    for i, group in enumerate(groups):
        found = [values for run in group.runs if (~np.isnan(values := series(run))).any()]
        if not found:
            continue
        values = np.stack([one[: min(map(len, found))] for one in found])
        there = np.flatnonzero(~np.isnan(values).any(0))  # a mean over seeds of which some lack the round would jump
        mean = values[:, there].mean(0)
        lines += axes.plot(
            there + 1, mean, color=colour(i), linestyle=dash(i), marker="o" if len(there) <= FEW else None
        )
        if len(found) > 1:
            sd = values[:, there].std(0, ddof=1)
            axes.fill_between(there + 1, mean - sd, mean + sd, color=colour(i), alpha=0.18, linewidth=0)
        drawn.append((i, there + 1, mean))
    if not drawn:
        raise NoData(f"No run has recorded this: {' '.join(label.split())}.")
    axes.set(xlabel="round", ylabel=label)
    whole_rounds(axes)
    if len(groups) > 1:
        legend(figure, lines, [groups[i].label for i, _, _ in drawn])
    return figure, axes, drawn


def ratios(groups: Sequence[Group], variant: str) -> Canvas:
    """How the ratio r is distributed over rounds and runs, and the normal distribution with its mean and deviation."""
    values = np.concatenate([noted(run, f"balance.{variant}") for group in groups for run in group.runs])
    values = values[~np.isnan(values)]
    if len(values) < 2:
        raise NoData("No run has recorded the ratio with the instrument balance.")
    figure = Canvas(COLUMN, 2.2)
    axes = figure.add_subplot()
    count, edges = np.histogram(values, bins=min(40, max(5, len(values) // 5)), density=True)
    bars = axes.stairs(count, edges, fill=True, color=colour(0), alpha=0.6)
    mean, sd = values.mean(), values.std(ddof=1)
    x = np.linspace(*axes.get_xlim(), 200)
    (line,) = axes.plot(x, np.exp(-(((x - mean) / sd) ** 2) / 2) / (sd * np.sqrt(2 * np.pi)), color=colour(1))
    axes.set(xlabel=", ".join(BALANCES[variant].split("\n")), ylabel="density", ylim=(0, None))
    legend(figure, [bars, line], [f"{len(values)} rounds", f"normal, {mean:.3g} ± {sd:.2g}"])
    return figure


def tau_r(groups: Sequence[Group]) -> Canvas:
    """Spread τ of the clients and FedLWS's ratio r in every round, and Pearson's correlation of the two.

    The ratio is what shrinking took from the model over what the clients gave it; in FedLWS it is β τ."""
    held = clouds(groups, _spread_and_ratio, "No run has recorded τ and r, with FedLWS or the instrument balance.")
    figure = Canvas(COLUMN, 2.4)
    axes = figure.add_subplot()
    dots = scatter(axes, held)
    axes.set(xlabel=BALANCES["tau"], ylabel=BALANCES["fedlws_ratio"])
    found = [pearson(*points.T) for _, _, points in held]
    alike = ["no correlation" if np.isnan(r) else f"correlation {r:.2f}".replace("-", "−") for r in found]
    named = [f"{label}: {words}" for (_, label, _), words in zip(held, alike, strict=True)]
    legend(figure, dots, named if len(groups) > 1 else alike)
    return figure


def _spread_and_ratio(run: Run) -> np.ndarray:
    """[n, 2] of the rounds that have both: as the instrument saw them, else as FedLWS did."""
    columns = [
        seen if len(seen := noted(run, f"balance.{ours}")) else noted(run, f"fedlws.{its}")
        for ours, its in (("tau", "model_tau"), ("fedlws_ratio", "model_r"))
    ]
    points = np.stack(columns, 1) if len(columns[1]) else np.empty((0, 2))
    return points[~np.isnan(points).any(1)]


def shrinking(run: Run) -> Canvas:
    """FedLWS's shrink factor γ of the layers over the rounds.

    Of the first and last layer, the mean and standard deviation over all, and what one factor for the whole model would
    be."""
    gamma = noted(run, "fedlws.gamma")
    if not len(gamma):
        raise NoData("The run has no FedLWS.")
    figure = Canvas(COLUMN, 2.3)
    axes = figure.add_subplot()
    x, mean, sd = np.arange(1, len(gamma) + 1), gamma.mean(1), gamma.std(1)
    lines = axes.plot(x, mean, color=colour(0))
    axes.fill_between(x, mean - sd, mean + sd, color=colour(0), alpha=0.18, linewidth=0)
    for i, values in enumerate((gamma[:, 0], gamma[:, -1], noted(run, "fedlws.model_gamma")), 1):
        lines += axes.plot(x, values, color=colour(i), linestyle=dash(i))
    axes.set(xlabel="round", ylabel="shrink factor γ")
    whole_rounds(axes)
    legend(figure, lines, ["mean of the layers", "first layer", "last layer", "whole model"])
    return figure


def weights_by_coherence(groups: Sequence[Group]) -> Canvas:
    """Aggregation weight λ of each client in each round against the mean cosine of its update with the others'."""
    held = clouds(groups, _weighed, "No run has the instrument coherence.")
    figure = Canvas(COLUMN, 2.5)
    axes = figure.add_subplot()
    dots = scatter(axes, held)
    axes.set(xlabel="mean cosine with the others' updates", ylabel="aggregation weight λ (%)", ylim=(0, None))
    legend(figure, dots, [label for _, label, _ in held] if len(groups) > 1 else [])
    return figure


def _weighed(run: Run) -> np.ndarray:
    """[n, 2]: coherence and weight (%) of every client and round."""
    notes, clients = run.columns("notes"), run.columns("clients")
    mine = (notes["method"] == "coherence") & (notes["name"] == "client")
    keys = zip(clients["round"].tolist(), clients["client"].tolist(), strict=True)
    weight = dict(zip(keys, clients["weight"].tolist(), strict=True))
    met = zip(notes["round"][mine].tolist(), notes["client"][mine].astype(int).tolist(), strict=True)
    points = np.array([notes["value"][mine], [100 * weight[key] for key in met]]).T
    return points[~np.isnan(points).any(1)]


def similarity(groups: Sequence[Group]) -> Canvas:
    """Cosine of each client's model with the new global one in each round (CCN, figure 1b).

    Of more clients than have a line each, the mean, and all between the least and the most like."""
    held = [(g, q) for g in groups if (q := quantities(g.first).get("similarity.client")) is not None]
    if not held:
        raise NoData("No run has the instrument similarity.")
    figure = Canvas(COLUMN if len(held) == 1 else PAGE, 2.2)
    panels = figure.subplots(1, len(held), sharey=True, squeeze=False)[0]
    handles: dict[str, Line2D] = {}
    for axes, (group, quantity) in zip(panels, held, strict=True):
        clients, values = quantity.labels["client"], quantity.values  # [rounds, clients]
        if len(clients) > CLIENTS:
            there = np.flatnonzero(~np.isnan(values).all(1))
            low, high = np.nanmin(values[there], 1), np.nanmax(values[there], 1)
            axes.fill_between(there + 1, low, high, color=colour(0), alpha=0.18, linewidth=0)
            axes.plot(there + 1, np.nanmean(values[there], 1), color=colour(0))
        for i, client in enumerate(clients if len(clients) <= CLIENTS else []):
            there = np.flatnonzero(~np.isnan(values[:, i]))
            mark = "o" if len(there) <= FEW else None
            (line,) = axes.plot(there + 1, values[there, i], color=colour(i), linestyle=dash(i), marker=mark)
            handles.setdefault(f"client {client}", line)
        axes.set_xlabel("round")
        axes.set_title(group.label if len(held) > 1 else "", loc="left")
        whole_rounds(axes)
    panels[0].set_ylabel("cosine with the global model")
    legend(figure, list(handles.values()), list(handles))
    return figure


def parameters(groups: Sequence[Group]) -> Canvas:
    """Floats that a client receives and sends in a round, in multiples of the model's parameters; mean over the run."""
    ways, labels, sent = ("up", "down"), [], []
    for group in groups:
        shares = [_floats(run, ways) for run in group.runs if len(run.columns("traffic")["round"])]
        if shares:
            labels.append(group.label)
            sent.append(np.mean(shares, 0))
    if not sent:
        raise NoData("Nothing has been sent yet.")
    figure = Canvas(COLUMN, 0.85 + 0.48 * len(labels))
    axes = figure.add_subplot()
    for i, values in enumerate(np.transpose(sent)):
        rows = np.arange(len(labels)) + (-0.2, 0.2)[i]
        axes.barh(rows, values, 0.36, color=colour(i), alpha=0.85)
        for row, value in zip(rows, values, strict=True):
            axes.annotate(f"{value:.3g}", (value, row), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(labels)), labels)
    axes.set(ylim=(len(labels) - 0.5, -0.5), xlim=(0, 1.15 * np.max(sent)), xlabel="models a client and round")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    legend(figure, [Patch(color=colour(i), alpha=0.85) for i in range(2)], ways)
    return figure


def _floats(run: Run, ways: Sequence[str]) -> list[float]:
    """Floats of parameters and further vectors over those of the model."""
    traffic, layers = run.columns("traffic"), run.columns("layers")
    size = layers["parameters"][layers["round"] == layers["round"].min()].sum()
    return [float((traffic[f"{way}_params"] + traffic[f"{way}_vectors"]).mean()) / (4 * size) for way in ways]


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """NaN where one of them is constant."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.corrcoef(a, b)[0, 1])
