"""Ditto: Fair and Robust Federated Learning Through Personalization (Li et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from raysim.core.client import ClientMethod, LocalRun
from raysim.core.layers import LayerMap


@dataclass
class PersonalModel:
    """A client's v_i [S]."""

    v: Tensor | None = None


@dataclass(frozen=True)
class Ditto(ClientMethod):
    """A personal model on a spring to the global one (Ditto, Li et al., 2021): min F_i(v) + lam/2 ‖v − w_g‖².

    First `epochs` of v, which begins as the first model that the client received, then local training of w as usual;
    w is sent, w_g is where its training starts. `official_sgd`: v without momentum and weight decay, as in the code of
    FedALA's authors. The personal model is v.
    """

    lam: float = 0.1
    epochs: int = 2
    official_sgd: bool = False

    def new_state(self, layers: LayerMap) -> PersonalModel:
        return PersonalModel()

    def train(self, run: LocalRun) -> None:
        state, start = run.state(self), run.value.clone()
        if state.v is not None:
            run.value.copy_(state.v)
        spec = run.stack.optimizer(run.settings.optimizer)
        if self.official_sgd:
            spec = replace(spec, momentum=0.0, nesterov=False, weight_decay=0.0)
        optimizer = spec.build(run.params, run.grad, run.lr)
        with run.aside("ditto"):
            for _ in range(self.epochs):
                for x, y in run.batches(purpose="ditto"):
                    run.gradient(x, y, corrected=False)
                    run.grad.add_(run.params - start[: run.layers.P], alpha=self.lam)
                    optimizer.step()
        state.v = run.value.clone()
        run.value.copy_(start)
        run.fit()

    def personal(self, run: LocalRun) -> None:
        v = run.state(self).v
        if v is None:
            super().personal(run)
        else:
            run.value.copy_(v)
