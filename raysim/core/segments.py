"""Sums over the elements of each layer, in one order whichever part of the flat vector is at hand.

A segment is a maximal run of one layer. Inner products are summed segment by segment, in float64. Squares are summed over
*runs*: the elements of a segment, at most `RUN` at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from raysim.core.layout import TensorSpec
from raysim.lazy import Tensor, torch

RUN = 1 << 13  # elements whose squares one BLAS call adds: it may share more among threads, which changes the order
SQUARES = 1e-30, 1e38  # between these a sum of float32 squares has neither vanished nor overflowed

Segment = tuple[int, int, int]  # start, stop, layer


def segments_of(tensors: tuple[TensorSpec, ...], groups: tuple[int, ...], P: int) -> tuple[Segment, ...]:
    """Maximal runs of one layer. None reaches from the parameters [P] into the buffers."""
    segments: list[Segment] = []
    for spec, layer in zip(tensors, groups, strict=True):
        if segments and segments[-1][2] == layer and spec.start not in (0, P):
            segments[-1] = (segments[-1][0], spec.stop, layer)
        else:
            segments.append((spec.start, spec.stop, layer))
    return tuple(segments)


@lru_cache(maxsize=64)
def indices(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor of `numbers` on the device, brought there once."""
    return torch.tensor(numbers, device=device)


@dataclass(frozen=True)
class Segments:
    """The segments of a flat vector of P parameters and more, in `L` layers."""

    bounds: tuple[Segment, ...]
    P: int
    L: int

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Inner products per layer, float64: [..., P] (or whole values [..., S]) -> [..., L]."""
        shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])  # torch.broadcast_shapes imports sympy: seconds
        out = torch.zeros(*shape, self.L, dtype=torch.float64, device=a.device)
        for start, stop, layer in self.bounds:
            if start < a.shape[-1]:
                out[..., layer] += (a[..., start:stop].double() * b[..., start:stop].double()).sum(-1)
        return out

    @cached_property
    def _runs(self) -> tuple[Segment, ...]:
        return tuple(
            (a, min(a + RUN, stop), layer) for start, stop, layer in self.bounds for a in range(start, stop, RUN)
        )

    def blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of adjacent runs: up to `size` elements together, or one run."""
        first, ends = 0, [stop for _, stop, _ in self._runs]
        for stop, following in itertools.pairwise((*ends, self.bounds[-1][1] + size + 1)):
            if stop == self.P or following - first > size:
                yield first, stop
                first = stop

    def squares(self, part: Tensor, start: int = 0) -> Tensor:
        """Sums of squares [..., runs], float64, of a `part` [..., n] of the flat vector whose ends are ends of runs.

        In a run squares of float32 are summed by BLAS in float32, to about 1e-7; where that overflows or vanishes, in
        float64.
        """
        shapes = self._shapes(start, start + part.shape[-1])
        if part.is_cuda:
            if part.dim() > 1:  # row by row: how a GPU adds depends on how many rows there are, and so on the packing
                return torch.stack([self.squares(row, start) for row in part])
            return torch.cat([part[a:b].unflatten(-1, n).double().square().sum(-1) for a, b, n in shapes], -1)
        array, sums = part.detach().numpy(), []
        with np.errstate(over="ignore", under="ignore"):
            for a, b, n in shapes:
                runs = array[..., a:b].reshape(*part.shape[:-1], *n)
                sums.append(np.matmul(runs[..., None, :], runs[..., :, None])[..., 0, 0])
        total = np.concatenate(sums, -1, dtype=np.float64)
        sure = (total > SQUARES[0]) & (total < SQUARES[1])
        if part.dtype != torch.float64 and not sure.all():
            total = np.where(sure, total, self.squares(part.double(), start).numpy())
        return torch.from_numpy(total)

    def _shapes(self, start: int, stop: int) -> list[tuple[int, int, tuple[int, int]]]:
        """(start, stop, (runs, elements of each)) of equal runs, counted from `start`."""
        if (start, stop) not in self._cached_shapes:
            shapes = self._cached_shapes[start, stop] = []
            for a, b, _ in (
                (max(a, start), min(b, stop), layer) for a, b, layer in self.bounds if a < stop and b > start
            ):
                whole = a + (b - a) // RUN * RUN
                shapes += [(a - start, whole - start, ((whole - a) // RUN, RUN))] if whole > a else []
                shapes += [(whole - start, b - start, (1, b - whole))] if b > whole else []
        return self._cached_shapes[start, stop]

    @cached_property
    def _cached_shapes(self) -> dict[tuple[int, int], list[tuple[int, int, tuple[int, int]]]]:
        return {}

    @cached_property
    def _layer_of_run(self) -> tuple[int, ...]:
        return tuple(layer for _, _, layer in self._runs)

    def per_layer(self, per_run: Tensor) -> Tensor:
        """Sums over the runs of each layer; those of statistics may be left out: [..., runs] -> [..., L]."""
        layer = indices(self._layer_of_run, per_run.device)[: per_run.shape[-1]]
        return per_run.new_zeros(*per_run.shape[:-1], self.L).index_add_(-1, layer, per_run)
