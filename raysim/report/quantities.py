"""Quantities that were recorded by layer, by client, or once a round: norms, and whatever methods report."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.axes import Axes

from raysim.report import blocks
from raysim.report.canvas import COLUMN, PAGE, Canvas, every_nth, heat_map, name_rows, whole_rounds
from raysim.report.folder import RunFolder, of_loss
from raysim.report.series import Chart, Curve

AXES = ("client", "layer", "index")  # in this order
DRAWN_ELSEWHERE = ("balance", "coherence", "heterogeneity", "objective", "similarity")  # in figures of their own

WORDS = {  # with the method's name where methods use one word for different things
    "norm": "norm of the layer ‖w‖",
    "fedlws.norm": "norm before ‖w‖",
    "update_norm": "norm of the update ‖Δw‖",
    "relative_update": "relative update ‖Δw‖ / ‖w‖",
    "gamma": "shrink factor γ",
    "applied": "factor applied to the layer",
    "lambda": "aggregation weight λ",
    "tau": "disagreement of the clients τ",
    "moved": "step of the mean ‖d‖",
    "r": "r = ‖(1 − γ)w‖ / ‖γd‖",
    "decay": "decay of the weights",
    "uploads": "sent (1) or not (0)",
    "divergence": "divergence",
    "discrepancy": "distance from the target's classes",
    "fell_back": "fell back (1: yes)",
    "normaliser": "local steps counted, ‖a‖₁",
    "tau_eff": "effective local steps τ",
    "kept": "share of the neurons sent",
    "score": "squared distances from the nearest, summed",
    "z": "standard deviations from the mean z",
    "staleness": "rounds that ended meanwhile τ",
    "staleness_weight": "weight of staleness s(τ)",
    "exploration": "share of newcomers ε",
    "preferred_seconds": "seconds that are not too slow T",
    "loss": "loss of learning",
    "power_of_choice.loss": "loss of the last training",
    "proxy_loss_before": "proxy loss before",
    "proxy_loss_after": "proxy loss after",
    "preference": "preference for the peer",
    "weights": "weight of the peer's model",
    "relation": "weight of the peer's model",
    "cosine": "cosine with the global model",
    "similarity": "similarity to the others, summed",
    "factor": "factor on the weight",
    "coherence.client": "mean cosine with the others' updates",
    "coherence.mean": "mean cosine of updates",
    "coherence.paper": "local gradient coherence",
    "heterogeneity.cosine": "classes like all clients' (cosine)",
    "heterogeneity.overlap": "classes like all clients' (overlap)",
    "heterogeneity.classes": "share of the class",
    "balance.gradient": "global gradient ‖γd‖",
    "balance.decay": "pull of shrinking ‖(1 − γ)w‖",
    "balance.fedlaw_ratio": "FedLAW's r ‖γd‖ / ‖(1 − γ)w‖",
    "balance.fedlws_ratio": "FedLWS's r ‖(1 − γ)w‖ / ‖γd‖",
    "similarity.client": "cosine with the new global model",
}
LOSSES = ("loss", "proxy_loss_before", "proxy_loss_after")
PLACES = {  # what the index of a quantity counts
    "loss": "epoch of learning",
    "gamma": "epoch of learning",
    "lambda": "epoch of learning",
    "preference": "peer",
    "weights": "peer",
    "relation": "peer",
    "cosine": "layer, from the input",
    "classes": "class",
}


@dataclass(frozen=True, eq=False)
class Quantity:
    """A recorded quantity as an array [rounds, *axes]; NaN where it was not recorded. Of many clients, each place is the
    mean of a block of them."""

    name: str  # fedlws.gamma
    axes: tuple[str, ...]  # of AXES
    labels: dict[str, list[str]]  # by axis
    values: np.ndarray

    def mean(self, *left: str) -> np.ndarray:
        """Mean over all axes but those named; the result has these in the order given. 'round' is an axis too."""
        axes = ("round", *self.axes)
        away = tuple(i for i, axis in enumerate(axes) if axis not in left)
        present = ~np.isnan(self.values)
        count = present.sum(away)
        total = np.where(present, self.values, 0.0).sum(away)
        with np.errstate(invalid="ignore"):
            mean = np.where(count, total / count, np.nan)
        order = [axis for axis in axes if axis in left]
        return mean.transpose([order.index(axis) for axis in left])


_known: WeakKeyDictionary[RunFolder, dict[str, Quantity]] = WeakKeyDictionary()


def quantities(run: RunFolder) -> dict[str, Quantity]:
    """Everything that the run has recorded, by name. What methods report comes before what every run records."""
    if run not in _known:
        by_layer = _of_layers(run)
        reported = {name: q for name, q in by_layer.items() if "." in name}
        _known[run] = {**reported, **{n: q for n, q in _of_notes(run).items() if n not in reported}, **by_layer}
    return _known[run]


def _of_layers(run: RunFolder) -> dict[str, Quantity]:
    table = run.columns("layers")
    if not len(table["round"]):
        return {}
    shape = table["round"].max() + 1, table["layer"].max() + 1
    first = table["round"] == table["round"].min()
    labels = {"layer": table["name"][first][np.argsort(table["layer"][first])].tolist()}
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = np.where(table["norm"] > 0, table["update_norm"] / table["norm"], np.nan)
    columns = {
        "relative_update": moved,
        **{n: c for n, c in table.items() if n not in ("round", "layer", "name", "parameters")},
    }
    found = {}
    for name, column in columns.items():
        values = np.full(shape, np.nan)
        values[table["round"], table["layer"]] = column
        found[name] = Quantity(name, ("layer",), labels, values)
    return found


def _of_notes(run: RunFolder) -> dict[str, Quantity]:
    table = run.columns("notes")
    if not len(table["round"]):
        return {}
    order = {name: i for i, name in enumerate(run.columns("layers")["name"])}
    found = {}
    names = np.char.add(np.char.add(table["method"].astype(str), "."), table["name"].astype(str))
    for name in dict.fromkeys(names.tolist()):
        rows = names == name
        axes, labels, places = [], {}, [table["round"][rows]]
        for axis in AXES:
            column = table[axis][rows]
            if column[0] is None or column[0] != column[0]:  # null: the quantity has no such axis
                continue
            axes.append(axis)
            if axis == "layer":
                known = sorted(set(column.tolist()), key=lambda one: order.get(one, -1))
                place = {one: i for i, one in enumerate(known)}
                labels[axis], there = known, np.array([place[one] for one in column.tolist()])
            else:
                those, there = np.unique(column.astype(np.int64), return_inverse=True)
                labels[axis], there = blocks.names(those), blocks.block_of(len(those))[there]
            places.append(there)
        shape = (run.rounds_done, *(len(labels[axis]) for axis in axes))
        found[name] = Quantity(name, tuple(axes), labels, blocks.cells(tuple(places), table["value"][rows], shape))
    return found


def noted(run: RunFolder, name: str) -> np.ndarray:
    """The values [rounds, ...] of a quantity, NaN where it was not recorded; empty where it never was."""
    found = quantities(run).get(name)
    return np.empty(0) if found is None else found.values


# ----------------------------------------------------------------------------------------------------------- figures


def layer_names(run: RunFolder) -> list[str]:
    return [name for name, q in quantities(run).items() if "layer" in q.axes]


def note_names(run: RunFolder) -> list[str]:
    found = quantities(run).items()
    return [name for name, q in found if "layer" not in q.axes and name.partition(".")[0] not in DRAWN_ELSEWHERE]


def layers(run: RunFolder, name: str) -> Canvas:
    """One quantity of each layer over the rounds: γ, divergence, uploads, norms.

    Where each client has its own value, the left map is the mean over clients and the right one that over rounds."""
    quantity = quantities(run)[name]
    rows = len(quantity.labels["layer"])
    height = float(np.clip(0.75 + 0.17 * rows, 1.5, 8))
    if "client" not in quantity.axes:
        figure = Canvas(COLUMN, height)
        _map(figure.add_subplot(), quantity, "layer", "round", height, label(run, name))
        return figure
    figure = Canvas(PAGE, height)
    left, right = figure.subplots(1, 2, sharey=True)
    if name.endswith(".uploads"):
        share = Quantity(name, quantity.axes, quantity.labels, 100 * quantity.values)
        _map(left, share, "layer", "round", height, "clients that sent the layer (%)", (0, 100))
        _map(right, share, "layer", "client", height, "of its rounds, those with the layer (%)", (0, 100))
    else:
        _map(left, quantity, "layer", "round", height, f"{label(run, name)}, mean over clients")
        _map(right, quantity, "layer", "client", height, f"{label(run, name)}, mean over rounds")
    return figure


def notes(run: RunFolder, name: str) -> Canvas | Chart:
    """One quantity that a method reports: a curve over the rounds, or a map over rounds, clients or a further index."""
    quantity = quantities(run)[name]
    if not quantity.axes:
        return Chart([Curve.one(0, "", run, quantity.values)], fill(label(run, name), 24), named=False)
    rows, columns = (quantity.axes[0], "round") if len(quantity.axes) == 1 else quantity.axes
    height = float(np.clip(0.75 + 0.12 * len(quantity.labels[rows]), 1.8, 3.4))
    figure = Canvas(COLUMN, height)
    over = "" if columns == "round" else ", mean over rounds"
    _map(figure.add_subplot(), quantity, rows, columns, height, label(run, name) + over)
    return figure


def _map(
    axes: Axes, quantity: Quantity, rows: str, columns: str, height: float, title: str,
    limits: tuple[float, float] | None = None,
) -> None:  # fmt: skip
    values = quantity.mean(rows, columns)
    heat_map(axes, values, fill(title, 42), left=1 if columns == "round" else 0, limits=limits)
    place = PLACES.get(quantity.name.rpartition(".")[2], "index")
    axes.set(xlabel=place if columns == "index" else columns, ylabel={"layer": "", "index": place}.get(rows, rows))
    name_rows(axes, quantity.labels[rows], height - 0.75)
    if columns == "round":
        whole_rounds(axes)
    else:
        every = every_nth(values.shape[1], 10)
        axes.set_xticks(range(0, values.shape[1], every), quantity.labels[columns][::every])


def label(run: RunFolder, name: str) -> str:
    """What an axis says of a quantity, with a loss's unit."""
    return of_loss(words(name), [run]) if name.rpartition(".")[2] in LOSSES else words(name)


def words(name: str) -> str:
    """What a quantity is called on an axis."""
    method, _, what = name.rpartition(".")
    of = what.removeprefix("model_")
    known = WORDS.get(name) or WORDS.get(f"{method}.{of}") or WORDS.get(of, of.replace("_", " "))
    return (f"{method}: " if method else "") + known + " of the model" * (what != of)
