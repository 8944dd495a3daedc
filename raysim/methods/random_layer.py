"""Random layer selection: the baseline of FedLDF (2024) that needs no feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting, check_senders
from raysim.lazy import torch


@dataclass(frozen=True)
class RandomLayer(Weighting):
    """Each layer is sent only by `n` clients, drawn for every layer and round (a baseline of FedLDF, 2024).

    Wrong choice with `n` far below K: the mean of a layer is then of n clients, and its noise √(K/n) times as large.
    """

    n: int
    """How many clients send each layer."""
    stage: ClassVar[str] = "select"
    plans_early: ClassVar[bool] = True

    @property
    def senders(self) -> int:
        return self.n

    def mask_bits(self, layers: LayerMap) -> int:
        return layers.L

    def check(self, facts: RunFacts) -> str | None:
        return check_senders("n", self.n, facts.cohort_size)

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        layers = server.layers
        stream = server.generator("random_layer")
        lots = torch.rand(len(cohort.clients), layers.L, dtype=torch.float64, generator=stream)
        chosen = prior.best(lots, self.n)
        server.note(self, "uploads", chosen, "client", "layer")
        return prior.select(layers.expand(chosen))
