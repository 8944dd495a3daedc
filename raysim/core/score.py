"""How well a model does on samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Score(NamedTuple):
    """A model on a client's test samples."""

    correct: int
    samples: int
    loss: float  # summed, nats
    auc: float  # area under the ROC curve, micro average over the classes; NaN without samples

    @classmethod
    def of(cls, logits: Tensor, y: Tensor) -> Score:
        """The score of logits [n, C] for labels [n]."""
        correct, loss = correct_and_loss(logits, y)
        return cls(correct, len(y), loss, micro_auc(logits.softmax(1), y))


def correct_and_loss(logits: Tensor, y: Tensor) -> tuple[int, float]:
    """Correct predictions and summed cross-entropy of logits [n, C] for labels [n]."""
    return int((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum"))


def micro_auc(scores: Tensor, y: Tensor) -> float:
    """Probability that a true (sample, class) pair has a higher score [n, C] than a false one; ties count half."""
    true = F.one_hot(y, scores.shape[1]).flatten().bool()
    _, place, count = torch.unique(scores.flatten(), return_inverse=True, return_counts=True)
    rank = count.cumsum(0).double() - (count.double() - 1) / 2  # mean rank, from 1, of each distinct score
    positives, negatives = int(true.sum()), int((~true).sum())
    if not positives or not negatives:
        return float("nan")
    wins = rank[place][true].sum() - positives * (positives + 1) / 2
    return float(wins) / (positives * negatives)
