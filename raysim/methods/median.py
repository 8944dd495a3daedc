"""The coordinate-wise median (Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.core.robust import Coordinatewise, ordered
from raysim.lazy import Tensor


@dataclass(frozen=True)
class Median(Coordinatewise):
    """Of each coordinate the median of the clients' updates (Yin et al., 2018, option I); of an even number the mean of the two
    in the middle.

    Wrong choice where clients hold different classes: what only a few of them learn is not in the middle.
    """

    def column(self, updates: Tensor) -> Tensor:
        values, k = ordered(updates), len(updates)
        return (values[:, (k - 1) // 2] + values[:, k // 2]) / 2
