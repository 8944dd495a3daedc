"""What a method learns within a round, epoch by epoch: FedLAW's γ and λ (figure 14), FedALA's loss (figure 3)."""

from __future__ import annotations

from textwrap import fill

import numpy as np

from raysim.report import NoData, ReportError
from raysim.report.canvas import COLOURS, COLUMN, Canvas, legend, panel
from raysim.report.folder import RunFolder
from raysim.report.quantities import PLACES, Quantity, label, quantities
from raysim.report.series import plot

EPOCHS = "epoch of learning"


def learned(run: RunFolder) -> list[str]:
    """Names of the quantities that were recorded at every epoch of learning."""
    found = quantities(run).items()
    return [name for name, q in found if "index" in q.axes and PLACES.get(name.rpartition(".")[2]) == EPOCHS]


def learning(run: RunFolder, name: str) -> Canvas:
    """One quantity over the epochs of learning, a curve for a round.

    What clients have each has a curve for a client, of the last round; of one client, `NAME:CLIENT`, one for a round."""
    name, _, client = name.partition(":")
    quantity = quantities(run)[name]
    curves = _curves(quantity, client)
    # Index 0 of a weight is where learning starts, of a loss its first epoch.
    epochs = np.array([int(place.partition("–")[0]) for place in quantity.labels["index"]]) + name.endswith(".loss")
    figure, axes = panel(COLUMN, 2.3)
    lines = []
    for i, values in enumerate(curves.values()):
        (known,) = np.nonzero(~np.isnan(values))
        lines.append(plot(axes, i, epochs[known], values[known], marker=None))
    axes.set(xlabel=EPOCHS, ylabel=fill(label(run, name), 24))
    if len(lines) <= len(COLOURS):
        legend(figure, lines, [*curves])
    return figure


def _curves(quantity: Quantity, client: str) -> dict[str, np.ndarray]:
    """Values [epochs] by what a curve is of; at most as many rounds as there are colours, evenly spread."""
    values = quantity.values
    rounds = np.flatnonzero(~np.isnan(values).all(tuple(range(1, values.ndim))))
    if not len(rounds):
        raise NoData(f"In no round was {quantity.name} recorded.")
    if "client" in quantity.axes:
        there = quantity.labels["client"]
        if not client:
            last = values[rounds[-1]]
            return {f"client {one}": last[i] for i, one in enumerate(there) if not np.isnan(last[i]).all()}
        if client not in there:
            raise ReportError(f"{quantity.name} was recorded of no client {client}; there are {', '.join(there)}.")
        values = values[:, there.index(client)]
        rounds = np.flatnonzero(~np.isnan(values).all(1))
    elif client:
        raise ReportError(f"{quantity.name} is not recorded of clients, so not of client {client}.")
    if len(rounds) > len(COLOURS):
        rounds = rounds[np.linspace(0, len(rounds) - 1, len(COLOURS)).round().astype(int)]
    return {f"round {t + 1}": values[t] for t in rounds}
