"""FedPHP: Federated Personalization with Inherited Private Models (Li et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.core.bounds import NonNegative, Probability
from raysim.core.client import FORWARD, ClientMethod, LocalRun, Passes, Upload
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.lazy import Tensor, torch

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


@dataclass
class PrivateModel:
    """A client's inherited model q_i [S]."""

    q: Tensor | None = None


@dataclass(frozen=True)
class FedPHP(ClientMethod):
    """An inherited private model teaches the local one (FedPHP, Li et al., 2021): (1 − lam) CE + lam MMD(z_w, z_q).

    z are the body's outputs; q's are computed without a graph, and its statistics do not change. MMD compares their
    distributions over a batch. After training q ← (1 − μ_t) w + μ_t q, μ_t = mu t/T; a newcomer's q is the model that
    it received. The local model is tested, as in the code of FedALA's authors, or q with `evaluate: private`, as in the
    article.

    Wrong choice where the time of a step counts: every batch passes through two models.
    """

    mu: Probability = 0.9
    """Share of the inherited model that remains at the end of the run (μ); it grows linearly from 0."""
    lam: NonNegative = 0.01
    """Weight of the MMD term against the cross-entropy (λ)."""
    evaluate: Literal["local", "private"] = "local"
    """Which model is tested as the client's own."""
    needs: ClassVar[Needs] = Needs(total_rounds=True, head="its latents")
    batched: ClassVar[bool] = True

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray | float:
        return FORWARD * passes.epochs * passes.epoch(samples) if self.lam else 0.0

    def new_state(self, layers: LayerMap) -> PrivateModel:
        return PrivateModel()

    def _private(self, run: LocalRun) -> Tensor:
        q = run.state(self).q
        return run.received if q is None else q

    def for_steps(self, run: LocalRun) -> dict[str, Tensor]:
        return {"inherited": self._private(run)}

    def penalty(self, run: LocalRun, x: Tensor, y: Tensor, z: Tensor, loss: Tensor) -> Tensor | float:
        if not self.lam:
            return 0.0
        with torch.no_grad():
            inherited = run.features(run.for_steps(self)["inherited"], x)
        return self.lam * (mmd(z, inherited) - loss)

    def finish(self, run: LocalRun, upload: Upload) -> None:
        run.state(self).q = run.value.lerp(self._private(run), self.mu * run.t / run.round_info.rounds)

    def personal(self, run: LocalRun) -> None:
        if self.evaluate == "private":
            run.value.copy_(self._private(run))
        else:
            super().personal(run)


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """Maximum mean discrepancy of two samples [B, D] under a sum of Gaussian kernels: mean(K_xx + K_yy − 2 K_xy)."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squared = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T  # [B, B]; smooth where cdist is not
        return torch.stack([torch.exp(-squared / (2 * width)) for width in BANDWIDTHS]).sum(0)

    return (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)).mean()
