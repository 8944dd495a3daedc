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
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class TrimmedMean(Coordinatewise):
    """Of each coordinate the mean without the b = ⌊βK⌋ smallest and the b largest values (Yin et al., 2018, option II).

    A layer whose senders are so few that b is 0 stays as the server has it: its mean would be unprotected. Where all are such, the
    round leaves the model, and no server step follows.

    Wrong choice where clients hold different classes: it cuts off what only a few of them learn.
    """

    beta: BelowHalf = 0.2
    """β, the share that is cut on each side; 0 is the plain mean."""

    def check(self, facts: RunFacts) -> str | None:
        k = facts.senders
        if self.beta and k is not None and not self._cut(k):
            of, more = ("of a round", "draw") if k == facts.cohort_size else ("that send a layer", "hear")
            share = f"Set it to {ceil(100 / k) / 100}, or {more} more clients"
            way = share if k > 2 else f"{more.capitalize()} three or more"
            return f"beta {self.beta} of the {k} clients {of} is none. {way}."
        return super().check(facts)

    def combine(self, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor | None:
        if not self.beta:
            return None
        layers, sent = mixture.layers, mixture.sent
        senders = layers.collect(sent).sum(0).tolist()  # of each layer
        trims = layers.expand(torch.tensor([self._cut(k) > 0 for k in senders]))  # [T + Tb]
        server.fell_back(self, bool((sent & ~trims).any()))
        server.scratch.leaves_model = not (sent & trims).any()
        return super().combine(mixture.select(sent & trims), cohort, server)

    def column(self, updates: Tensor) -> Tensor:
        k = len(updates)
        cut = self._cut(k)
        return ordered(updates)[:, cut : k - cut].mean(1)

    def _cut(self, k: int) -> int:
        return int(self.beta * k + 1e-9)
