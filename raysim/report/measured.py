"""Measures of saved models and data, from the tables `measures/NAME`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from raysim.paths import command
from raysim.report import NoData
from raysim.report.canvas import COLUMN, PAGE, Canvas, colour, dash, every_nth, heat_map, legend, panel
from raysim.report.clouds import Cloud, pearson, scatter, spearman
from raysim.report.folder import RunFolder
from raysim.report.groups import Group
from raysim.store.documents import checked


def measured(run: RunFolder, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Columns of a measure's table, and its options and facts. Raises `NoData` where it was not taken, and
    where it was taken of a shorter run."""
    table = f"measures/{name}"
    if table not in run.tables:
        raise NoData(f"{command('measure', name, run.folder)} has not been run.")
    about = _about(run, table)
    if (done := _rounds_done(about, run)) != run.rounds_done:
        raise NoData(
            f"{command('measure', name, run.folder)} was run after round {done}, and the run has gone on. Run it again."
        )
    return run.columns(table), about


def outdated(run: RunFolder) -> list[str]:
    """Names of the measures that were taken of a shorter run; an older raysim did not say."""
    taken = [table for table in run.tables if table.startswith("measures/")]
    return [table[len("measures/") :] for table in taken if _rounds_done(_about(run, table), run) != run.rounds_done]


def _rounds_done(about: Mapping[str, Any], run: RunFolder) -> int:
    """Rounds of the run when the measure was taken; the last release called them `played`, an older one did not say."""
    return int(about.get("rounds_done", about.get("played", run.rounds_done)))


def _about(run: RunFolder, table: str) -> dict[str, Any]:
    return checked(run.folder / table, dict[str, Any], (run[table].schema.metadata or {}).get(b"raysim.measure", b""))


def tables_of(groups: Sequence[Group], name: str) -> list[tuple[int, str, list[dict[str, np.ndarray]]]]:
    """Number, label and the runs' tables of each group that has any. Raises `NoData` where none has."""
    held, missing = [], NoData()
    for group in groups:
        tables = []
        for run in group.runs:
            try:
                tables.append(measured(run, name)[0])
            except NoData as error:
                missing = error
        if tables:
            held.append((group.number, group.label, tables))
    if not held:
        raise missing
    return held


def at_last_round(table: dict[str, np.ndarray], *columns: str) -> list[np.ndarray]:
    """Columns of a measure's table, at the last of the measured rounds. Raises `NoData` where it lacks one: only
    tasks with accuracies have the column `accuracy`."""
    if missing := [column for column in columns if column not in table]:
        raise NoData(f"The measure has recorded no {missing[0]}.")
    last = table["round"] == table["round"].max()
    return [table[column][last] for column in columns]


def correlation(groups: Sequence[Group]) -> Canvas:
    """Sum of each client's weights λ over the rounds against what the client has (FedLAW, table 11).

    What it has: samples, heterogeneity degree, and their product. r is Pearson's, over all clients shown."""
    held = [
        (i, label, {name: np.concatenate([table[name] for table in tables]) for name in tables[0]})
        for i, label, tables in tables_of(groups, "correlation")
    ]
    figure = Canvas(PAGE, 2.3)
    panels = figure.subplots(1, 3, sharey=True)
    words = {"samples": "samples", "degree": "heterogeneity degree", "product": "samples × degree"}
    for axes, (column, label) in zip(panels, words.items(), strict=True):
        dots = scatter(axes, [Cloud(i, name, np.stack([t[column], t["weight"]], 1)) for i, name, t in held])
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
    figure, axes = panel(COLUMN, 2.3)
    lines, labels = [], []
    for i, label, tables in tables_of(groups, "histogram"):
        low, high = at_last_round(tables[0], "low", "high")
        alike = [
            at_last_round(t, "share", "near_zero", "near")
            for t in tables
            if np.array_equal(at_last_round(t, "low")[0], low)
        ]
        share, near_zero, near = np.mean(alike, 0)
        edges = np.append(low, high[-1])
        lines.append(axes.stairs(100 * share, edges, color=colour(i), linestyle=(0, dash(i)), linewidth=1.2))
        small = f"{100 * near_zero[0]:.1f} % smaller than {near[0]:g}"
        labels.append(f"{label}: {small}" if len(groups) > 1 else small)
    axes.set(xlabel="value of the parameter", ylabel="parameters (% per bin)", ylim=(0, None))
    legend(figure, lines, labels)
    return figure


def transport(run: RunFolder) -> Canvas:
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
    rank = spearman(*(table[column] for column in words))
    panels[2].set_title(f"rank correlation {rank:.2f}", loc="left")
    return figure
