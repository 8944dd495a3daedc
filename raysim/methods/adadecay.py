"""AdaDecay: Adaptive Weight Decay for Deep Neural Networks (Nakamura and Hong, 2019), on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.bounds import NonNegative
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, torch

EPS = 1e-12


@dataclass(frozen=True)
class AdaDecay(ServerStep):
    """Decay the parameters that moved most in their layer (AdaDecay, Nakamura and Hong, 2019): w_j ← ŵ_j − s θ_j w_j.

    θ_j = 2 / (1 + exp(−α ĝ_j)), where ĝ are the layer's |d_j| with mean 0 and (population) deviation 1. Deviation: the
    article decays in every SGD step; FedLWS (2025) compares with a server form that it does not write down.

    Wrong choice to hold back a layer that moves much: θ compares parameters within a layer, so each layer decays alike.
    """

    strength: NonNegative = 5e-4
    """Decay of a parameter that moved by the mean of its layer (s)."""
    alpha: float = 4.0
    """How much more those that moved more decay (α); 0: all decay alike."""
    reads_models: ClassVar[bool] = False
    refines: ClassVar[bool] = True

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        layers, P, params = server.layers, server.layers.P, server.params
        moved = (target[:P] - params).abs()
        counts = layers.counts.clamp_min(1).double()
        centred = moved - layers.per_parameter(layers.dots(moved, torch.ones_like(moved)) / counts).to(moved.dtype)
        deviation = layers.norms(centred) / counts.sqrt()
        scale = torch.where(deviation > EPS, self.alpha / deviation.clamp_min(EPS), 0.0)  # all alike: θ = 1
        theta = 2 * torch.sigmoid(layers.per_parameter(scale).to(moved.dtype) * centred)
        decayed = target.clone()
        decayed[:P] -= self.strength * theta * params
        return decayed
