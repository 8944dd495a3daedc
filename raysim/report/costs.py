"""Where time and bytes went."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from raysim.report import NoData
from raysim.report.canvas import COLUMN, IDLE, INK, PAGE, Canvas, colour, every_nth, legend, named_rows, whole_rounds
from raysim.report.folder import RunFolder
from raysim.report.groups import Group
from raysim.store.tables import PHASES

WAYS = ("up", "down")
KINDS = {"params": "parameters"} | {
    kind: kind for kind in ("buffers", "vectors", "scalars", "masks", "positions", "scales")
}
VISIBLE = 0.004  # of the width of a figure: what is thinner is neither drawn nor named
OTHER, WAIT = "other", "wait"  # time of a round in no phase, time of an actor without work
SPANS = 40  # a timeline shows at most about so many phases of each actor


def traffic(groups: Sequence[Group]) -> Canvas:
    """Bytes sent over the whole run, up from the clients and down to them, by kind; mean over seeds.

    Kinds too small to be seen are left out."""
    totals = {
        (group.label, way): [
            np.mean([np.nansum(run.columns("traffic")[f"{way}_{kind}"]) for run in group.runs]) / 1e6 for kind in KINDS
        ]
        for group in groups
        for way in WAYS
    }
    sent = np.array(list(totals.values()))  # [2 G, kinds]
    if not sent.any():
        raise NoData("Nothing has been sent yet.")
    figure, axes = _bars([group.label for group in groups], rows=2)
    visible = [i for i in range(len(KINDS)) if sent[:, i].max() >= VISIBLE * sent.sum(1).max()]
    for row, parts in enumerate(sent):
        left = 0.0
        for i in visible:
            axes.barh(_at(row), parts[i], 0.36, left=left, color=colour(i))
            left += parts[i]
        axes.annotate(WAYS[row % 2], (left, _at(row)), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set(xlabel="sent (MB)", xlim=(0, 1.12 * sent.sum(1).max()))
    kinds = list(KINDS.values())
    legend(figure, [Patch(color=colour(i)) for i in visible], [kinds[i] for i in visible])
    return figure


def _at(row: int) -> float:
    return row // 2 + (-0.2, 0.2)[row % 2]


def seconds(groups: Sequence[Group]) -> Canvas:
    """Mean time of a round by phase: training, weights, the reduction, the server's steps and so on.

    Phases too short to be seen are among the other time."""
    started = [(group.label, [run for run in group.runs if run.rounds_done]) for group in groups]
    spent = np.array([np.mean([_phases(run) for run in runs], axis=0) for _, runs in started if runs])  # [G, phases]
    labels = [label for label, runs in started if runs]
    if not labels:
        raise NoData("No round is done yet.")
    unit, factor = ("ms", 1000) if spent.sum(1).max() < 1 else ("s", 1)
    parts = dict(zip((*PHASES, OTHER), factor * spent.T, strict=True))
    thin = [name for name in PHASES if parts[name].max() < VISIBLE * factor * spent.sum(1).max()]
    parts[OTHER] = parts[OTHER] + sum(parts.pop(name) for name in thin)
    if parts[OTHER].max() < VISIBLE * factor * spent.sum(1).max():
        del parts[OTHER]
    figure, axes = _bars(labels, rows=1)
    left = np.zeros(len(spent))
    shown = {}
    for name, part in parts.items():
        shown[name] = axes.barh(range(len(spent)), part, 0.6, left=left, color=_shade(name))
        left += part
    axes.set(xlabel=f"time of a round ({unit})", xlim=(0, None))
    legend(figure, list(shown.values()), list(shown))
    return figure


def _phases(run: RunFolder) -> np.ndarray:
    """Mean seconds of a round in each of PHASES, and in none of them."""
    rounds = run.columns("rounds")
    parts = [float(np.nan_to_num(rounds[f"seconds_{phase}"].astype(float)).mean()) for phase in PHASES]
    return np.array([*parts, max(0.0, float(rounds["seconds"].mean()) - sum(parts))])


def _bars(labels: Sequence[str], rows: int) -> tuple[Canvas, Axes]:
    figure = Canvas(COLUMN, 0.85 + (0.16 + 0.16 * rows) * len(labels))
    axes = figure.add_subplot()
    named_rows(figure, axes, labels)
    axes.grid(visible=False, axis="y")
    return figure, axes


def parameters(groups: Sequence[Group]) -> Canvas:
    """Floats that a client which trains sends and receives in a round, over the model's parameters; mean over the run."""
    labels, colours, sent = [], [], []
    for group in groups:
        if shares := [share for run in group.runs if (share := _floats(run))]:
            labels.append(group.label)
            colours.append(colour(group.number))
            sent.append(np.mean(shares, 0))
    if not sent:
        raise NoData("Nothing has been sent yet.")
    figure, axes = _bars(labels, rows=2)
    for way, values, shift in zip(WAYS, np.transpose(sent), (-0.2, 0.2), strict=True):
        rows = np.arange(len(labels)) + shift
        axes.barh(rows, values, 0.36, color=colours)
        for row, value in zip(rows, values, strict=True):
            words = f"{value:.3g} {way}"
            axes.annotate(words, (value, row), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set(xlim=(0, 1.25 * np.max(sent)), xlabel="models per client and round")
    return figure


def _floats(run: RunFolder) -> list[float]:
    """Floats sent up and down, as parameters and further vectors, over those of the model; none where none is recorded."""
    key = ["round", "client"]
    trained = run["clients"].filter(pc.field("status") == "ok")  # not those lost, or only asked for a loss
    sent = run["traffic"].join(trained.select(key), key, join_type="left semi")
    layers = run.columns("layers")
    if not sent.num_rows or not len(layers["round"]):
        return []
    size = layers["parameters"][layers["round"] == layers["round"].min()].sum()
    return [pc.mean(pc.add(sent[f"{way}_params"], sent[f"{way}_vectors"])).as_py() / (4 * size) for way in WAYS]


# ------------------------------------------------------------------------------------------------------------ actors


def timeline(run: RunFolder) -> Canvas:
    """What each actor did in the last rounds. Where nothing is drawn it waited, or did what is too short to be seen."""
    spans = run.columns("timeline")
    if not len(spans["round"]):
        raise NoData("The run has recorded no timeline.")
    hosts = np.unique(spans["host"])
    last = int(spans["round"].max())
    sizes = np.bincount(spans["round"], minlength=last + 1)
    first = last
    if sizes[last - 1 :].sum() <= SPANS * len(hosts):
        first = max(0, last - 1)
    shown = spans["round"] >= first
    host, phase = np.searchsorted(hosts, spans["host"][shown]), spans["phase"][shown]
    start, stop = spans["start"][shown], spans["stop"][shown]
    rounds = run.columns("rounds")
    ends = rounds["wall"][rounds["round"] >= first]
    figure = Canvas(PAGE, float(np.clip(0.95 + 0.18 * len(hosts), 1.4, 5)))
    axes = figure.add_subplot()
    every_phase = _ordered(spans["phase"])
    seen = (stop - start) >= VISIBLE * (stop.max() - start.min())
    phases = [name for name in every_phase if (seen & (phase == name)).any()]
    for name in phases:
        for row in range(len(hosts)):
            here = (phase == name) & (host == row)
            lasted = [*zip(start[here], stop[here] - start[here], strict=True)]
            axes.broken_barh(
                lasted, (row - 0.4, 0.8), color=_shade(name, every_phase), linewidth=0, rasterized=len(lasted) > 500
            )
    lines = [axes.axvline(end, color=INK, linewidth=0.6, zorder=0) for end in ends.tolist()]
    every = every_nth(len(hosts), 24)
    axes.set_yticks(range(0, len(hosts), every), [f"actor {h}" for h in hosts[::every]])
    axes.set(ylim=(len(hosts) - 0.4, -0.6), xlim=(start.min(), max(stop.max(), ends.max())))
    which = f"round {last + 1}" if first == last else f"rounds {first + 1} to {last + 1}"
    axes.set_xlabel(f"time since the run's start (s), {which}")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    patches = [Patch(color=_shade(name, every_phase)) for name in phases]
    legend(figure, [*patches, *lines[:1]], [*phases, *["end of a round"] * bool(lines)])
    return figure


def utilisation(run: RunFolder) -> Canvas:
    """Share of the actors' time that each phase took in each round. Grey: they waited."""
    spans, rounds = run.columns("timeline"), run.columns("rounds")
    if not len(spans["round"]):
        raise NoData("The run has recorded no timeline.")
    hosts, phases = len(np.unique(spans["host"])), _ordered(spans["phase"])
    room = hosts * rounds["seconds"]
    shares = np.zeros((len(phases), len(rounds["round"])))
    for i, name in enumerate(phases):
        here = spans["phase"] == name
        busy = np.bincount(
            spans["round"][here], (spans["stop"] - spans["start"])[here], minlength=rounds["round"].max() + 1
        )
        shares[i] = 100 * busy[rounds["round"]] / room
    shares /= np.maximum(1, shares.sum(0) / 100)  # clocks of actors and driver differ by a little
    figure = Canvas(COLUMN, 2.2)
    axes = figure.add_subplot()
    edges = np.append(rounds["round"] + 0.5, rounds["round"][-1] + 1.5)
    seen = {name: share for name, share in zip(phases, shares, strict=True) if share.max() >= 100 * VISIBLE}
    floor = np.zeros(shares.shape[1])
    patches = {}
    for name, share in {**seen, WAIT: 100 - sum(seen.values())}.items():
        patches[name] = axes.stairs(floor + share, edges, baseline=floor, fill=True, color=_shade(name, phases))
        floor = floor + share
    axes.set(xlabel="round", ylabel="actors' time (%)", ylim=(0, 100), xlim=(edges[0], edges[-1]))
    whole_rounds(axes)
    axes.grid(visible=False)
    legend(figure, list(patches.values()), list(patches))
    return figure


def _ordered(phases: np.ndarray) -> list[str]:
    there = set(phases.tolist())
    return [name for name in PHASES if name in there] + sorted(there - set(PHASES))


def _shade(name: str, phases: Sequence[str] = ()) -> str:
    """A phase of the round has its own colour in every figure, and the other phases of the actors follow."""
    if name in (OTHER, WAIT):
        return IDLE
    order = [*PHASES, *(phase for phase in phases if phase not in PHASES)]
    return colour(order.index(name))
