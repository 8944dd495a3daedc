"""Fixed global weight shrinking, the comparison of FedLAW (Li et al., 2023) and of FedLWS (Shi et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.bounds import Positive
from raysim.core.cohort import Cohort
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, nn, torch


@dataclass(frozen=True)
class FixedShrink(ServerStep):
    """Shrink by a constant: w_l ← γ_l ŵ_l with γ_l = gamma − decrement·(l − 1) for layers l = 1 … L (FedLAW, FedLWS).

    FedLAW tries one gamma from 0.9 to 1 for the whole model, FedLWS `{gamma: 1, decrement: 0.01}` on a CNN of 5 layers.

    Wrong choice when a model begins from nothing: in 60 rounds at α 100, γ 0.97 ended ten points behind FedAvg
    (docs/papers/fedlaw.md).
    """

    gamma: Positive
    """Factor on the first layer (γ)."""
    decrement: float = 0.0
    """How much smaller the factor of each further layer is."""
    reads_models: ClassVar[bool] = False
    refines: ClassVar[bool] = True
    only_scales: ClassVar[bool] = True

    @property
    def scales(self) -> bool:
        return self.gamma != 1 or self.decrement != 0

    def fits(self, model: nn.Module, layers: LayerMap, classes: int) -> str | None:
        last = self.gamma - self.decrement * (layers.L - 1)
        return f"gamma of the last of {layers.L} layers would be {last:g}; it must be positive." if last <= 0 else None

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        layers = server.layers
        gamma = self.gamma - self.decrement * torch.arange(layers.L, dtype=torch.float64)
        server.note(self, "gamma", gamma, "layer")
        shrunk = target.clone()
        shrunk[: layers.P] *= layers.per_parameter(gamma).to(target.dtype)
        return shrunk
