"""The trimmed mean (Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from raysim.core.bounds import BelowHalf
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.mixture import Mixture
from raysim.core.robust import Coordinatewise, ordered
from raysim.core.server import Server
from raysim.lazy import Tensor


@dataclass(frozen=True)
class TrimmedMean(Coordinatewise):
    """Of each coordinate the mean without the b = ⌊βK⌋ smallest and the b largest values (Yin et al., 2018, option II).

    Wrong choice where clients hold different classes: it cuts off what only a few of them learn.
    """

    beta: BelowHalf = 0.2
    """β, the share that is cut on each side; 0 is the plain mean."""

    def check(self, facts: RunFacts) -> str | None:
        cohort = facts.cohort_size
        if self.beta and cohort is not None and not self._cut(cohort):
            way = f"Set it to {ceil(100 / cohort) / 100}, or draw more clients" if cohort > 2 else "Draw three or more"
            return f"beta {self.beta} of the {cohort} clients of a round is none. {way}."
        return super().check(facts)

    def combine(self, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor | None:
        return super().combine(mixture, cohort, server) if self.beta else None

    def column(self, updates: Tensor) -> Tensor:
        k = len(updates)
        cut = self._cut(k)
        return ordered(updates)[:, cut : k - cut].mean(1)

    def _cut(self, k: int) -> int:
        return int(self.beta * k + 1e-9)
