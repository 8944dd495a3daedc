"""The one order in which a cohort's models are added, whoever adds them.

Float addition is not associative, so the additions follow one binary tree over positions 0..K-1 of the sorted cohort,
whatever the number of hosts, their packing or the fan-in. A node is the half-open range (lo, hi) of positions it sums;
it splits in the middle. A host sums the largest nodes whose leaves it holds all, and forwards those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Node = tuple[int, int]
BLOCK = 1 << 16  # floats summed at once on a CPU: a few blocks stay in a core's cache
Host = TypeVar("Host")
# The sums of a host: for each node and each piece of the flat vector, the partial sum or None where it is all zero.
Partials = dict[tuple[Node, int], Tensor | None]


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


def weighted_sum(rows: Mapping[int, Tensor], weights: Mapping[int, float], node: Node, out: Tensor) -> bool:
    """out [n] = Σ weights[p] · rows[p] over the positions of `node`, in tree order. False if every weight is zero.

    Every leaf is scaled (and rounded) before it is added, so that a sum does not depend on where its leaves are.
    """
    if not any(weights[p] for p in range(*node)):
        return False
    block = len(out) if out.is_cuda else min(BLOCK, len(out))
    depth = (node[1] - node[0] - 1).bit_length()
    scratch = [torch.empty(block, dtype=out.dtype, device=out.device) for _ in range(depth)]

    def fill(node: Node, into: Tensor, start: int, level: int) -> bool:
        lo, hi = node
        if hi - lo == 1:
            if weights[lo] == 0:
                return False
            torch.mul(rows[lo][start : start + len(into)], weights[lo], out=into)
            return True
        left, right = children(node)
        if not fill(left, into, start, level + 1):
            return fill(right, into, start, level + 1)
        other = scratch[level][: len(into)]
        if fill(right, other, start, level + 1):
            into.add_(other)
        return True

    for start in range(0, len(out), block):
        fill(node, out[start : start + block], start, 0)
    return True


def accumulate(node: Node, leaf: Callable[[int], dict[int, Tensor | None]]) -> dict[int, Tensor | None]:
    """Σ leaf(position) of `node` in tree order, piece by piece; leaves are asked for in order, and used up."""
    lo, hi = node
    if hi - lo == 1:
        return leaf(lo)
    left, right = (accumulate(child, leaf) for child in children(node))
    for piece, part in right.items():
        mine = left[piece]
        left[piece] = part if mine is None else mine if part is None else mine.add_(part)
    return left


def merge(partials: Partials, clients: int, pieces: Sequence[int]) -> Partials:
    """Add siblings until none are left; `partials` may hold any disjoint nodes of the tree over `clients`."""
    merged: Partials = {}

    def visit(node: Node, piece: int) -> tuple[bool, Tensor | None]:
        if (node, piece) in partials:
            return True, partials[node, piece]
        if node[1] - node[0] == 1:
            return False, None
        left, right = children(node)
        (has_left, a), (has_right, b) = visit(left, piece), visit(right, piece)
        if has_left and has_right:
            return True, b if a is None else a if b is None else a + b
        if has_left:
            merged[left, piece] = a
        if has_right:
            merged[right, piece] = b
        return False, None

    for piece in pieces:
        complete, total = visit((0, clients), piece)
        if complete:
            merged[(0, clients), piece] = total
    return merged


def schedule(hosts: Sequence[Host], nodes: Sequence[str], fan_in: int) -> list[list[list[Host]]]:
    """Who merges whom: levels of groups of at most `fan_in` neighbours, first within each machine, then across.

    The first host of a group merges it and goes on to the next level.
    """
    levels = []
    current = list(zip(hosts, nodes, strict=True))
    for within_machine in (True, False):
        while True:
            groups: list[list[tuple[Host, str]]] = []
            for host, node in current:
                joins = groups and len(groups[-1]) < fan_in and (not within_machine or groups[-1][0][1] == node)
                if joins:
                    groups[-1].append((host, node))
                else:
                    groups.append([(host, node)])
            if len(groups) == len(current):
                break
            levels.append([[host for host, _ in group] for group in groups if len(group) > 1])
            current = [group[0] for group in groups]
    return levels
