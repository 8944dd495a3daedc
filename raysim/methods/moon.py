"""MOON: Model-Contrastive Federated Learning (Li et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.core.bounds import NonNegative, Positive
from raysim.core.client import FORWARD, ClientMethod, LocalRun, Passes
from raysim.core.method import Needs
from raysim.lazy import F, Tensor, torch


@dataclass(frozen=True)
class MOON(ClientMethod):
    """Latents are drawn to the global model's, away from the client's last ones (MOON, Li et al., 2021).

    Loss + mu · mean(−ln[e^{cos(z, z_g)/tau} / (e^{cos(z, z_g)/tau} + e^{cos(z, z_prev)/tau})]), where z are the body's
    outputs and the last model of a newcomer is the one that the run began with. The other two models run in train mode
    too, without a graph; their statistics stay as they are.

    Wrong choice on slow devices: every batch takes two more forward passes.
    """

    mu: NonNegative = 1.0
    """Weight of the contrastive term (μ)."""
    tau: Positive = 0.5
    """Temperature of the contrastive term (τ)."""
    needs: ClassVar[Needs] = Needs(previous="initial", global_model=True, head="its latents")
    batched: ClassVar[bool] = True

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray | float:
        return 2 * FORWARD * passes.epochs * passes.epoch(samples) if self.mu else 0.0

    def for_steps(self, run: LocalRun) -> dict[str, Tensor]:
        assert run.previous is not None
        return {"previous": run.previous}

    def penalty(self, run: LocalRun, x: Tensor, y: Tensor, z: Tensor, loss: Tensor) -> Tensor | float:
        if not self.mu:
            return 0.0
        with torch.no_grad():
            others = run.features(run.received, x), run.features(run.for_steps(self)["previous"], x)
        to_global, to_previous = (F.cosine_similarity(z, other) for other in others)  # [B]
        return self.mu * F.softplus((to_previous - to_global) / self.tau).mean()
