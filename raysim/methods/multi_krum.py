"""Krum and Multi-Krum (Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.bounds import NonNegativeInt, PositiveInt
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.mixture import Mixture
from raysim.core.robust import Robust
from raysim.core.server import Server, Weighting
from raysim.lazy import Tensor, torch
from raysim.methods.fedbuff import Stale


@dataclass(frozen=True)
class MultiKrum(Robust):
    """The mean of the m clients that are nearest to their K - f - 2 nearest others (Blanchard et al., 2017, section 4).

    A client's score is the sum of its squared distances to them; the m lowest are kept, of equal ones the lower id. It needs
    K ≥ 2f + 3 clients: with fewer the round leaves the model as it was, and no server step follows. m = 1 is Krum.

    Wrong choice where clients hold different classes: it drops those that are alone with theirs.
    """

    f: NonNegativeInt
    """How many clients of a round may be malicious at most."""
    m: PositiveInt | None = None
    """How many are kept; null: K - f."""

    whole: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        cohort = facts.cohort_size
        if cohort is not None and cohort < 2 * self.f + 3:
            return f"f {self.f} needs rounds of {2 * self.f + 3} clients (2f + 3), and they have {cohort}."
        if cohort is not None and self.m is not None and self.m > cohort:
            return f"m is {self.m}, but a round has {cohort} clients."
        return super().check(facts)

    def refuses(self, other: Weighting) -> bool:
        stale = isinstance(other, Stale) and other.of.weights == "uniform"  # which the server knows by itself
        return super().refuses(other) and not stale

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        K = len(cohort.clients)
        if self._too_few(K):
            return prior
        scores = krum_scores(squared_distances(cohort.gram()), self.f)
        kept = torch.zeros(K, dtype=torch.bool)
        kept[scores.argsort(stable=True)[: self.m or K - self.f]] = True
        server.note(self, "score", scores, "client")
        return prior.keep(kept)

    def combine(self, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor | None:
        server.scratch.leaves_model = too_few = self._too_few(len(cohort.clients))
        server.fell_back(self, too_few)
        return server.value if too_few else None

    def _too_few(self, K: int) -> bool:
        return 2 * self.f + 3 > K


def squared_distances(gram: Tensor) -> Tensor:
    """[K, K] float64 squared distances of vectors with these inner products."""
    norms = gram.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * gram).clamp_min(0)


def krum_scores(squared: Tensor, f: int) -> Tensor:
    """[K] of each client the sum of its K - f - 2 smallest squared distances to others."""
    K = len(squared)
    others = squared[~torch.eye(K, dtype=torch.bool)].view(K, K - 1)
    return others.sort(dim=1).values[:, : K - f - 2].sum(1)
