"""How well a model does on samples: metrics that add up over batches and clients, and the scores made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from raysim.core.hooks import check_samples
from raysim.late import F, Tensor, torch

Sums = tuple[float, ...]
Numbers = tuple[float | Tensor, ...]  # tensors are 0-d


def ratio(sums: Sequence[float]) -> float:
    """The first sum over the second; NaN where the second is 0."""
    return sums[0] / sums[1] if sums[1] else math.nan


@dataclass(frozen=True)
class Metric:
    """A score of a model's outputs. It is computed from sums, so that those of batches and clients add up."""

    name: str
    """Name in tables and lines, such as rmse."""
    sums: Callable[[Tensor, Tensor], Sequence[float | Tensor]]
    """(outputs, y) of a batch -> numbers (or tensors [], for which no GPU is waited) that add up over batches; always
    equally many."""
    value: Callable[[Sequence[float]], float] = ratio
    """The added sums -> the score."""
    higher_is_better: bool = True
    """Whether the model with the higher score is the better one."""

    @classmethod
    def mean(cls, name: str, per_sample: Callable[[Tensor, Tensor], Tensor], higher_is_better: bool = True) -> Metric:
        """The mean over all samples of `per_sample`(outputs, y) [n]; other forms raise `HookError`."""
        return cls(name, partial(_sum_and_count, name, per_sample), higher_is_better=higher_is_better)

    def best(self, scores: Sequence[float]) -> float:
        """The best of some scores; NaN where there is no number among them."""
        numbers = [score for score in scores if not math.isnan(score)] or scores
        return max(numbers) if self.higher_is_better else min(numbers)


def _sum_and_count(
    name: str, per_sample: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, y: Tensor
) -> Numbers:  # fmt: skip
    return check_samples(per_sample(outputs, y), len(y), f"metric {name}").double().sum(), len(y)


@dataclass(frozen=True)
class Score:
    """A model on some samples."""

    samples: int
    """Number of samples."""
    loss: float
    """Sum of the samples' losses; cross-entropies are in nats."""
    sums: Mapping[str, Sums] = field(default_factory=dict)
    """The sums of every metric, by its name."""
    auc: float = math.nan
    """Area under the ROC curve, micro average over classes or labels; NaN where it was not asked for or is undefined."""

    @property
    def correct(self) -> int | None:
        """Correct predictions; None where there is no accuracy."""
        return int(self.sums["accuracy"][0]) if "accuracy" in self.sums else None

    @property
    def mean_loss(self) -> float | None:
        """Mean loss of a sample; None without samples."""
        return self.loss / self.samples if self.samples else None

    @classmethod
    def total(cls, scores: Sequence[Score]) -> Score:
        """All samples of `scores` together, added in their order; without an AUC, which does not add up."""
        names = scores[0].sums if scores else ()
        sums = {name: tuple(map(sum, zip(*(s.sums[name] for s in scores), strict=True))) for name in names}
        return cls(sum(s.samples for s in scores), sum(s.loss for s in scores), sums)


@dataclass(frozen=True)
class Tally:
    """A `Score` to be, of one batch: a device may still compute its numbers."""

    samples: int
    loss: Tensor
    sums: Mapping[str, Numbers]

    @property
    def tensors(self) -> list[Tensor]:
        """The numbers that are tensors, in order."""
        return [self.loss, *(n for numbers in self.sums.values() for n in numbers if isinstance(n, torch.Tensor))]


def scores_of(tallies: Sequence[Tally]) -> list[Score]:
    """The scores of all `tallies`; a device is waited for once for each type of number, not for each of them."""
    tensors = [tensor for tally in tallies for tensor in tally.tensors]
    read: dict[torch.dtype, Iterator[float]] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        read[dtype] = iter(torch.stack([tensor for tensor in tensors if tensor.dtype == dtype]).tolist())

    def number(of: float | Tensor) -> float:
        return next(read[of.dtype]) if isinstance(of, torch.Tensor) else of

    return [
        Score(t.samples, number(t.loss), {name: tuple(map(number, numbers)) for name, numbers in t.sums.items()})
        for t in tallies
    ]


# Sums of the built-in metrics, each of outputs and y.


def correct(outputs: Tensor, y: Tensor) -> Numbers:
    """Correct predictions of classes [..., C], and all predictions."""
    return (outputs.argmax(-1) == y).sum(), y.numel()


def label_overlap(outputs: Tensor, y: Tensor) -> Numbers:
    """For the micro F1 of labels [n, C]: twice the labels found; labels given plus labels true."""
    given, true = outputs > 0, y > 0
    return 2 * (given & true).sum(), given.sum() + true.sum()


def correct_labels(outputs: Tensor, y: Tensor) -> Numbers:
    """Labels [n, C] that are rightly given or left out, and all labels."""
    return ((outputs > 0) == (y > 0)).sum(), y.numel()


def squared_error(outputs: Tensor, y: Tensor) -> Numbers:
    """Summed squared error, and how many numbers were predicted."""
    return (outputs - y).double().square().sum(), y.numel()


def root_mean(sums: Sequence[float]) -> float:
    """The square root of a ratio."""
    return math.sqrt(ratio(sums))


def target_moments(outputs: Tensor, y: Tensor) -> Numbers:
    """For every target [n, F] its summed squared error, Σ y and Σ y²; then the number of samples."""
    y = y.double()
    parts = torch.stack([(outputs - y).square().sum(0), y.sum(0), y.square().sum(0)], dim=1)
    return *parts.flatten(), len(y)


def explained_variance(sums: Sequence[float]) -> float:
    """R², the mean over the targets that vary; NaN where none does."""
    *moments, n = sums
    shares = []
    for error, total, squares in zip(moments[::3], moments[1::3], moments[2::3], strict=True):
        if n and (spread := squares - total * total / n) > 0:
            shares.append(1 - error / spread)
    return sum(shares) / len(shares) if shares else math.nan


def position_losses(outputs: Tensor, y: Tensor) -> Numbers:
    """Cross-entropy summed over all positions (nats), and the number of positions."""
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="sum"), y.numel()


def exp_mean(sums: Sequence[float]) -> float:
    """The exponential of a ratio; infinite where it overflows."""
    mean = ratio(sums)
    return math.inf if mean > 700 else math.exp(mean)


def micro_auc(scores: Tensor, true: Tensor) -> float:
    """Probability that a true (sample, class) pair has a higher score than a false one; ties count half.

    Scores and bool truths are [n, C]. NaN where all pairs are true, or all are false.
    """
    true = true.flatten()
    _, place, count = torch.unique(scores.flatten(), return_inverse=True, return_counts=True)
    rank = count.cumsum(0).double() - (count.double() - 1) / 2  # mean rank, from 1, of each distinct score
    positives, negatives = int(true.sum()), int((~true).sum())
    if not positives or not negatives:
        return math.nan
    wins = rank[place][true].sum() - positives * (positives + 1) / 2
    return float(wins) / (positives * negatives)
