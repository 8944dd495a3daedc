"""FedAvgM: Measuring the Effects of Non-Identical Data Distribution (Hsu et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep

if TYPE_CHECKING:
    from raysim.config import Config


@dataclass(frozen=True)
class FedAvgM(ServerStep):
    """Momentum on the server (FedAvgM, Hsu et al., 2019): v ← β v + d, w ← w + η v with d = ŵ − w.

    `damped` takes (1 − β) d, as FedDisco's code does. With `scale_by_lr` v is in units of gradients, so that it follows
    a decaying local learning rate: FedNova's server momentum. Running statistics are averaged.
    """

    beta: float = 0.9
    eta: float = 1.0
    damped: bool = False
    scale_by_lr: bool = False
    reads_models: ClassVar[bool] = False

    def check(self, config: Config) -> str | None:
        return f"beta is {self.beta}; it must be in [0, 1)." if not 0 <= self.beta < 1 else None

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        P, unit = server.layers.P, server.lr if self.scale_by_lr else 1.0
        velocity = server.memory.get("fedavgm", torch.zeros_like(server.params))  # [P]
        gain = (1 - self.beta if self.damped else 1.0) / unit
        velocity = server.memory["fedavgm"] = self.beta * velocity + gain * (target[:P] - server.params)
        stepped = target.clone()
        stepped[:P] = server.params + self.eta * unit * velocity
        return stepped
