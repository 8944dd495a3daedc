"""Where the server works on data: one model on one device, and the samples that the server owns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.samples import Samples, take
from raysim.core.task import Task
from raysim.lazy import F, Tensor, nn, no_grad, torch

SWEEP_BATCH = 128  # samples of one batch of `ServerModel.recalibrated`


@dataclass(frozen=True)
class Objective:
    """A mean loss over fixed samples."""

    x: Tensor  # [n, ...] model inputs
    loss: Callable[[Tensor, Tensor], Tensor]  # outputs [b, ...] of the samples at positions [b] -> their mean loss


@dataclass(frozen=True)
class ServerModel:
    """What a function run by `cohort.compute` works with. The model is the host's: what is loaded into it is a copy."""

    flat: FlatModel
    value: Tensor  # [S] the global model the round began with
    updates: Tensor | None  # [K, S] client minus server, where asked for
    samples: Callable[[np.ndarray], Samples]  # rows of the data set -> inputs and labels
    task: Task

    @property
    def layers(self) -> LayerMap:
        return self.flat.layers

    def load(self, value: Tensor) -> None:
        """Make `value` [S] the model that the methods below use, in train mode."""
        self.flat.value.copy_(value)
        self.flat.model.train()

    def objective(self, rows: np.ndarray) -> Objective:
        """The task's mean loss on `rows` [n] of the data set, with their own labels."""
        x, y = self.samples(rows)
        return Objective(x, lambda outputs, batch: self.task.loss(outputs, y[batch]))

    def distillation(self, rows: np.ndarray, taught: Tensor, temperature: float) -> Objective:
        """KL(taught ‖ softmax(logits / temperature)) on `rows` [n], for probabilities `taught` [n, C]."""

        def loss(logits: Tensor, batch: Tensor) -> Tensor:
            return F.kl_div((logits / temperature).log_softmax(1), taught[batch], reduction="batchmean")

        return Objective(self.samples(rows).x, loss)

    def gradient(self, objective: Objective, batch: Tensor) -> Tensor:
        """The gradient [P] of the loss at positions `batch` [b], in the model's own storage. Running statistics move on."""
        self.flat.backward(objective.loss(self.flat.model(take(objective.x, batch)), batch))
        return self.flat.grad

    @no_grad
    def mean_loss(self, objective: Objective, batch_size: int) -> Tensor:
        """The objective over all samples as training sees it: in train mode, but running statistics stay."""
        buffers, n = self.flat.buffers.clone(), len(objective.x)
        total = torch.zeros((), dtype=torch.float64, device=self.value.device)
        for batch in even_parts(torch.arange(n, device=self.value.device), batch_size):
            total += objective.loss(self.flat.model(take(objective.x, batch)), batch) * len(batch)
        self.flat.buffers.copy_(buffers)
        return total / n

    @no_grad
    def logits(self, rows: np.ndarray, batch_size: int = 512) -> Tensor:
        """Outputs [n, ...] of the loaded model on `rows` [n], in eval mode."""
        self.flat.model.eval()
        x = self.samples(rows).x
        logits = torch.cat([self.flat.model(part) for part in x.split(batch_size)])
        self.flat.model.train()
        return logits

    def quality(self, rows: np.ndarray) -> float:
        """How good the loaded model is on `rows` [n] of the data set, in eval mode: the task's headline, or without one
        the loss, with the sign that makes a better model greater."""
        score, metric = self.task.score(self.logits(rows), self.samples(rows).y), self.task.headline
        if metric is None:
            return -score.loss
        value = metric.of(score.sums[metric.name])
        return value if metric.higher_is_better else -value

    @no_grad
    def recalibrated(self, value: Tensor, rows: np.ndarray) -> Tensor:
        """`value` [S] with the running statistics of a sweep over `rows` in train mode, the mean over even batches."""
        self.load(value)
        norms = [
            m
            for m in self.flat.model.modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
        ]
        momenta = [m.momentum for m in norms]
        for module in norms:
            module.reset_running_stats()
            module.momentum = None  # cumulative average
        for part in np.array_split(rows, math.ceil(len(rows) / SWEEP_BATCH)):
            self.flat.model(self.samples(part).x)
        for module, momentum in zip(norms, momenta, strict=True):
            module.momentum = momentum
        return self.flat.value


def even_parts(positions: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Batches of nearly one size: a mean over them is one over the samples, and no batch is a lone sample."""
    return positions.tensor_split(math.ceil(len(positions) / batch_size))
