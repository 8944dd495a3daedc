"""Top-k sparsification (Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from raysim.core.bounds import Share
from raysim.core.message import Compressor, Part, Sender
from raysim.lazy import Tensor


@dataclass(frozen=True)
class TopK(Compressor):
    """Of each tensor the k = max(1, ⌈ρn⌉) elements of the greatest magnitude (Aji and Heafield, 2017).

    Positions are sent as a list or a bitmap, whichever is shorter. Wrong choice without `error_feedback` where k is small:
    what is never among the largest never arrives.
    """

    fraction: Share = 0.1
    """The share ρ of the elements."""

    def encode(self, part: Part, sender: Sender) -> None:
        part.keep(largest(part.values.abs(), count(self.fraction, len(part.values))))


def count(fraction: float, n: int) -> int:
    """⌈ρn⌉ of n elements, one at least; 0.07 · 100 is 7."""
    return max(1, ceil(fraction * n - 1e-9))


def largest(sizes: Tensor, k: int) -> Tensor:
    """Where the k largest of `sizes` [n] are, ascending; of equal ones the first."""
    threshold = sizes.topk(k, sorted=False).values.min()
    taken = sizes > threshold
    ties = (sizes == threshold).nonzero().flatten()
    return taken.index_fill_(0, ties[: k - int(taken.sum())], True).nonzero().flatten()
