"""FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking (Shi et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep

EPS = 1e-12


@dataclass(frozen=True)
class FedLWS(ServerStep):
    """Shrink each layer where clients disagree (FedLWS, 2025): γ_l = ‖w_l‖ / (β τ_l ‖d_l‖ + ‖w_l‖), w_l ← γ_l ŵ_l.

    τ_l is the mean distance of the uploaders' updates from their mean, d = ŵ − w. Deviation: a layer whose norm is zero
    is not shrunk (γ = 1), where the rule would keep it at zero for ever. Buffers are never shrunk.
    """

    beta: float = 0.1

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        layers, P = server.layers, server.layers.P
        sent = mixture.support()  # equal weights over what was uploaded
        spread = cohort.distances(to=cohort.reduce(sent)[:P])  # ‖Δ_k − Δ̄‖  [K, L]
        tau = self.beta * mean_over_uploaders(spread, sent)
        norm = layers.norms(server.params)
        gamma = norm / (tau * layers.norms(target[:P] - server.params) + norm).clamp_min(EPS)
        gamma = torch.where(norm > EPS, gamma, 1.0)
        server.note(self, "gamma", gamma, "layer")
        server.note(self, "tau", tau / self.beta if self.beta else tau, "layer")
        shrunk = target.clone()
        shrunk[:P] *= layers.expand(gamma).to(target.dtype)
        return shrunk


def mean_over_uploaders(per_layer: Tensor, sent: Mixture) -> Tensor:
    """[K, L] -> [L]: the mean over the clients that sent the layer; a layer is sent whole or not at all."""
    layers = sent.layers
    first = torch.tensor([layers.groups.index(layer) for layer in range(layers.L)])  # one tensor of each layer
    return (per_layer * sent.base[:, first]).sum(0)
