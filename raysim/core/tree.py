"""The one order in which a cohort's models are added, on any host.

Float addition is not associative, so the additions follow one binary tree over positions 0..K-1 of the sorted cohort,
whatever the number of hosts, their packing or the fan-in. A node is the half-open range (lo, hi) of positions it sums;
it splits in the middle. A host sums the largest nodes whose leaves it holds all, and forwards those.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from raysim.lazy import Tensor, torch

Node = tuple[int, int]
Piece = tuple[int, int, np.ndarray]  # start, stop, float64 weights of the clients
BLOCK, GPU_BLOCK = 1 << 15, 1 << 20  # floats summed at once: on a CPU a few rows of them stay in a core's cache


class Partial(NamedTuple):
    """Sums over the clients of one node: of the pieces that one of them sent, one after the other."""

    value: Tensor
    sent: tuple[bool, ...]  # for each piece of the request


Partials = dict[Node, Partial]  # of one host


def children(node: Node) -> tuple[Node, Node]:
    lo, hi = node
    return (lo, (lo + hi) // 2), ((lo + hi) // 2, hi)


def cover(held: set[int], clients: int) -> list[Node]:
    """The largest nodes of the tree over `clients` positions whose leaves are all `held`."""

    def visit(node: Node) -> list[Node]:
        inside = sum(position in held for position in range(*node))
        if inside == node[1] - node[0]:
            return [node]
        return [n for child in children(node) for n in visit(child)] if inside else []

    return visit((0, clients)) if clients else []


class WeightedSum:
    """Σ weights[p] · row_p over the positions of one node in tree order, block by block of the flat vector.

    Every leaf is scaled (and rounded) before it is added, so that a sum does not depend on where its leaves are. On a CPU
    it is NumPy that multiplies and adds: of blocks it makes twice the speed of PyTorch, and the same bits.
    """

    def __init__(
        self, pieces: Iterable[Piece], node: Node, like: Tensor, factors: Sequence[float] = (), space: Any = None
    ):  # fmt: skip
        """`pieces` are adjacent; sums may be multiplied by one of the `factors` each. Rows and sums have the dtype of `like`
        and are on its device. `space` [clients, block] is scratch that others may use between calls."""
        self.ops = operations(like)
        self.block = GPU_BLOCK if like.is_cuda else BLOCK
        self.clients = node[1] - node[0]
        self.everyone = tuple(range(self.clients))
        self.starts, stops, columns = zip(*pieces, strict=True)
        weights = np.stack(columns)[:, slice(*node)]  # [pieces, clients]
        scales = as_array(torch.from_numpy(weights).to(like)[..., None])
        sends = weights != 0
        unscaled = (~sends | (weights == 1)).all(1).tolist()
        sent = [
            self.everyone if by_all else tuple(compress(self.everyone, by))
            for by_all, by in zip(sends.all(1).tolist(), sends.tolist(), strict=True)
        ]
        self.sent = [bool(by) for by in sent]  # each piece: by anybody
        self.pieces = [*zip(self.starts, stops, scales, sent, unscaled, factors or [1.0] * len(sent), strict=True)]
        depth = (self.clients - 1).bit_length()
        self.space = as_array(like.new_empty(self.clients, self.block)) if space is None else space
        self._sums = as_array(like.new_empty(depth, self.space.shape[1]))

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of parts for `add`, without those where all weights are zero."""
        for sent, run in groupby(self.pieces, key=lambda piece: bool(piece[3])):
            edges = [edge for start, stop, *_ in run for edge in (start, stop)]
            if sent:
                yield from ((a, min(a + self.block, edges[-1])) for a in range(edges[0], edges[-1], self.block))

    @np.errstate(over="ignore", invalid="ignore")  # a round looks at its new model
    def add(self, rows: Any, start: int, out: Any) -> None:
        """out [n] = the sum over `rows` [clients, n], n ≤ block, which begin at `start` of the flat vector. Where all
        weights are zero `out` stays as it is."""
        stop = start + len(out)
        here = self.pieces[bisect_right(self.starts, start) - 1 : bisect_left(self.starts, stop)]
        for sent, group in groupby(here, key=itemgetter(3)):
            # Pieces are scaled one by one, and then added together.
            same = [(max(a - start, 0), min(b, stop) - start, *rest) for a, b, *rest in group]
            unscaled = all(part[4] for part in same)
            for a, b, scale, *_ in () if unscaled else same:
                if sent == self.everyone:
                    self.ops.multiply(rows[:, a:b], scale, out=self.space[:, a:b])
                else:
                    for p in sent:
                        self.ops.multiply(rows[p, a:b], scale[p], out=self.space[p, a:b])
            if sent:
                leaves, whole = rows if unscaled else self.space, slice(same[0][0], same[-1][1])
                self._total(sent, leaves[:, whole], out[whole])
                for a, b, *_, factor in same:
                    if factor != 1:
                        self.ops.multiply(out[a:b], factor, out=out[a:b])

    def _total(self, sent: tuple[int, ...], leaves: Any, out: Any) -> None:
        """out [n] = the sum of the rows of `leaves` [clients, n] at the positions `sent`."""
        steps = additions(self.clients, sent)
        if not steps:
            out[:] = leaves[sent[0]]
        slots = [out, *self._sums[:, : len(out)], *leaves]
        for left, right, into in steps:
            self.ops.add(slots[left], slots[right], out=slots[into])


