"""PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization (Sun et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt
from raysim.core.client import ClientMethod, LocalRun
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.lazy import Tensor, torch


@dataclass
class Choice:
    """A client's logits [L, 2] of taking the global layer, and of keeping its own."""

    logits: Tensor


@dataclass(frozen=True)
class PartialFed(ClientMethod):
    """Layer by layer the global or the local model, as the client learns (PartialFed, Sun et al., 2021, adaptive form).

    For each batch a choice is drawn, hard Gumbel-softmax(logits / tau) with tau falling by `tau_decay` a round, and the
    model is put together from the received model and the client's last one. `model_batches` and `choice_batches` take
    turns. The former train the weights, in each layer those of the chosen copy; the latter train the logits, straight
    through, with `choice_lr`. The model that is sent, tested and remembered takes each layer from the copy with the
    larger logit (the global one, where they are equal), and so does the personal model before training. A layer
    includes its buffers. No code was published: which copy a batch trains, and the start and step size of the logits,
    are our reading.

    Wrong choice with few batches a round: where there are no more than `model_batches`, the logits are never trained.
    """

    model_batches: PositiveInt = 8
    """Batches in a row that train the weights."""
    choice_batches: NonNegativeInt = 2
    """Batches in a row that train the logits."""
    tau: Positive = 5.0
    """Temperature of the Gumbel-softmax in round 0 (τ)."""
    tau_decay: Positive = 0.965
    """Factor on the temperature after every round."""
    choice_lr: NonNegative = 0.1
    """Step size of the logits."""
    logits: tuple[float, float] = (0.0, 0.0)
    """Logits at first, of the global and of the client's own layer."""
    needs: ClassVar[Needs] = Needs(previous="trained")

    def new_state(self, layers: LayerMap) -> Choice:
        return Choice(torch.tensor([self.logits] * layers.L, dtype=torch.float64))

    def train(self, run: LocalRun) -> None:
        local = run.value if run.previous is None else run.previous
        copies = run.scratch["partialfed"] = torch.stack([run.value, local])  # [2, S], both are trained
        run.fit()
        run.value.copy_(torch.where(taken(run.state(self).logits, run.layers), copies[0], copies[1]))

    def step(self, run: LocalRun, x: Tensor, y: Tensor) -> None:
        logits, copies = run.state(self).logits, run.scratch["partialfed"]
        tau = self.tau * self.tau_decay**run.t
        exponential = torch.empty(logits.shape).double().exponential_(generator=run.generator("partialfed"))
        soft = ((logits - exponential.log().to(logits.device)) / tau).softmax(1)  # [L, 2]
        chosen = taken(soft, run.layers)
        run.value.copy_(torch.where(chosen, copies[0], copies[1]))
        run.gradient(x, y)
        if run.steps % (self.model_batches + self.choice_batches) < self.model_batches:
            run.optimizer.step(run.trained)
        else:
            slope = torch.stack([run.layers.dots(run.grad, copy[: run.layers.P]) for copy in copies], 1)  # ∂L/∂a
            logits -= self.choice_lr / tau * soft * (slope - (soft * slope).sum(1, keepdim=True))
        copies[0] = torch.where(chosen, run.value, copies[0])
        copies[1] = torch.where(chosen, copies[1], run.value)

    def personal(self, run: LocalRun) -> None:
        if not run.steps:
            run.stack.start(run)
            if run.previous is not None:
                run.value.copy_(torch.where(taken(run.state(self).logits, run.layers), run.value, run.previous))


def taken(weights: Tensor, layers: LayerMap) -> Tensor:
    """[S] bool: where the global model is taken, by layers' weights [L, 2]."""
    return layers.per_element(layers.expand(weights[:, 0] >= weights[:, 1]))
