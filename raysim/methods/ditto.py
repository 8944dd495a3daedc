"""Ditto: Fair and Robust Federated Learning Through Personalization (Li et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from raysim.core.bounds import NonNegative, NonNegativeInt
from raysim.core.client import ClientMethod, LocalRun, Passes
from raysim.core.layers import LayerMap
from raysim.lazy import Tensor


@dataclass
class PersonalModel:
    """A client's v_i [S]."""

    v: Tensor | None = None
    optimizer: dict[str, Tensor] | None = None  # that of v, with `local.state: persist`


@dataclass(frozen=True)
class Ditto(ClientMethod):
    """A personal model on a spring to the global one (Ditto, Li et al., 2021): min F_i(v) + lam/2 ‖v − w_g‖².

    First v is trained for `epochs`; it begins as the first model that the client received. Then w is trained as usual
    and sent. w_g is the model from which the training of w starts. With `first: global` the order is reversed, and v is
    held near the w that has just been trained. `official_sgd` is what the code of FedALA's authors does. The personal
    model is v. It has an optimiser of its own, which outlives a round where `local.state` is `persist`.

    Wrong choice where time counts: it trains a second model; a run took twice as long as FedALA's
    (docs/papers/fedala.md).
    """

    lam: NonNegative = 0.1
    """Strength of the spring between the personal and the global model (λ)."""
    epochs: NonNegativeInt = 2
    """Passes over the client's samples for the personal model, each round."""
    first: Literal["personal", "global"] = "personal"
    """Which model is trained first."""
    official_sgd: bool = False
    """Train the personal model without momentum and weight decay."""

    def new_state(self, layers: LayerMap) -> PersonalModel:
        return PersonalModel()

    @property
    def trains_plainly(self) -> bool:
        return True

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray:
        return self.epochs * passes.once(samples)

    def train(self, run: LocalRun) -> None:
        state = run.state(self)
        if state.v is None:
            state.v = run.value.clone()
        if self.first == "personal":
            self._personalize(run, state)
            run.fit()
        else:
            run.fit()
            self._personalize(run, state)

    def _personalize(self, run: LocalRun, state: PersonalModel) -> None:
        """Train v around the model that is loaded, which stays loaded."""
        assert state.v is not None
        centre = run.value.clone()
        run.value.copy_(state.v)
        spec = run.stack.optimizer(run.settings.optimizer)
        if self.official_sgd:
            spec = replace(spec, momentum=0.0, nesterov=False, weight_decay=0.0)
        optimizer = spec.build(run.params, run.grad, run.lr)
        if state.optimizer:
            optimizer.load(state.optimizer)
        with run.aside("ditto"):
            for _ in range(self.epochs):
                for x, y in run.batches(purpose="ditto"):
                    run.gradient(x, y, corrected=False)
                    run.grad.add_(run.params - centre[: run.layers.P], alpha=self.lam)
                    run.clip()
                    optimizer.step()
        state.v = run.value.clone()
        if run.settings.persist:
            state.optimizer = optimizer.state() or None  # plain SGD has none
        run.value.copy_(centre)

    def personal(self, run: LocalRun) -> None:
        v = run.state(self).v
        if v is None:
            super().personal(run)
        else:
            run.value.copy_(v)
