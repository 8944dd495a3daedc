"""A little is enough (Baruch et al., A Little Is Enough: Circumventing Defenses For Distributed Learning, NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from raysim.core.attack import Attack
from raysim.core.bounds import Positive
from raysim.core.cohort import Cohort
from raysim.core.local_run import LocalRun
from raysim.core.server import Server
from raysim.lazy import Tensor, torch

FIXED = 1.5  # many papers' z, for cohorts in which the rule gives no attack


@dataclass(frozen=True)
class ALIE(Attack):
    """Sends μ - z σ of the other clients' updates (Baruch et al., 2019, algorithm 3), near enough to pass for one of them.

    μ and σ are the mean and the standard deviation of each coordinate, σ with the divisor n - 1. Of a round's K clients f are
    malicious; z = Φ⁻¹((K - f - s) / (K - f)), where s = ⌊K/2⌋ + 1 - f others must be further from the mean than the lie. Where
    that is no positive number, such as for f = 2 of K = 10, z is 1.5, and the round notes `fell_back`. All malicious clients
    send the same.

    Wrong choice where few clients lie: at f = 2 of K = 10 the formula has no positive z, and 1.5 stands in.
    """

    z: Positive | None = None
    """null: by the rule, from the round's K and f."""

    sees_others: ClassVar[bool] = True

    def known(self, others: Cohort, malicious: int, server: Server) -> Tensor | None:
        z = self.z or rule(len(others.clients) + malicious, malicious)
        server.fell_back(self, z is None)
        server.note(self, "z", torch.tensor(z or FIXED))
        return others.columns(below, None, z or FIXED)[: others.layers.P]

    def update(self, honest: Tensor, client: LocalRun, known: Tensor | None) -> Tensor:
        assert known is not None
        return known


def rule(K: int, f: int) -> float | None:
    """z of a cohort of K with f malicious; None where that is no positive number."""
    supporters = K // 2 + 1 - f
    share = (K - f - supporters) / (K - f)
    return NormalDist().inv_cdf(share) if 0.5 < share < 1 else None


def below(updates: Tensor, z: float) -> Tensor:
    """[n] the mean of the updates [k, n] less z standard deviations."""
    if len(updates) == 1:
        return updates[0]
    return updates.mean(0) - z * torch.std(updates, dim=0)
