"""Per-FedAvg: Personalized Federated Learning with Theoretical Guarantees (Fallah et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.core.bounds import NonNegative
from raysim.core.client import ClientMethod, LocalRun, Passes
from raysim.lazy import Tensor


@dataclass(frozen=True)
class PerFedAvg(ClientMethod):
    """A model from which one step fits each client (Per-FedAvg, Fallah et al., 2020, first order).

    A step takes 2B samples: θ' = θ − alpha ∇L(θ; first half), then θ ← θ − beta ∇L(θ'; second half) by the local
    optimiser; null means the round's learning rate. A personal model is the global one after a step of alpha on a batch
    of B. A shorter last batch is halved too; FedALA's authors drop it (`local.drop_last`) and train two epochs a round.

    Wrong choice where the global model is used as it is: it is trained to be good a step later.
    """

    alpha: NonNegative | None = None
    """Step size of the adaptation (α); null: the round's learning rate."""
    beta: NonNegative | None = None
    """Step size of the meta-update (β); null: the round's learning rate."""
    batches_per_step: ClassVar[int] = 2

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray:
        """A shorter last batch loses the odd one of its samples, but one that is alone is both halves."""
        rest = passes.epoch(samples) % passes.step
        return passes.epochs * np.where(rest > 0, 2 * np.maximum(1, rest // 2) - rest, 0)

    def step(self, run: LocalRun, x: Tensor, y: Tensor) -> None:
        half = max(1, len(y) // 2)
        theta = run.params.clone()
        self._adapt(run, x[:half], y[:half])
        run.gradient(x[-half:], y[-half:])
        run.params.copy_(theta)
        run.optimizer.lr = run.lr if self.beta is None else self.beta
        run.optimizer.step(run.trained)

    def personal(self, run: LocalRun) -> None:
        super().personal(run)
        for x, y in run.batches(purpose="personal"):
            self._adapt(run, x, y)
            break

    def _adapt(self, run: LocalRun, x: Tensor, y: Tensor) -> None:
        run.gradient(x, y, corrected=False)
        run.params[run.trained].sub_(run.grad[run.trained], alpha=run.lr if self.alpha is None else self.alpha)
