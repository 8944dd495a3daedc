"""FedALA: Adaptive Local Aggregation for Personalized Federated Learning (Zhang et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from raysim.core.client import ClientMethod, LocalRun
from raysim.core.layers import LayerMap

MAX_EPOCHS = 100  # the rule for convergence may never be met (methods.md 6.1)


@dataclass
class ALAState:
    """A client's element-wise weights of the top layers, in [0, 1]."""

    weights: Tensor
    settled: bool = False  # the first, long optimisation is done


@dataclass(frozen=True)
class FedALA(ClientMethod):
    """Start from an element-wise mix of global and local model, learned on local data (FedALA, 2023, algorithm 1).

    In the top `layers` stages: Θ̂ = Θ_i + (Θ − Θ_i) ⊙ W, W ← clip(W − η ∂L/∂Θ̂ ⊙ (Θ − Θ_i), 0, 1) on `fraction` of the
    client's samples, the first time until the loss settles, one pass ever after. Below them the global model is taken.
    """

    eta: float = 1.0
    fraction: float = 0.8
    layers: int = 1
    threshold: float = 0.01  # standard deviation of the last ten epochs' losses at which W has settled
    keeps_params: ClassVar[bool] = True

    def new_state(self, layers: LayerMap) -> ALAState:
        return ALAState(torch.ones(layers.P)[layers.top(self.layers)])

    def start(self, run: LocalRun) -> None:
        run.receive()
        if run.previous is None:
            return
        top, state = run.layers.top(self.layers), run.state(self)
        old, gap = run.previous[top], run.received[top] - run.previous[top]
        first = run.layers.stages - self.layers  # gradients stop here
        buffers = run.buffers.clone()  # learning W leaves no trace in BatchNorm's statistics
        losses: list[float] = []
        while not losses or not (state.settled or has_settled(losses, self.threshold)):
            for x, y in run.batches(self.fraction, purpose="ala"):
                run.params[top] = old + gap * state.weights
                loss = run.gradient(x, y, corrected=False, stage=first)
                state.weights.sub_(self.eta * run.grad[top] * gap).clamp_(0, 1)
            losses.append(float(loss))
        state.settled = True
        run.params[top] = old + gap * state.weights
        run.buffers.copy_(buffers)


def has_settled(losses: list[float], threshold: float) -> bool:
    """Whether the last ten epochs' losses hardly differ, or there have been as many epochs as there may be."""
    steady = len(losses) > 10 and torch.tensor(losses[-10:]).std(correction=0).item() < threshold
    return steady or len(losses) >= MAX_EPOCHS
