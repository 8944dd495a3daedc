"""pFedMe: Personalized Federated Learning with Moreau Envelopes (T. Dinh et al., 2020)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.core.bounds import NonNegative, PositiveInt
from raysim.core.client import ClientMethod, LocalRun, Passes
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.server import ServerStep
from raysim.lazy import Tensor
from raysim.methods.fedavg import StepSize
from raysim.methods.sgdm import SGDM


@dataclass
class PersonalModel:
    """A client's θ_i [S] after its last training."""

    theta: Tensor | None = None


@dataclass(frozen=True)
class pFedMe(ClientMethod):
    """A personal θ near each local w (pFedMe, T. Dinh et al., 2020): min over w of min over θ F_i(θ) + lam/2 ‖θ − w‖².

    For each batch `inner_steps` of θ ← θ − eta (∇L(θ) + lam (θ − w) + mu θ), then w ← w − η lam (w − θ) with the
    round's learning rate η. Both begin where local training starts, and θ continues from batch to batch. The server
    moves by `beta` towards the mean of the w. Momentum and weight decay of `local` are not used; other optimisers than
    sgd, `state: persist` and `sgdm` are refused. θ_i is tested or, with `evaluate: w`, the local model (before
    training, the model from which it would start).

    Wrong choice where the time of a step counts: every batch takes `inner_steps` gradients.
    """

    eta: NonNegative = 0.01
    """Step size of the personal model θ."""
    lam: NonNegative = 15.0
    """Strength of the spring between θ and w (λ)."""
    inner_steps: PositiveInt = 5
    """Steps of θ on each batch (K)."""
    mu: NonNegative = 0.001
    """Weight decay of θ."""
    beta: NonNegative = 1.0
    """How far the server moves towards the mean of the clients' w (β)."""
    evaluate: Literal["theta", "w"] = "theta"
    """Which model is tested as the client's own."""

    def check(self, facts: RunFacts) -> str | None:
        own = "takes steps of its own"
        if facts.optimizer.name != "sgd":
            return f"{own}, which are not those of local.optimizer: {facts.optimizer.name}. Set local.optimizer: sgd."
        if facts.persist:
            return f"{own}, after which an optimiser has no state to keep. Set local.state: reset."
        if sgdm := next((method for method in facts.client if isinstance(method, SGDM)), None):
            return f"{own}, without the momentum that {sgdm.name} brings. Leave one of them out."
        if (pull := facts.lr * self.lam) > 1:
            warnings.warn(f"pfedme: local.lr times lam is {pull:g}; above 1 w overshoots θ", stacklevel=1)
        return None

    def new_state(self, layers: LayerMap) -> PersonalModel:
        return PersonalModel()

    def server_steps(self) -> tuple[ServerStep, ...]:
        return (StepSize(self.beta),) if self.beta != 1 else ()

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray:
        return (self.inner_steps - 1) * passes.epochs * passes.epoch(samples)

    def train(self, run: LocalRun) -> None:
        run.scratch["w"] = run.params.clone()
        run.fit()
        run.state(self).theta = run.value.clone()
        run.params.copy_(run.scratch["w"])

    def step(self, run: LocalRun, x: Tensor, y: Tensor) -> None:
        theta, w = run.params, run.scratch["w"]
        for _ in range(self.inner_steps):
            run.gradient(x, y)
            run.grad.add_(theta - w, alpha=self.lam).add_(theta, alpha=self.mu)
            theta.sub_(run.grad, alpha=self.eta)
        w.sub_(w - theta, alpha=run.lr * self.lam)

    def personal(self, run: LocalRun) -> None:
        theta = run.state(self).theta
        if self.evaluate == "theta" and theta is not None:
            run.value.copy_(theta)
        else:
            super().personal(run)
