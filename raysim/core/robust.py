"""What robust rules have in common: they hold although some clients send what they like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class Robust(Weighting):
    """Counts all clients alike, because the numbers of samples are what clients say, and protects one message each."""

    base_weights: ClassVar[str | None] = "uniform"
    whole: ClassVar[bool] = False
    """Whether it compares whole updates, in which no layer may be missing."""

    def check(self, facts: RunFacts) -> str | None:
        for method in facts.client:
            if method.averages_more:
                return f"{method.name} averages more than the clients' models, which would go unprotected."
            if method.sends_parts:
                zeros = f"{method.name} {method.withholds}. Leave one of the two out"
                return f"takes what a client does not send for an update of zero, but {zeros}."
        for other in facts.weighting:
            if self.whole and other.stage == "select":
                return f"compares whole updates, but {other.name} lets clients send parts of them."
        for other in facts.every_weighting:
            if other is not self and self.refuses(other):
                return f"counts all clients alike, but {other.name} {other.unequal}."
        return None

    def refuses(self, other: Weighting) -> bool:
        """Whether it does not go with the weights of `other`."""
        return other.stage != "select" and other.unequal is not None

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        return prior


@dataclass(frozen=True)
class Coordinatewise(Robust):
    """A rule for each coordinate by itself, among the clients that send it. Running statistics are coordinates, too."""

    plans_early: ClassVar[bool] = True

    def combine(self, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor | None:
        return server.value + cohort.columns(self.column, mixture)

    def column(self, updates: Tensor) -> Tensor:
        """[n] of the updates [k, n]."""
        raise NotImplementedError


def ordered(updates: Tensor) -> Tensor:
    """[n, k] the updates [k, n], the values of each coordinate in ascending order."""
    if updates.is_cuda:
        return updates.T.sort(dim=1).values
    # NumPy sorts rows that lie in one piece ten times as fast as PyTorch.
    return torch.from_numpy(np.sort(updates.T.contiguous().numpy(), axis=1))
