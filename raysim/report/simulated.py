"""What clients do in simulated time."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Patch

from raysim.report import NoData
from raysim.report.canvas import IDLE, INK, PAGE, Canvas, colour, every_nth, legend
from raysim.report.folder import RunFolder
from raysim.report.series import unit_of

ROUNDS, CLIENTS = 8, 30  # so many are shown at most; the last round is shown with all its clients
CHANGES = 500  # of availability, after which they are too many to be seen
PARTS = {"download": "sim_down", "training": "sim_train", "upload": "sim_up"}
LOSSES = ("late", "abandoned", "dropped out", "interrupted", "stale")  # in the column `status`
LOST = "late or lost"
SHADES = {LOST: colour(4), **{part: colour(i) for i, part in enumerate(PARTS)}, "waits": IDLE, "away": INK}
BARS = {LOST: (0.2, -0.28), "away": (0.12, 0.44)}  # height and place of bars, of a row's, that do not fill it


class Spans(NamedTuple):
    """From when to when [n], in simulated seconds, and in which row of the figure."""

    start: np.ndarray
    stop: np.ndarray
    row: np.ndarray


def timeline(run: RunFolder) -> Canvas:
    """What each client of the last rounds did in simulated time.

    It waits from its upload until the round ends, and is away where `clock.availability` leaves it out. Who is late or lost is
    marked until the round ends, and whose update is too stale until it is in; they are shown as far as they came. Statistics
    that a client sends before its model are among the upload."""
    first, spans, clients, ends = _spans(run)
    left = float(np.concatenate([ends, *(of.start for of in spans.values())]).min())
    right = float(np.concatenate([ends, *(of.stop for of in spans.values())]).max())
    spans["away"] = _away(run, clients, left, right)
    unit, size = unit_of(right - left)
    figure = Canvas(PAGE, float(np.clip(0.95 + 0.18 * len(clients), 1.4, 5)))
    axes = figure.add_subplot()
    drawn = {
        name: of for name in reversed(SHADES) if len((of := spans[name]).row)
    }  # what a client does covers that it waits
    for name, of in drawn.items():
        height, shift = BARS.get(name, (0.76, 0.0))
        for row in np.unique(of.row):
            here = of.row == row
            lasted = zip(of.start[here] / size, (of.stop - of.start)[here] / size, strict=True)
            axes.broken_barh([*lasted], (row + shift - height / 2, height), color=SHADES[name], linewidth=0)
    lines = [axes.axvline(end / size, color=INK, linewidth=0.6, zorder=0) for end in ends]
    every = every_nth(len(clients), 24)
    axes.set_yticks(range(0, len(clients), every), [f"client {client}" for client in clients[::every]])
    axes.set(ylim=(len(clients) - 0.4, -0.6), xlim=(left / size, right / size))
    last = first + len(ends)
    which = f"round {last}" if len(ends) == 1 else f"rounds {first + 1} to {last}"
    axes.set_xlabel(f"simulated time since the run's start ({unit}), {which}")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    names = [name for name in SHADES if name in drawn]
    legend(figure, [*(Patch(color=SHADES[name]) for name in names), lines[0]], [*names, "end of a round"])
    return figure


def _spans(run: RunFolder) -> tuple[int, dict[str, Spans], np.ndarray, np.ndarray]:
    """The first round that is shown, what its clients and those of later ones did, who they are, and when the rounds ended."""
    rows, rounds = run.columns("clients"), run.columns("rounds")
    timed = np.isfinite(rows["sim_start"].astype(float))
    if not timed.any():
        raise NoData("The run has no simulated time: its clock is not set.")
    last = first = int(rounds["round"][-1])
    while (
        last - first + 1 < ROUNDS and len({*rows["client"][timed & (rows["round"] >= first - 1)]}) <= CLIENTS and first
    ):
        first -= 1
    here = timed & (rows["round"] >= first)
    clients, row = np.unique(rows["client"][here], return_inverse=True)
    at, ends = rows["sim_start"][here].astype(float), rounds["sim_clock"][rounds["round"] >= first].astype(float)
    closes = ends[rows["round"][here] - first]
    lost = np.isin(rows["status"][here], LOSSES)
    back = at + sum(rows[column][here].astype(float) for column in PARTS.values())
    marked = np.where(rows["status"][here] == "stale", back, closes)  # a stale client may be at work again
    spans = {LOST: Spans(at, np.where(lost, marked, np.nan), row)}
    for part, column in PARTS.items():
        until = at + rows[column][here].astype(float)
        spans[part], at = Spans(at, np.minimum(until, closes), row), until
    spans["waits"] = Spans(at, np.where(lost, np.nan, closes), row)
    real = {name: of.stop > of.start for name, of in spans.items()}  # and neither NaN nor empty
    return first, {name: Spans(*(each[real[name]] for each in of)) for name, of in spans.items()}, clients, ends


def _away(run: RunFolder, clients: np.ndarray, left: float, right: float) -> Spans:
    """When the clients were not available; nothing where this process does not know their availability, or lacks its file."""
    from raysim.core.availability import AVAILABILITIES  # here: other figures need nothing that computes
    from raysim.core.simulated import SimulatedClock

    [(name, fields)] = run.config["clock"].get("availability", {"always": {}}).items()
    found, at, row = (
        [Spans(np.empty(0), np.empty(0), np.empty(0, int))],
        np.full(len(clients), left),
        np.arange(len(clients)),
    )
    with suppress(KeyError, ValueError):
        clock = SimulatedClock(availability=AVAILABILITIES[name](**fields))
        while (at < right).any() and len(found) < CHANGES:
            available, until = clock.state(run.seed, clients, at)
            gone = ~available & (at < right)
            found.append(Spans(at[gone], np.minimum(until, right)[gone], row[gone]))
            at = until
    start, stop, rows = (np.concatenate(each) for each in zip(*found, strict=True))
    return Spans(start, stop, rows)
