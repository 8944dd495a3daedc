"""FedAvgM: Measuring the Effects of Non-Identical Data Distribution (Hsu et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.bounds import Fraction, Positive
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.rates import Schedules, scheduled
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class FedAvgM(ServerStep):
    """Momentum on the server (FedAvgM, Hsu et al., 2019): v ← β v + d, w ← w + η v with d = ŵ − w.

    `damped` takes (1 − β) d, as FedDisco's code does. With `scale_by_lr` v is in units of gradients, so that it follows
    a decaying local learning rate: FedNova's server momentum. Running statistics are averaged.

    Wrong choice with few clients a round: v carries the drift of one cohort over about 1/(1 − β) rounds.
    """

    beta: Fraction = 0.9
    """Share of the last velocity in the new one (β)."""
    eta: Positive = 1.0
    """Step size of the server (η)."""
    eta_schedule: Schedules = ()
    """Factors on η from round to round, multiplied with one another; empty: 1."""
    damped: bool = False
    """Multiply the update by 1 − β before it is added."""
    scale_by_lr: bool = False
    """Keep the velocity in units of gradients, so that it follows the local learning rate."""
    reads_models: ClassVar[bool] = False
    remembers: ClassVar[bool] = True

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        P, unit = server.layers.P, server.lr if self.scale_by_lr else 1.0
        eta = scheduled(self.eta, self.eta_schedule, server.t, server.rounds)
        velocity = server.memory.get(self, torch.zeros_like(server.params))  # [P]
        gain = (1 - self.beta if self.damped else 1.0) / unit
        velocity = server.memory[self] = self.beta * velocity + gain * (target[:P] - server.params)
        stepped = target.clone()
        stepped[:P] = server.params + eta * unit * velocity
        return stepped
