"""FedAdagrad, FedAdam, FedYogi: Adaptive Federated Optimization (Reddi et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.bounds import Fraction, NonNegative, Positive
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.rates import Schedules, scheduled
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class FedOpt(ServerStep):
    """An adaptive optimiser on the server: m ← β₁ m + (1 − β₁) d, w ← w + η m / (√s + ε), where d = ŵ − w.

    As in the article there is no bias correction. Running statistics are averaged.
    """

    eta: Positive = 0.01
    """Step size of the server (η)."""
    eta_schedule: Schedules = ()
    """Factors on η from round to round, multiplied with one another; empty: 1."""
    beta1: Fraction = 0.9
    """Share of the last mean update in the new one (β₁)."""
    epsilon: Positive = 1e-3
    """Added to the root of s, so that small updates are not blown up (ε, the paper's τ)."""
    initial: NonNegative | None = None
    """What s is before the first round; null: ε² (FedLAW's code: 0, with ε = 1e-5)."""
    reads_models: ClassVar[bool] = False
    remembers: ClassVar[bool] = True

    def second(self, s: Tensor, squared: Tensor) -> Tensor:
        """s after the round whose update, squared, is `squared`."""
        raise NotImplementedError

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        P = server.layers.P
        d = target[:P] - server.params
        first = self.epsilon**2 if self.initial is None else self.initial
        memory = server.memory.get(self, {"m": torch.zeros_like(d), "s": torch.full_like(d, first)})
        m = self.beta1 * memory["m"] + (1 - self.beta1) * d
        s = self.second(memory["s"], d.square())
        server.memory[self] = {"m": m, "s": s}
        stepped = target.clone()
        eta = scheduled(self.eta, self.eta_schedule, server.t, server.rounds)
        stepped[:P] = server.params + eta * m / (s.sqrt() + self.epsilon)
        return stepped


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """Steps divided by the root of all squared updates so far (FedAdagrad, Reddi et al., 2021): s ← s + d².

    Wrong choice for long runs: s only grows, so that steps become ever shorter.
    """

    eta: Positive = 0.1
    """Step size of the server (η)."""
    beta1: Fraction = 0.0
    """Share of the last mean update in the new one (β₁)."""

    def second(self, s: Tensor, squared: Tensor) -> Tensor:
        return s + squared


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """Steps divided by the root of recent squared updates (FedAdam, Reddi et al., 2021): s ← β₂ s + (1 − β₂) d².

    Wrong choice without a tuned η: a coordinate whose updates are well above ε moves by about η, however small they are.
    """

    beta2: Fraction = 0.99
    """Share of the last mean squared update in the new one (β₂)."""

    def second(self, s: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * s + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """FedAdam whose s changes by d² at most (FedYogi, Reddi et al., 2021): s ← s − (1 − β₂) d² sign(s − d²).

    Wrong choice where early updates are far larger than later ones: s falls by no more than (1 − β₂) d² a round.
    """

    beta2: Fraction = 0.99
    """How slowly s follows the squared updates (β₂)."""

    def second(self, s: Tensor, squared: Tensor) -> Tensor:
        return s - (1 - self.beta2) * squared * (s - squared).sign()
