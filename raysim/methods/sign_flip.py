"""Sign flipping (Li et al., RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning, AAAI 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.core.attack import Attack
from raysim.core.bounds import Positive
from raysim.core.local_run import LocalRun
from raysim.lazy import Tensor


@dataclass(frozen=True)
class SignFlip(Attack):
    """Sends -s times its own update (Li et al., 2019, section 5).

    Wrong choice as the only test of a robust rule: the lie is opposite to all honest updates, and easily found.
    """

    scale: Positive = 1.0
    """s; a large one can outweigh all others in a mean."""

    def update(self, honest: Tensor, client: LocalRun, known: Tensor | None) -> Tensor:
        return -self.scale * honest
