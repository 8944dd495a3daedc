"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.core.client import ClientMethod, LocalRun, Passes, Upload
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.samples import batch_slices
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, torch


@dataclass
class Control:
    """A client's control variate c_k [P]."""

    c: Tensor


@dataclass(frozen=True)
class SCAFFOLD(ClientMethod):
    """Local steps corrected by control variates (SCAFFOLD, Karimireddy et al., 2020): w ← w − η(∇F − c_k + c).

    After S steps c_k becomes: with `option_2`, c_k − c + (w_g − w_k)/(Sη), which needs plain SGD; with `option_1`, the
    gradient of all the client's samples at w_g, which takes one more pass (in batches of the usual size, with their own
    BatchNorm statistics); with `mean_grad`, the mean of the gradients seen while training, for momentum and Adam. η is
    this round's learning rate; the global step size is `server: [step_size]`. Clients count alike; with another
    weighting, only the mean of the controls does so.

    Wrong choice where clients take part seldom, or bytes count: c_k is as old as a client's last round, and c travels too.
    """

    c_update: Literal["option_2", "option_1", "mean_grad"] = "option_2"
    """How a client's control variate is computed: from its drift, its full gradient or the mean gradient of its steps."""
    base_weights: ClassVar[str | None] = "uniform"
    averages_more: ClassVar[bool] = True
    needs: ClassVar[Needs] = Needs(global_model=True)
    batched: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        own = next((method.name for method in facts.client if not method.trains_plainly), None)
        if own:
            return f"its controls are of plain optimiser steps, one a batch, and {own} trains in its own way."
        if self.c_update != "option_2":
            return None
        if facts.optimizer.name != "sgd" or facts.optimizer.momentum or facts.optimizer.weight_decay:
            return "option_2 needs sgd without momentum and weight decay. Set c_update: mean_grad."
        if any(method.starts_elsewhere for method in facts.client):
            return "option_2 needs training to start at w_g, which another method changes. Set c_update: mean_grad."
        return None

    def own_pass(self, samples: np.ndarray, drop_last: bool) -> tuple[np.ndarray, bool] | None:
        return (samples, False) if self.c_update == "option_1" else None

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray | float:
        return samples if self.c_update == "option_1" else 0.0

    def new_state(self, layers: LayerMap) -> Control:
        return Control(torch.zeros(layers.P))

    def server_steps(self) -> tuple[ServerStep, ...]:
        return (AverageControls(),)

    def for_steps(self, run: LocalRun) -> dict[str, Tensor]:
        shift = {"shift": run.shared["scaffold"] - run.state(self).c}
        return shift | {"total": torch.zeros_like(run.grad)} if self.c_update == "mean_grad" else shift

    def observe_grad(self, run: LocalRun) -> None:
        if self.c_update == "mean_grad":
            run.for_steps(self)["total"].add_(run.grad)

    def correct_grad(self, run: LocalRun) -> None:
        run.grad.add_(run.for_steps(self)["shift"])

    def finish(self, run: LocalRun, upload: Upload) -> None:
        state, steps = run.state(self), max(1, run.steps)
        if self.c_update == "option_2":
            drift = (run.received[: run.layers.P] - run.params) / (steps * run.lr)
            update = drift - run.shared["scaffold"]  # c_k⁺ − c_k
        elif self.c_update == "option_1":
            update = full_gradient(run, run.received) - state.c
        else:
            update = run.for_steps(self)["total"] / steps - state.c
        state.c += update
        upload.vectors["scaffold"] = update


@dataclass(frozen=True)
class AverageControls(ServerStep):
    """The server's half: c ← c + (1/N) Σ_k (c_k⁺ − c_k), N being the clients with training samples."""

    only_scales: ClassVar[bool] = True

    def prepare(self, server: Server) -> None:
        server.shared["scaffold"] = torch.zeros(server.layers.P)

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        mean = cohort.reduce(cohort.uniform(), of="scaffold")
        share = len(cohort.clients) / server.population.holders
        server.shared["scaffold"] = server.shared["scaffold"] + share * mean
        return target


def full_gradient(run: LocalRun, value: Tensor) -> Tensor:
    """Gradient [P] of the mean cross-entropy over all of the client's samples at `value` [S]; no model changes."""
    trained = run.value.clone()
    run.value.copy_(value)
    total, (x, y) = torch.zeros_like(run.grad), run.data.train
    for part in batch_slices(len(y), run.settings.batch_size, drop_last=False):
        run.gradient(x[part], y[part], corrected=False)
        total.add_(run.grad, alpha=len(y[part]) / len(y))
    run.value.copy_(trained)
    return total
