"""What instruments saw of the clients: how alike their updates and data are, and what local training did to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from raysim.report import NoData
from raysim.report.canvas import COLUMN, PAGE, Canvas, colour, heat_map, legend, name_rows, panel, whole_rounds
from raysim.report.clouds import scatter_groups
from raysim.report.folder import RunFolder, of_loss
from raysim.report.groups import Group
from raysim.report.quantities import Quantity, noted, quantities
from raysim.report.series import Chart, Curve, over_rounds, plot, plot_rounds

CLIENTS = 7  # so many clients have a line each

MOMENTS = {"before local training": "before", "after": "after"}
COHERENCES = {"mean": "mean cosine of updates", "paper": "local gradient coherence"}
HETEROGENEITIES = {
    "cosine": "heterogeneity coherence\n(cosine)",
    "overlap": "heterogeneity coherence\n(1 − total variation)",
}


def coherence(groups: Sequence[Group], variant: str) -> Chart:
    """Local gradient coherence of each round (FedLAW, definition 5.1): how much the clients' updates point one way.

    The mark is the critical point, the first round in which it is no longer positive."""
    chart = over_rounds(
        groups, lambda run: noted(run, f"coherence.{variant}"), COHERENCES[variant], zero=True, mark="critical point"
    )
    return replace(chart, marks=tuple(critical_point(curve.mean) for curve in chart.curves))


def critical_point(values: np.ndarray) -> int | None:
    """Index of the first value that is not positive and follows a positive one; None where there is none."""
    falls = np.flatnonzero((values[1:] <= 0) & (values[:-1] > 0))
    return int(falls[0]) + 1 if len(falls) else None


def coherence_groups(run: RunFolder) -> Chart:
    """Mean cosine of the updates in each round, of all clients and of each group that the instrument was given."""
    prefix = "coherence.mean"
    named = {name.removeprefix(f"{prefix}_"): q for name, q in quantities(run).items() if name.startswith(f"{prefix}_")}
    if not named:
        raise NoData("The instrument coherence was given no groups of clients.")
    shown = {"all clients": noted(run, prefix), **{name: q.values for name, q in named.items()}}
    curves = [Curve.one(i, label, run, values) for i, (label, values) in enumerate(shown.items())]
    return Chart(curves, COHERENCES["mean"], zero=True)


def weights_by_coherence(groups: Sequence[Group]) -> Canvas:
    """Aggregation weight λ of each client in each round against the mean cosine of its update with the others'."""
    figure, axes, clouds, dots = scatter_groups(groups, _coherence_and_weight, "No run has the instrument coherence.")
    axes.set(xlabel="mean cosine with the others' updates", ylabel="aggregation weight λ (%)", ylim=(0, None))
    legend(figure, dots, [cloud.label for cloud in clouds] if len(groups) > 1 else [])
    return figure


def _coherence_and_weight(run: RunFolder) -> np.ndarray:
    """[n, 2]: coherence and weight (%) of every client and round that has both."""
    notes, clients = run.columns("notes"), run.columns("clients")
    keys = zip(clients["round"].tolist(), clients["client"].tolist(), strict=True)
    weight = dict(zip(keys, (100 * clients["weight"]).tolist(), strict=True))
    rows = (notes["method"] == "coherence") & (notes["name"] == "client")
    seen = zip(notes["round"][rows].tolist(), notes["client"][rows].astype(int).tolist(), strict=True)
    points = np.array([notes["value"][rows], [weight[key] for key in seen]]).T
    return np.asarray(points[~np.isnan(points).any(1)])


def heterogeneity(groups: Sequence[Group], variant: str) -> Chart:
    """Heterogeneity coherence of each round (FedLAW, definition 5.2).

    It compares the classes of the round's clients, by their weights, with those of all clients."""
    return over_rounds(groups, lambda run: noted(run, f"heterogeneity.{variant}"), HETEROGENEITIES[variant])


def classes(run: RunFolder) -> Canvas:
    """Share of each class in each round: the mean of the clients' class shares by their weights λ."""
    values = noted(run, "heterogeneity.classes")  # [rounds, C]
    if not len(values):
        raise NoData("The run has no instrument heterogeneity.")
    names = run.shares.classes or [str(c) for c in range(values.shape[1])]
    height = float(np.clip(0.75 + 0.14 * len(names), 1.8, 3.4))
    figure, axes = panel(COLUMN, height)
    heat_map(axes, 100 * values.T, "share of the class in the round (%)", left=1)
    axes.set(xlabel="round", ylabel="class")
    name_rows(axes, names, height - 0.75)
    whole_rounds(axes)
    return figure


def objective(run: RunFolder) -> Chart:
    """Training loss of each round's clients before and after their local training, weighted by size (FedALA, figure 5)."""
    found = {label: noted(run, f"objective.{moment}") for label, moment in MOMENTS.items()}
    if not all(map(len, found.values())):
        raise NoData("The run has no instrument objective.")
    curves = [Curve.one(i, label, run, values) for i, (label, values) in enumerate(found.items())]
    return Chart(curves, of_loss("training loss", [run]), log=True)


def similarity(groups: Sequence[Group]) -> Canvas:
    """Cosine of each client's model with the new global one in each round (CCN, figure 1b).

    With more than seven clients: the mean, and a band from the least to the most similar."""
    held = [(g, q) for g in groups if (q := quantities(g.first).get("similarity.client")) is not None]
    if not held:
        raise NoData("No run has the instrument similarity.")
    figure = Canvas(COLUMN if len(held) == 1 else PAGE, 2.2)
    panels = figure.subplots(1, len(held), sharey=True, squeeze=False)[0]
    handles: dict[str, Artist] = {}
    for axes, (group, quantity) in zip(panels, held, strict=True):
        if len(quantity.labels["client"]) > CLIENTS:
            handles["from the least to the most similar client"] = _range_of_clients(axes, group.first)
        else:
            for client, line in _line_of_each(axes, quantity).items():
                handles.setdefault(f"client {client}", line)
        axes.set_xlabel("round")
        axes.set_title(group.label if len(held) > 1 else "", loc="left")
        whole_rounds(axes)
    panels[0].set_ylabel("cosine with the global model")
    legend(figure, list(handles.values()), list(handles))
    return figure


def _range_of_clients(axes: Axes, run: RunFolder) -> Artist:
    notes = run.columns("notes")
    rows = (notes["method"] == "similarity") & (notes["name"] == "client") & ~np.isnan(notes["value"])
    present, place = np.unique(notes["round"][rows], return_inverse=True)
    values, low, high = notes["value"][rows], np.full(len(present), np.inf), np.full(len(present), -np.inf)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    plot(axes, 0, present + 1, np.bincount(place, values) / np.bincount(place), marker=None)
    return axes.fill_between(present + 1, low, high, color=colour(0), alpha=0.18, linewidth=0)


def _line_of_each(axes: Axes, quantity: Quantity) -> dict[str, Line2D]:
    return {client: plot_rounds(axes, i, quantity.values[:, i]) for i, client in enumerate(quantity.labels["client"])}
