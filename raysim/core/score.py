"""How well a model does on samples: metrics that add up over batches and clients, and the scores made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raysim.core.hooks import HookError, check_samples, form
from raysim.core.outputs import Outputs, each, leaves, mapped
from raysim.core.rng import seeded_for
from raysim.lazy import F, Tensor, torch

Sums = Any  # a number or a tensor, or a tuple or mapping of them


def ratio(sums: Sequence[float]) -> float:
    """The first sum over the second; NaN where the second is 0."""
    return sums[0] / sums[1] if sums[1] else math.nan


@dataclass(frozen=True)
class Metric:
    """A score of a model's outputs. It is computed from sums, so that those of batches and clients add up."""

    name: str
    """Name in tables and lines, such as rmse."""
    sums: Callable[[Outputs, Tensor], Sums]
    """(outputs, y) of a batch -> what adds up over batches: a number or a tensor, or a tuple or mapping of them. Shapes are
    the same for every batch, such as [C, C] for a confusion matrix. For tensors no GPU is waited, for numbers it is. It may
    not change what it is given, which others read after it."""
    value: Callable[[Sums], float | Tensor] = ratio
    """The added sums, in the form that `sums` returns -> the score. Tensors are float64 and on the CPU; those without
    dimensions are numbers. Where it divides by zero the score is NaN."""
    higher_is_better: bool = True
    """Whether the model with the higher score is the better one."""
    probabilities: bool = False
    """Whether `sums` takes probabilities and integers, as `Task.probabilities` makes them of outputs and labels."""

    @classmethod
    def mean(cls, name: str, per_sample: Callable[[Tensor, Tensor], Tensor], higher_is_better: bool = True) -> Metric:
        """The mean over all samples of `per_sample`(outputs, y) [n]; other forms raise `HookError`."""
        return cls(name, partial(_sum_and_count, name, per_sample), higher_is_better=higher_is_better)

    @property
    def function(self) -> Callable[..., Any]:
        """The function of a sample or of sums that it was made of."""
        return self.sums.args[-1] if isinstance(self.sums, partial) and self.sums.func is _sum_and_count else self.sums

    def of(self, sums: Sums, seed: int = 0) -> float:
        """The score that `value` makes of added `sums`; what it draws comes from the stream `seed`. It is NaN where there is
        none, as of samples that lack a class. Raises `HookError` where it is not one number."""
        try:
            with seeded_for(self.value, seed):
                value = self.value(sums)
        except ArithmeticError:  # numbers of Python divide by zero less willingly than tensors
            return math.nan
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise HookError(
                f"the value of the metric {self.name!r} is {form(value)}, and a score is one number. Let its `value` (of a "
                "torchmetrics class: the `compute` of a subclass) make one of it, such as a mean"
            ) from None

    def best(self, scores: Sequence[float]) -> float:
        """The best of some scores; NaN where there is no number among them."""
        numbers = [score for score in scores if not math.isnan(score)] or scores
        return max(numbers) if self.higher_is_better else min(numbers)


def _sum_and_count(
    name: str, per_sample: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, y: Tensor
) -> Sums:  # fmt: skip
    return check_samples(per_sample(outputs, y), len(y), f"metric {name}").double().sum(), len(y)


@dataclass(frozen=True)
class Score:
    """A model on some samples."""

    samples: int
    """Number of samples."""
    loss: float
    """Sum of the samples' losses; cross-entropies are in nats."""
    sums: Mapping[str, Sums] = field(default_factory=dict)
    """The sums of every metric, by its name: numbers, and tensors that are float64 and on the CPU."""
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
        sums = {name: each(partial(_added, name), *(score.sums[name] for score in scores)) for name in names}
        return cls(sum(s.samples for s in scores), sum(s.loss for s in scores), sums)


def _added(name: str, *parts: Any) -> Any:
    if isinstance(parts[0], torch.Tensor) and len(shapes := {tuple(part.shape) for part in parts}) > 1:
        one, other = sorted(map(list, shapes))[:2]
        raise HookError(
            f"the metric {name!r} has sums {one} of one batch and {other} of another, which do not add up. Give them one "
            "shape, as torch.bincount(y, minlength=C) does"
        )
    return sum(parts)


@dataclass(frozen=True)
class Tally:
    """A `Score` to be, of one batch: a device may still compute its tensors."""

    samples: int
    loss: Tensor
    sums: Mapping[str, Sums]


def scores_of(tallies: Sequence[Tally]) -> list[Score]:
    """The scores of all `tallies`; a device is waited for once for each type of number, not for each of them."""
    parts = [(tally.loss, tally.sums) for tally in tallies]
    read = iter(_read(leaves(parts)))
    known = mapped(lambda tensor: next(read), parts)
    return [Score(tally.samples, loss, sums) for tally, (loss, sums) in zip(tallies, known, strict=True)]


def _read(tensors: Sequence[Tensor]) -> list[float | Tensor]:
    """Numbers of tensors without dimensions, and others in float64 on the CPU."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device, not tensor.ndim), []).append(i)
    read: dict[int, float | Tensor] = {}
    for (*_, number), places in kinds.items():
        its = [tensors[i] for i in places]
        if number:
            found = torch.stack(its).tolist()
        else:
            flat = torch.cat([tensor.flatten() for tensor in its]).cpu().split([tensor.numel() for tensor in its])
            # A copy each: a view would be pickled with all that it is a view of.
            found = [part.to(torch.float64, copy=True).view(t.shape) for part, t in zip(flat, its, strict=True)]
        read |= zip(places, found, strict=True)
    return [read[i] for i in range(len(tensors))]


# Sums of the built-in metrics, each of outputs and y.


def correct(outputs: Tensor, y: Tensor) -> Sums:
    """Correct predictions of classes [..., C], and all predictions."""
    return (outputs.argmax(-1) == y).sum(), y.numel()


def label_overlap(outputs: Tensor, y: Tensor) -> Sums:
    """For the micro F1 of labels [n, C]: twice the labels found; labels given plus labels true."""
    given, true = outputs > 0, y > 0
    return 2 * (given & true).sum(), given.sum() + true.sum()


def correct_labels(outputs: Tensor, y: Tensor) -> Sums:
    """Labels [n, C] that are rightly given or left out, and all labels."""
    return ((outputs > 0) == (y > 0)).sum(), y.numel()


def squared_error(outputs: Tensor, y: Tensor) -> Sums:
    """Summed squared error, and how many numbers were predicted."""
    return (outputs - y).double().square().sum(), y.numel()


def root_mean(sums: Sequence[float]) -> float:
    """The square root of a ratio."""
    return math.sqrt(ratio(sums))


def target_moments(outputs: Tensor, y: Tensor) -> Sums:
    """For every target [n, F] its summed squared error, Σ y and Σ y² [F, 3]; then the number of samples."""
    y = y.double()
    return torch.stack([(outputs - y).square().sum(0), y.sum(0), y.square().sum(0)], dim=1), len(y)


def explained_variance(sums: tuple[Tensor, float]) -> float:
    """R², the mean over the targets that vary; NaN where none does."""
    moments, n = sums
    shares = []
    for error, total, squares in moments.tolist():
        if n and (spread := squares - total * total / n) > 0:
            shares.append(1 - error / spread)
    return sum(shares) / len(shares) if shares else math.nan


def position_losses(outputs: Tensor, y: Tensor) -> Sums:
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
