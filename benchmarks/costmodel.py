"""What a round costs: work, counted as raysim does it, times a price for each kind of work.

The counting knows who holds which nodes of the tree of sums, who merges whose, and what crosses the network. It takes FedAvg's
round: a plan that is known before training, sums made while clients train. Prices are fitted to measured rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from raysim.core import tree
from raysim.engine.merging import schedule

FLOAT = 4  # bytes
SWEEPS = 5_000  # of a fit over its coordinates
TRIES = 4  # at a fit, as it takes prices to say what hosts wait for

PRICES = {
    "waiting": "a second that clients wait, as for a device of their own",
    "round": "half of what every round takes",
    "message": "a call of a host",
    "client": "a client, in the driver",
    "plan": "a client of the plan, for each host that is told it",
    "visit": "a client, on its host",
    "sample": "a client's sample, trained on",
    "update": "a byte of a client's update, on its host",
    "hand": "a byte of a host's sum, put where others find it",
    "merge": "a byte of a sum, taken from others, added and handed on",
    "model": "a byte of the model, in the driver",
    "wire": "a second of a link at its full rate",
}
"""What there is to pay for, in seconds."""

PHASES = ("hosts", "train", "reduce", "rest")
"""Of a round: the longest visit to a host, what is left of the clock's phases `train` and `reduce`, and all the rest."""

Prices = Mapping[str, float]
Work = dict[str, dict[str, float]]  # phase -> what is paid for -> how often, or how much in all


