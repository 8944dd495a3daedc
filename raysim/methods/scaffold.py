"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.cohort import Cohort
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep

if TYPE_CHECKING:
    from raysim.config import Config


@dataclass
class Control:
    """A client's control variate c_k [P]."""

    c: Tensor


@dataclass(frozen=True)
class SCAFFOLD(ClientMethod):
    """Local steps corrected by control variates (Karimireddy et al., 2020, option II): w ← w − η(∇F − c_k + c).

    c_k⁺ = c_k − c + (w_g − w_k)/(Sη) after S steps with this round's η, which needs plain SGD.
    """

    base_weights: ClassVar[str | None] = "uniform"

    def check(self, config: Config) -> str | None:
        if config.local.optimizer != "sgd" or config.local.momentum or config.local.weight_decay:
            return "option II reads the mean gradient off the update, which needs sgd without momentum and weight decay."
        return None

    def new_state(self, layers: LayerMap) -> Control:
        return Control(torch.zeros(layers.P))

    def server_steps(self) -> tuple[ServerStep, ...]:
        return (AverageControls(),)

    def correct_grad(self, run: LocalRun) -> None:
        run.grad.add_(run.shared["scaffold"]).sub_(run.state(self).c)

    def finish(self, run: LocalRun, upload: Upload) -> None:
        state, P = run.state(self), run.layers.P
        drift = (run.received[:P] - run.params) / (max(1, run.steps) * run.lr)
        update = drift - run.shared["scaffold"]  # c_k⁺ − c_k
        state.c += update
        upload.vectors["scaffold"] = update


@dataclass(frozen=True)
class AverageControls(ServerStep):
    """The server's half: c ← c + (1/N) Σ_k (c_k⁺ − c_k)."""

    def prepare(self, server: Server) -> None:
        server.shared["scaffold"] = torch.zeros(server.layers.P)

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        mean = cohort.reduce(cohort.uniform(), of="scaffold")
        share = len(cohort.clients) / len(server.population.sizes)
        server.shared["scaffold"] = server.shared["scaffold"] + share * mean
        return target
