"""Whether methods differ by more than their seeds do: paired t tests, and Holm's correction where there are several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

LEVEL = 0.05  # below it, a difference is more than chance


def paired(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p value of the paired t test (Student, 1908): how likely means of pairs [n] differ by as much or more
    when nothing but chance makes them differ. NaN for fewer than two pairs.

    Runs with the same seed share partition, initial model and cohorts, so they are pairs. With three to five seeds no
    test without an assumption about the distribution can reach `LEVEL`: Wilcoxon's needs six."""
    from scipy.special import stdtr  # `scipy.stats` takes a second to import

    difference = np.subtract(a, b)
    n = len(difference)
    if n < 2:
        return math.nan
    mean, std = float(difference.mean()), float(difference.std(ddof=1))
    if std <= 1e-12 * abs(mean):  # also where both are zero
        return 0.0 if mean else 1.0
    return float(2 * stdtr(n - 1, -abs(mean) / std * math.sqrt(n)))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values of a family of tests, corrected so that one false alarm among all is as rare as in one test (Holm,
    1979). NaN stays, and does not count."""
    corrected = [math.nan] * len(p_values)
    tests = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    largest = 0.0
    for rank, (p, i) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        corrected[i] = largest
    return corrected


def differ(best: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> list[float]:
    """For each of the others, the p value of its difference from the best, by Holm's correction. Scores are by seed; NaN
    where fewer than two seeds are in both."""

    def pairs(other: Mapping[int, float]) -> tuple[list[float], list[float]]:
        shared = [seed for seed in best if seed in other]
        return [best[seed] for seed in shared], [other[seed] for seed in shared]

    return holm([paired(*pairs(other)) for other in others])
