"""Sampling by size (Li et al., On the Convergence of FedAvg on Non-IID Data, ICLR 2020, scheme I)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from raysim.core.cohort import Cohort
from raysim.core.facts import cohort_size
from raysim.core.mixture import Mixture
from raysim.core.selection import Asked, Clients, Selection
from raysim.core.server import Server, Weighting
from raysim.lazy import torch


@dataclass(frozen=True)
class BySize(Selection):
    """K draws with replacement, each client with its share of the samples (Li et al., 2020, scheme I).

    A client that is drawn twice trains once and counts twice; apart from that all count the same, so that the mean is unbiased.

    Wrong choice where clients of few samples must be heard: one with a thousandth of them has a thousandth of the draws.
    """

    def select(self, server: Server, participation: float, clients: Clients) -> Asked:
        sizes = torch.zeros(len(server.population.sizes), dtype=torch.float64)
        sizes[clients.here] = server.population.sizes[clients.here].double()
        count = cohort_size(participation, len(sizes))
        drawn = torch.multinomial(sizes, count, replacement=True, generator=server.generator("cohort by size"))
        times = Counter(drawn.tolist())
        return Asked(tuple(sorted(times)), times=tuple(times[client] for client in sorted(times)))

    def weightings(self) -> tuple[Weighting, ...]:
        return (ByDraws(),)


@dataclass(frozen=True)
class ByDraws(Weighting):
    """A client counts as often as it was drawn."""

    name: ClassVar[str] = "by_size"
    base_weights: ClassVar[str | None] = "uniform"
    stage: ClassVar[str] = "weigh"
    plans_early: ClassVar[bool] = True
    unequal: ClassVar[str] = "counts them as often as they are drawn. Take another selection"

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        asked = server.scratch.asked
        assert asked is not None
        times = dict(zip(asked.clients, asked.times, strict=True))
        return prior.reweighted(prior.lam * torch.tensor([times[client] for client in cohort.clients]))
