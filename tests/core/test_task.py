"""Losses and metrics of the tasks, against scikit-learn and against what their definitions give by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.core.score import Metric, Score
from raysim.core.task import TASKS, Classification, MultiLabel, NextToken, Regression, Task, task_of

STREAM = torch.Generator().manual_seed(0)
LOGITS = torch.randn(50, 4, generator=STREAM)
CLASSES = torch.randint(4, (50,), generator=STREAM)
LABELS = (torch.rand(50, 4, generator=STREAM) < 0.4).float()
TARGETS = LOGITS * 0.7 + torch.randn(50, 4, generator=STREAM)
SEQUENCES = torch.randn(6, 5, 4, generator=STREAM)
TOKENS = torch.randint(4, (6, 5), generator=STREAM)
BATCHES = {
    "classification": (LOGITS, CLASSES),
    "multilabel": (LOGITS, LABELS),
    "regression": (LOGITS, TARGETS),
    "next_token": (SEQUENCES, TOKENS),
}


@pytest.fixture(scope="module")
def metrics() -> ModuleType:
    """Of scikit-learn, which takes seconds to import."""
    from sklearn import metrics

    return metrics


def test_every_task_is_tested():
    assert set(BATCHES) == set(TASKS)
    assert all(task.name == name for name, task in TASKS.items())
    own = Regression()
    assert task_of("regression") == own
    assert task_of(own) is own


def test_losses_mean_and_sum_agree_and_scores_add_up(subtests):
    """However samples are batched. Only sums of floats may differ, in their last bits."""
    for name, (outputs, y) in BATCHES.items():
        with subtests.test(name):
            check_sums(TASKS[name], outputs, y)


def check_sums(task: Task, outputs: Tensor, y: Tensor) -> None:
    losses = task.losses(outputs, y)
    assert losses.shape == (len(y),)
    torch.testing.assert_close(task.loss(outputs, y), losses.mean())
    torch.testing.assert_close(task.total_loss(outputs, y), losses.sum())
    whole = task.score(outputs, y)
    parts = Score.total([task.score(outputs[part], y[part]) for part in (slice(0, 2), slice(2, 3), slice(3, None))])
    assert parts.samples == whole.samples == len(y)
    assert parts.loss == pytest.approx(whole.loss)
    assert task.values(parts) == pytest.approx(task.values(whole))
    assert set(task.values(whole)) == {metric.name for metric in task.metrics}
    assert task.values(Score(0, 0.0)) == {}


def test_classification_is_cross_entropy_to_the_bit(metrics):
    task = Classification()
    assert torch.equal(task.loss(LOGITS, CLASSES), F.cross_entropy(LOGITS, CLASSES))
    score = task.score(LOGITS, CLASSES)
    assert score.loss == F.cross_entropy(LOGITS, CLASSES, reduction="sum").item()
    assert task.values(score)["accuracy"] == metrics.accuracy_score(CLASSES, LOGITS.argmax(1))


def test_several_labels(metrics):
    """A label is given where its logit is positive."""
    task, given = MultiLabel(), LOGITS > 0
    values = task.values(task.score(LOGITS, LABELS))
    assert values["f1"] == pytest.approx(metrics.f1_score(LABELS, given, average="micro"))
    assert values["label_accuracy"] == pytest.approx(metrics.accuracy_score(LABELS.flatten(), given.flatten()))
    assert task.auc(LOGITS, LABELS) == pytest.approx(metrics.roc_auc_score(LABELS, LOGITS, average="micro"))
    p = LOGITS.sigmoid()
    expected = -(LABELS * p.log() + (1 - LABELS) * (1 - p).log()).mean()
    torch.testing.assert_close(task.loss(LOGITS, LABELS), expected)


def test_numbers(metrics):
    task = Regression()
    values = task.values(task.score(LOGITS, TARGETS))
    error = metrics.root_mean_squared_error(TARGETS.flatten(), LOGITS.flatten())
    assert values == pytest.approx({"rmse": error, "r2": metrics.r2_score(TARGETS, LOGITS)}, rel=1e-6)
    torch.testing.assert_close(task.loss(LOGITS, TARGETS), (LOGITS - TARGETS).square().mean())
    assert math.isnan(task.values(task.score(LOGITS, torch.ones(50, 4)))["r2"])  # nothing varies


def test_next_tokens(metrics):
    """Four equally likely tokens have perplexity 4; a certain and right prediction has 1."""
    task = NextToken()
    values = task.values(task.score(SEQUENCES, TOKENS))
    assert values["token_accuracy"] == pytest.approx(
        metrics.accuracy_score(TOKENS.flatten(), SEQUENCES.argmax(2).flatten())
    )
    assert values["perplexity"] == pytest.approx(math.exp(task.loss(SEQUENCES, TOKENS)), rel=1e-6)
    assert task.values(task.score(torch.zeros(6, 5, 4), TOKENS))["perplexity"] == pytest.approx(4)
    assert task.values(task.score(1e3 * F.one_hot(TOKENS, 4).float(), TOKENS))["perplexity"] == pytest.approx(1)
    assert task.values(task.score(-1e3 * F.one_hot(TOKENS, 4).float(), TOKENS))["perplexity"] == math.inf


def test_labels_are_checked(subtests):
    for name, good, bad in (
        ("classification", np.zeros(3, np.int64), np.zeros((3, 1), np.int64)),
        ("classification", np.zeros(3, np.int64), np.zeros(3, np.float32)),
        ("multilabel", np.ones((3, 4), np.float32), np.full((3, 4), 0.5, np.float32)),
        ("multilabel", np.ones((3, 4), np.float32), np.ones((3, 3), np.float32)),
        ("regression", np.ones((3, 4), np.float32), np.ones(3, np.float32)),
        ("next_token", np.zeros((3, 5), np.int64), np.zeros(3, np.int64)),
    ):
        with subtests.test(name, bad=bad):
            assert TASKS[name].check(good, 4) is None
            assert "needs" in TASKS[name].check(bad, 4)


def margin(outputs: Tensor, y: Tensor) -> Tensor:
    best = outputs.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


@dataclass(frozen=True)
class Squared(Classification):
    """Another loss for classes, of which only the losses of samples are written."""

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.softmax(1) - F.one_hot(y, outputs.shape[1])).square().sum(1)


def test_own_losses_and_metrics():
    task = Squared().with_metrics([Metric.mean("margin", margin)])
    assert torch.equal(task.loss(LOGITS, CLASSES), task.losses(LOGITS, CLASSES).mean())
    score = task.score(LOGITS, CLASSES)
    assert score.loss == pytest.approx(task.losses(LOGITS, CLASSES).sum().item())
    assert task.values(score)["margin"] == pytest.approx(margin(LOGITS, CLASSES).mean().item())
    assert task.headline.name == "accuracy"
    assert Task().headline is None
    assert Metric("error", max, higher_is_better=False).best([3.0, 1.0, 2.0]) == 1.0
