"""A task defines the loss that is trained on and the scores of a model's outputs.

A data set names its task, and everything else asks the task: cross-entropy and accuracy are known only here. To add a
loss, subclass `Task` or a task below and define `losses`; to add a metric, add a `Metric` to `metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Self

import numpy as np

from raysim.core import score
from raysim.core.hooks import check_samples, check_sums, unchanged
from raysim.core.outputs import mapped
from raysim.core.score import Metric, Score, Tally, scores_of
from raysim.lazy import F, Tensor, torch
from raysim.registry import REGISTRY, Table


@dataclass(frozen=True)
class Task:
    """What a model's outputs mean, and what they should be. Subclasses are frozen dataclasses.

    A model has as many outputs as its data set has `classes`: [B, C], or [B, T, C] for sequences with outputs at each
    position.
    """

    metrics: tuple[Metric, ...] = ()
    """How outputs are scored. The first one is the headline, which lines and summaries show."""

    name: ClassVar[str] = "own"
    loss_unit: ClassVar[str] = ""
    """What the loss is measured in, as figures show it; empty: they show none."""

    @property
    def headline(self) -> Metric | None:
        """The metric by which runs are judged; None where there is only a loss."""
        return self.metrics[0] if self.metrics else None

    def with_metrics(self, metrics: Sequence[Metric]) -> Self:
        """The same task with further metrics."""
        return replace(self, metrics=(*self.metrics, *metrics))

    def check(self, y: np.ndarray, outputs: int) -> str | None:
        """What is wrong with labels `y` [n, ...] for this task and so many outputs, or None."""
        return None

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss [B] of every sample of a batch."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean loss (0-d) of a batch: what training minimises."""
        return self.losses(outputs, y).mean()

    @property
    def takes_weights(self) -> bool:
        """Whether classes can be weighed and labels be smoothed in its training loss."""
        return False

    def trained_with(self, class_weights: tuple[float, ...], label_smoothing: float) -> Task:
        """The task with another training loss; itself where neither of them is given. Losses of samples and scores stay."""
        assert not (class_weights or label_smoothing), f"{self.name} has no classes to weigh"
        return self

    def constants(self, device: torch.device) -> tuple[Tensor, ...]:
        """Tensors that every loss on `device` uses."""
        return ()

    def share(self, part: Tensor, y: Tensor) -> float:
        """How much the mean loss of `part`, some of the labels `y`, counts in that of all of them."""
        return len(part) / len(y)

    def losses_of_batches(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean loss [n] of each of n batches of one size: outputs [n, B, ...], y [n, B, ...]."""
        if _each_by_itself(self) and type(self).loss in (Task.loss, Classification.loss):
            means: Tensor = self.samples_of_batches(outputs, y).mean(1)
            return means
        return _of_each(self.loss, outputs, y)

    def samples_of_batches(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The losses [n, B] of the samples of n batches of one size."""
        if _each_by_itself(self):  # a fifth of the launches that vmap makes of it
            return self.losses(mapped(lambda part: part.flatten(0, 1), outputs), y.flatten(0, 1)).view(y.shape[:2])
        return _of_each(self.losses, outputs, y)

    def total_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The summed loss (0-d) of a batch. Raises `HookError` where `losses` are not [B], or change what they are given."""
        by = f"{type(self).__name__}.losses"
        with unchanged(by, (outputs, y)):
            return check_samples(self.losses(outputs, y), len(y), by).sum()

    def probabilities(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What metrics of other libraries take: where there are classes or labels, their probabilities [n, C] and integers
        [n] or [n, C]; else outputs and `y` themselves."""
        return outputs, y

    def tally(self, outputs: Tensor, y: Tensor) -> Tally:
        """What makes the score of a batch. Raises `HookError` where a metric makes no sums, or changes what it is given."""
        loss, sums = self.total_loss(outputs, y), {}  # the loss first: no metric can have a part in it
        likely = self.probabilities(outputs, y) if any(metric.probabilities for metric in self.metrics) else None
        for metric in self.metrics:
            by, given = f"metric {metric.name}", likely if likely and metric.probabilities else (outputs, y)
            with unchanged(by, given):
                sums[metric.name] = check_sums(metric.sums(*given), by)
        return Tally(len(y), loss, sums)

    def score(self, outputs: Tensor, y: Tensor) -> Score:
        """The score of a batch."""
        [score] = scores_of([self.tally(outputs, y)])
        return score

    def auc(self, outputs: Tensor, y: Tensor) -> float:
        """Area under the ROC curve of all samples together; NaN where the task has none."""
        return math.nan

    def values(self, score: Score, seed_of: Callable[[str], int] = lambda metric: 0) -> dict[str, float]:
        """The value of every metric by its name, in which it may draw from the stream `seed_of` that name; none without
        samples."""
        return {m.name: m.of(score.sums[m.name], seed_of(m.name)) for m in self.metrics if score.samples}


@dataclass(frozen=True)
class Classification(Task):
    """One class a sample, y [n] int64: cross-entropy and accuracy."""

    metrics: tuple[Metric, ...] = (Metric("accuracy", score.correct),)
    name: ClassVar[str] = "classification"
    loss_unit: ClassVar[str] = "nats"

    def check(self, y: np.ndarray, outputs: int) -> str | None:
        fits = y.ndim == 1 and y.dtype == np.int64
        return None if fits else f"needs labels [n] int64, but they are {list(y.shape)} {y.dtype}"

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y, reduction="none")

    # PyTorch's own reductions have other bits than a mean or sum of `losses`; a subclass has `losses` of its own.

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        own = type(self).losses is not Classification.losses
        return super().loss(outputs, y) if own else F.cross_entropy(outputs, y)

    def total_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        own = type(self).losses is not Classification.losses
        return super().total_loss(outputs, y) if own else F.cross_entropy(outputs, y, reduction="sum")

    @property
    def takes_weights(self) -> bool:
        return type(self).losses is Classification.losses and type(self).loss is Classification.loss

    def trained_with(self, class_weights: tuple[float, ...], label_smoothing: float) -> Task:
        if not self.takes_weights or not (class_weights or label_smoothing):
            return super().trained_with(class_weights, label_smoothing)
        return WeightedClassification(self.metrics, class_weights, label_smoothing)

    def probabilities(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.softmax(1), y

    def auc(self, outputs: Tensor, y: Tensor) -> float:
        return score.micro_auc(outputs.softmax(1), F.one_hot(y, outputs.shape[1]).bool())


@dataclass(frozen=True)
class WeightedClassification(Classification):
    """One class a sample, as clients train it with `local.class_weights` and `local.label_smoothing`: PyTorch's
    cross-entropy, of which a batch has the mean that its weights make."""

    class_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        weights = _on(outputs.device, self.class_weights) if self.class_weights else None
        return F.cross_entropy(outputs, y, weights, label_smoothing=self.label_smoothing)

    def constants(self, device: torch.device) -> tuple[Tensor, ...]:
        return (_on(device, self.class_weights),) if self.class_weights else ()

    def share(self, part: Tensor, y: Tensor) -> float:
        if not self.class_weights:
            return super().share(part, y)
        weights = _on(y.device, self.class_weights)
        return float(weights[part].sum() / weights[y].sum())


@cache
def _on(device: torch.device, weights: tuple[float, ...]) -> Tensor:
    """Weights [C], taken to a device once and not in every step."""
    return torch.tensor(weights, device=device)


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any number of labels a sample, y [n, C] float32 of 0 and 1: binary cross-entropy, mean over labels; micro F1."""

    metrics: tuple[Metric, ...] = (Metric("f1", score.label_overlap), Metric("label_accuracy", score.correct_labels))
    name: ClassVar[str] = "multilabel"
    loss_unit: ClassVar[str] = "nats"

    def check(self, y: np.ndarray, outputs: int) -> str | None:
        if y.shape[1:] == (outputs,) and y.dtype == np.float32 and np.isin(y, (0, 1)).all():
            return None
        return f"needs labels [n, {outputs}] float32 of 0 and 1, but they are {list(y.shape)} {y.dtype}"

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(1)

    def probabilities(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.sigmoid(), y.long()

    def auc(self, outputs: Tensor, y: Tensor) -> float:
        return score.micro_auc(outputs, y > 0)


@dataclass(frozen=True)
class Regression(Task):
    """Numbers, y [n, F] float32: squared error, mean over targets; root mean squared error and R²."""

    metrics: tuple[Metric, ...] = (
        Metric("rmse", score.squared_error, score.root_mean, higher_is_better=False),
        Metric("r2", score.target_moments, score.explained_variance),
    )
    name: ClassVar[str] = "regression"
    loss_unit: ClassVar[str] = "squared error"

    def check(self, y: np.ndarray, outputs: int) -> str | None:
        fits = y.shape[1:] == (outputs,) and y.dtype == np.float32
        return None if fits else f"needs targets [n, {outputs}] float32, but they are {list(y.shape)} {y.dtype}"

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.shape != y.shape:  # which torch would broadcast
            raise ValueError(f"outputs {list(outputs.shape)} for targets {list(y.shape)}")
        return F.mse_loss(outputs, y, reduction="none").mean(1)


@dataclass(frozen=True)
class NextToken(Task):
    """The token after each position, y [n, T] int64: cross-entropy, mean over positions; token accuracy, perplexity."""

    metrics: tuple[Metric, ...] = (
        Metric("token_accuracy", score.correct),
        Metric("perplexity", score.position_losses, score.exp_mean, higher_is_better=False),
    )
    name: ClassVar[str] = "next_token"
    loss_unit: ClassVar[str] = "nats"

    def check(self, y: np.ndarray, outputs: int) -> str | None:
        fits = y.ndim == 2 and y.dtype == np.int64
        return None if fits else f"needs tokens [n, T] int64, but they are {list(y.shape)} {y.dtype}"

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs.mT, y, reduction="none").mean(1)

    def probabilities(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.flatten(0, -2).softmax(1), y.flatten()


def _each_by_itself(task: Task) -> bool:
    """Whether the loss of a sample is known not to depend on the others of its batch."""
    return type(task).losses in (Classification.losses, MultiLabel.losses, Regression.losses, NextToken.losses)


def _of_each(function: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, y: Tensor) -> Tensor:
    """[n, ...] what `function` makes of each of n batches."""
    if len(y) == 1:
        return function(mapped(lambda part: part[0], outputs), y[0])[None]
    made: Tensor = torch.func.vmap(function)(outputs, y)
    return made


TASKS: Table[Task] = REGISTRY.table("task").fill(
    {task.name: task for task in (Classification(), MultiLabel(), Regression(), NextToken())}
)


def task_of(named: str | Task) -> Task:
    """The task of that name, or the task itself. Raises KeyError for an unknown name."""
    return TASKS[named] if isinstance(named, str) else named
