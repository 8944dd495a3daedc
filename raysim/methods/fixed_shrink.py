"""Fixed global weight shrinking, the comparison of FedLAW (Li et al., 2023) and of FedLWS (Shi et al., 2025)."""

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
class FixedShrink(ServerStep):
    """Shrink by a constant: w_l ← γ_l ŵ_l with γ_l = gamma − decrement·(l − 1) for layers l = 1 … L (FedLAW, FedLWS).

    FedLAW tries one gamma from 0.9 to 1 for the whole model, FedLWS `{gamma: 1, decrement: 0.01}` on a CNN of 5 layers.
    """

    gamma: float
    decrement: float = 0.0
    reads_models: ClassVar[bool] = False

    def check(self, config: Config) -> str | None:
        return f"gamma is {self.gamma}; it must be positive." if self.gamma <= 0 else None

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        layers = server.layers
        gamma = self.gamma - self.decrement * torch.arange(layers.L, dtype=torch.float64)
        server.note(self, "gamma", gamma, "layer")
        shrunk = target.clone()
        shrunk[: layers.P] *= layers.expand(gamma).to(target.dtype)
        return shrunk