@lru_cache(maxsize=256)  # of 1000 clients 70 kB each; to work one out again takes less time than to add a block of rows
def additions(clients: int, sent: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The sum over some positions as steps (left, right, into) between slots: the total, one scratch a level of the tree,
    and the leaves."""
    depth, steps = (clients - 1).bit_length(), []

    def visit(lo: int, hi: int, some: tuple[int, ...], into: int, level: int) -> int:
        if len(some) == 1:
            return 1 + depth + some[0]
        middle = (lo + hi) // 2
        cut = bisect_left(some, middle)
        if cut == 0:
            return visit(middle, hi, some, into, level + 1)
        if cut == len(some):
            return visit(lo, middle, some, into, level + 1)
        left = visit(lo, middle, some[:cut], into, level + 1)
        right = visit(middle, hi, some[cut:], 1 + level, level + 1)
        steps.append((left, right, into))
        return into

    visit(0, clients, sent, 0, 0)
    return steps


def without_factors(pieces: Iterable[Piece]) -> tuple[list[Piece], tuple[float, ...]]:
    """Weights that are equal, or zero, become ones: then it is the sum that is scaled, by the factors returned."""
    pieces = list(pieces)
    weights = np.stack([w for *_, w in pieces])  # [pieces, K]
    first = np.take_along_axis(weights, (weights != 0).argmax(1)[:, None], 1)
    equal = ((weights == 0) | (weights == first)).all(1, keepdims=True) & (first != 0)
    factors = np.where(equal, first, 1.0)
    return [(a, b, w) for (a, b, _), w in zip(pieces, weights / factors, strict=True)], tuple(factors[:, 0].tolist())


def as_array(tensor: Tensor) -> Any:
    """What a `WeightedSum` works on: NumPy's array of the same memory, or a tensor where that is on a GPU."""
    return tensor if tensor.is_cuda else tensor.numpy()


def operations(like: Any) -> Any:
    """The module whose `add`, `multiply` and the like work on what `as_array` makes of `like`, or on `like` as that."""
    return torch if isinstance(like, torch.Tensor) and like.is_cuda else np


def plus(a: Partial, b: Partial, sizes: Sequence[int], in_place: bool = False) -> Partial:
    """The sum of two siblings, with pieces of these `sizes`; `in_place` it may use up `a`."""
    if a.sent == b.sent:
        return Partial(torch.add(a.value, b.value, out=a.value if in_place else None), a.sent)
    left, right = (iter(part.value.split([*compress(sizes, part.sent)])) for part in (a, b))
    pieces = [
        next(left) + next(right) if x and y else next(left) if x else next(right)
        for x, y in zip(a.sent, b.sent, strict=True)
        if x or y
    ]
    return Partial(torch.cat(pieces), tuple(x or y for x, y in zip(a.sent, b.sent, strict=True)))


def accumulate(node: Node, leaf: Callable[[int], Partial], sizes: Sequence[int], spare: list[Tensor]) -> Partial:
    """Σ leaf(position) of `node` in tree order; leaves are asked for in order, and used up. The memory of whole ones that
    were added to others is put into `spare`, for leaves that follow."""
    if node[1] - node[0] == 1:
        return leaf(node[0])
    left, right = (accumulate(child, leaf, sizes, spare) for child in children(node))
    total = plus(left, right, sizes, in_place=True)
    whole = sum(sizes)
    spare += [part.value for part in (left, right) if part.value is not total.value and len(part.value) == whole]
    return total


def merge(partials: Partials, clients: int, sizes: Sequence[int]) -> Partials:
    """Add siblings until none are left; `partials` may hold any disjoint nodes of the tree over `clients`."""
    merged: Partials = {}

    def visit(node: Node) -> Partial | None:
        if node in partials or node[1] - node[0] == 1:
            return partials.get(node)
        below = {child: visit(child) for child in children(node)}
        a, b = below.values()
        if a and b:
            return plus(a, b, sizes)
        merged.update({child: part for child, part in below.items() if part})
        return None

    if total := visit((0, clients)):
        merged[0, clients] = total
    return merged