@dataclass(frozen=True)
class Setting:
    """A round: `cohort` clients of equal size train a model of `floats` on so many hosts."""

    hosts: int
    cohort: int
    floats: int
    waits: float = 0.0  # seconds that each client waits, as for a device of its own
    samples: int = 0  # that each client trains on
    fan_in: int = 4
    nodes: int = 1
    cores: float = inf  # that all hosts share
    link: float = inf  # bytes a second that a machine sends, and receives
    hop: bool = False  # whether the whole sum is made on another machine than the driver's

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """[(first, last + 1)] positions of the cohort on each host."""
        most = -(-self.cohort // self.hosts)
        return [(lo, min(lo + most, self.cohort)) for lo in range(0, self.cohort, most)]


class Merging(NamedTuple):
    calls: int  # of hosts
    levels: int
    first: float  # sums of the model's size that hosts hand on one after another, when they have trained
    sums: float  # that are added one after another
    crossing: float  # of those: through the busiest link of each level


@cache
def merging(setting: Setting) -> Merging:
    """The merges of a round's sums, as `raysim.engine.sums.merge_up` asks for them."""
    runs, clients = [*setting.runs], setting.cohort
    node = [i * setting.nodes // len(runs) for i in range(len(runs))]
    levels = schedule(range(len(runs)), [str(n) for n in node], setting.fan_in)
    calls, sums, crossing = 0, 0.0, 0.0
    leaders = {root for groups in levels for root, *_ in groups}  # their own sums stay with them
    leaving = [pieces(run, clients) for i, run in enumerate(runs) if i not in leaders] or [1]
    first = max(max(leaving), sum(leaving) / setting.cores)
    for groups in levels:
        incoming, sent, received = [], defaultdict[int, int](int), defaultdict[int, int](int)
        for root, *others in groups:
            parts = {i: pieces(runs[i], clients) for i in others}
            incoming.append(sum(parts.values()))
            for i in others:
                if node[i] != node[root]:
                    sent[node[i]] += parts[i]
                    received[node[root]] += parts[i]
            runs[root] = runs[root][0], runs[others[-1]][1]
        calls += len(groups)
        sums += max(max(incoming), sum(incoming) / setting.cores)
        crossing += max([*sent.values(), *received.values()], default=0)
    return Merging(calls, len(levels), first, sums, crossing)


def pieces(run: tuple[int, int], clients: int) -> int:
    """Sums that a host makes of a run of neighbours: the nodes of the tree that cover it."""

    def visit(node: tree.Node) -> int:
        if run[0] <= node[0] and node[1] <= run[1]:
            return 1
        if node[1] <= run[0] or run[1] <= node[0]:
            return 0
        return sum(map(visit, tree.children(node)))

    return visit((0, clients))


def turns(setting: Setting, prices: Prices) -> tuple[float, float]:
    """Clients that keep a core busy one after another, and the seconds that are waited between them, on the host that takes
    longest.

    While a client waits, its host leaves the core to others. Either hosts wait for their clients, but for a core when all
    of them are back at once for the first time; or they wait once for a client, and then for a core.
    """
    most, shared = setting.runs[0][1], len(setting.runs) / setting.cores
    busy = sum(prices[name] * amount for name, amount in visit(setting).items())
    patient = most + max(0.0, shared - 1), most * setting.waits
    crowded = setting.cohort / setting.cores, setting.waits
    return max(patient, crowded, key=lambda way: way[0] * busy + way[1])


def visit(setting: Setting) -> dict[str, float]:
    """What is paid for a client on its host."""
    return {"visit": 1, "sample": setting.samples, "update": FLOAT * setting.floats}


def work(setting: Setting, prices: Prices) -> Work:
    """What is paid in each phase of the clock. The prices tell what hosts wait for."""
    hosts, size, merges = len(setting.runs), FLOAT * setting.floats, merging(setting)
    clients, waiting = turns(setting, prices)
    return {
        "hosts": {"waiting": waiting} | {name: clients * amount for name, amount in visit(setting).items()},
        "train": {
            "round": 1, "message": hosts + merges.calls, "client": setting.cohort, "plan": setting.cohort * hosts,
            "hand": size * merges.first, "wire": (setting.nodes - 1) * size / setting.link,
        },
        "reduce": {
            "message": merges.levels + 1, "merge": size * merges.sums, "model": size,
            "wire": (merges.crossing + setting.hop) * size / setting.link,
        },
        "rest": {"round": 1, "model": size},
    }  # fmt: skip


def paid_for(setting: Setting, prices: Prices) -> Work:
    """Predicted seconds in each phase, by what they are paid for."""
    return {
        phase: {name: amount * prices[name] for name, amount in paid.items()}
        for phase, paid in work(setting, prices).items()
    }


def parts(setting: Setting, prices: Prices) -> dict[str, float]:
    """Predicted seconds of a round by what they are paid for."""
    found = dict.fromkeys(prices, 0.0)
    for paid in paid_for(setting, prices).values():
        for name, spent in paid.items():
            found[name] += spent
    return found


def seconds(setting: Setting, prices: Prices) -> float:
    """Predicted, of a round."""
    return sum(parts(setting, prices).values())


def efficiency(setting: Setting, prices: Prices) -> float:
    """The share of the hosts' time in which clients have what they wait for."""
    return setting.waits * setting.cohort / len(setting.runs) / seconds(setting, prices)


def fit(settings: Sequence[Setting], measured: Sequence[Mapping[str, float]], known: Prices) -> dict[str, float]:
    """The prices, none of them negative, that explain the measured seconds of each of PHASES best, as shares of the round,
    besides those that are `known`."""
    names = [name for name in PRICES if name not in known]
    prices = dict.fromkeys(PRICES, 0.0) | {**known}
    for _ in range(TRIES):
        rows, target = [], []
        for setting, spent in zip(settings, measured, strict=True):
            whole = sum(spent.values())
            for phase, paid in work(setting, prices).items():
                rows.append([paid.get(name, 0.0) / whole for name in names])
                target.append((spent[phase] - sum(known[name] * paid.get(name, 0.0) for name in known)) / whole)
        prices |= zip(names, nonnegative(np.array(rows), np.array(target)).tolist(), strict=True)
    return prices


def nonnegative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x ≥ 0 with the least |rows x - target|, one coordinate after the other; 0 for a column without entries."""
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = inf
    unit = rows / scale
    products, gradient, x = unit.T @ unit, unit.T @ target, np.zeros(rows.shape[1])
    for _ in range(SWEEPS):
        for i in np.flatnonzero(np.isfinite(scale)):
            x[i] = max(0.0, x[i] + gradient[i] - products[i] @ x)
    return x / scale
