"""FedProx: Federated Optimization in Heterogeneous Networks (Li et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from raysim.core.bounds import NonNegative
from raysim.core.client import ClientMethod, LocalRun
from raysim.core.method import Needs
from raysim.core.optim import OptimizerSpec


@dataclass(frozen=True)
class FedProx(ClientMethod):
    """Adds a proximal term to the clients' loss (FedProx, Li et al., 2020): min F_k(w) + mu/2 ‖w − w_g‖².

    w_g is what was downloaded, wherever training starts. The recorded loss is the cross-entropy without the term.
    `official_sgd`: no momentum and no weight decay, as in the code of FedLAW and of FedALA's authors.

    Wrong choice for a model for each client: on their own test samples it reached 49.0 %, FedAvg 49.2
    (docs/papers/fedala.md).
    """

    mu: NonNegative = 0.001
    """Strength of the proximal term (μ)."""
    official_sgd: bool = False
    """Train without momentum and weight decay."""
    needs: ClassVar[Needs] = Needs(global_model=True)
    batched: ClassVar[bool] = True

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        spec = replace(spec, proximal=self.mu)
        return replace(spec, momentum=0.0, nesterov=False, weight_decay=0.0) if self.official_sgd else spec

    def correct_grad(self, run: LocalRun) -> None:
        if self.mu:
            run.grad.add_(run.params - run.received[: run.layers.P], alpha=self.mu)
