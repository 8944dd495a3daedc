"""A client's samples on its device, and how training takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raysim.lazy import Tensor, torch


class Samples(NamedTuple):
    """Model inputs [n, ...] and labels [n] on the client's device."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class ClientData:
    """A client's samples, brought to the device when first asked for."""

    load: Callable[[str], Samples]  # "train" | "test" | "val" -> samples
    augment: Callable[[Tensor, int], Tensor] | None = None  # training inputs [n, ...] of a pass, and a seed -> others

    @cached_property
    def train(self) -> Samples:
        return self.load("train")

    @cached_property
    def test(self) -> Samples:
        return self.load("test")

    @cached_property
    def val(self) -> Samples:
        return self.load("val")


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], in the memory format of `x`: indexing would be several times slower where that is channels-last."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return x.index_select(0, rows)


def batch_slices(n: int, batch_size: int, drop_last: bool) -> list[slice]:
    """Consecutive batches of n samples. A client smaller than one batch keeps its short one, or it would never train."""
    stop = n - n % batch_size if drop_last and n >= batch_size else n
    return [slice(start, min(start + batch_size, n)) for start in range(0, stop, batch_size)]


class Passes(NamedTuple):
    """How local training takes a client's samples: known before it does."""

    epochs: int
    batch_size: int
    drop_last: bool
    step: int
    """Samples of a step; those of several batches where a method takes these as one."""

    def epoch(self, samples: np.ndarray) -> np.ndarray:
        """[K] of so many samples those of the steps of an epoch."""
        return _batched(samples, self.step, self.drop_last)

    def once(self, samples: np.ndarray, drop_last: bool | None = None) -> np.ndarray:
        """[K] of so many samples those of a pass in batches, without a shorter last one if `drop_last` (None: as training does)."""
        return _batched(samples, self.batch_size, self.drop_last if drop_last is None else drop_last)


def _batched(n: np.ndarray, size: int, drop_last: bool) -> np.ndarray:
    """Samples in the `batch_slices` of n."""
    return np.where(n >= size, n - n % size, n) if drop_last else n
