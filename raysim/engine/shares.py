"""Which host trains whom: contiguous runs of the sorted cohort, by what clients cost and how fast hosts are. The result of a
round does not depend on it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Hosts whose speeds differ by less are taken to be equally fast: times vary by that much from round to round.
ALIKE = 1.25

WorkUnit = tuple[int, ...]  # clients that a host trains in one call


@dataclass
class Pace:
    """What was measured of clients and hosts."""

    seconds: dict[int, float] = field(default_factory=dict)  # each client's last training, on a host of the usual speed
    slowness: dict[int, float] = field(default_factory=dict)  # of hosts; the usual one has 1

    def costs(self, clients: Sequence[int], sizes: Sequence[int]) -> list[float]:
        """Of these clients with so many samples, in a unit of their own."""
        known = [self.seconds.get(c) for c in clients]
        # Seconds and samples do not compare: where not all have been measured, samples it is.
        return [float(n) for n in sizes] if None in known else [seconds for seconds in known if seconds is not None]

    def factor(self, host: int) -> float:
        """How many times as long as usual the host takes."""
        slowness = self.slowness.get(host, 1.0)
        return slowness if abs(math.log(slowness)) > math.log(ALIKE) else 1.0

    def learn(self, took: Mapping[int, float], sizes: Sequence[int], trained_by: Mapping[int, int]) -> None:
        """Clients took so many seconds on these hosts."""
        cost = dict(zip(took, self.costs([*took], sizes), strict=True))
        seconds, expected = defaultdict[int, float](float), defaultdict[int, float](float)
        for client, host in trained_by.items():
            seconds[host] += took[client]
            expected[host] += cost[client]
        ratios = {host: seconds[host] / expected[host] for host in seconds if seconds[host] and expected[host]}
        if len(ratios) > 1:
            usual = statistics.median(ratios.values())
            self.slowness |= {host: (self.slowness.get(host, 1.0) + r / usual) / 2 for host, r in ratios.items()}
        self.seconds |= {client: took[client] / self.factor(host) for client, host in trained_by.items()}


def cut(costs: Sequence[float], factors: Sequence[float]) -> list[tuple[int, int]]:
    """Cut a sequence into contiguous runs [(lo, hi)], one for each host or fewer, so that the host that takes longest takes
    least; a host takes its factor times the costs of its run."""

    before = np.cumsum([0.0, *costs])  # of each client, what those before it cost

    def greedy(limit: float) -> list[tuple[int, int]]:
        bounds: list[tuple[int, int]] = []
        lo = 0
        while lo < len(costs):
            of = factors[min(len(bounds), len(factors) - 1)]
            hi = int(np.searchsorted(before, before[lo] + limit / of, side="right")) - 1
            bounds.append((lo, max(lo + 1, hi)))
            lo = bounds[-1][1]
        return bounds

    low, high = 0.0, sum(costs) * max(factors)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if len(greedy(middle)) <= len(factors) else (middle, high)
    return greedy(high * (1 + 1e-9))


def assign(groups: Sequence[WorkUnit], costs: Sequence[float], factors: Sequence[float]) -> list[WorkUnit]:
    """Split groups of clients with these costs into contiguous runs, one for each host or fewer, so that the host that takes
    longest takes least; see `cut`."""
    if len(groups) <= len(factors):
        return [*groups]
    return [tuple(itertools.chain(*groups[lo:hi])) for lo, hi in cut(costs, factors)]
