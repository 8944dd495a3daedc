"""How a sum over a cohort's models is asked for, merged up the tree of hosts, and placed into a vector."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from raysim.core import tree
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.engine.base import Call, Engine, Handle
from raysim.engine.merging import schedule
from raysim.host.messages import SumDestination, SumRequest
from raysim.lazy import Tensor

CHUNK = 1 << 23  # floats of one message of a reduction: larger models travel in pieces, so that levels overlap


def sum_request(
    clients: Sequence[int], layers: LayerMap, weights: Tensor, server: np.ndarray | float = 0.0, of: str = "model",
    power: int = 1,
) -> SumRequest:  # fmt: skip
    """The sum with `weights` [K, tensors] over the clients, and with the coefficients `server` [tensors] over the server's
    model."""
    columns = np.empty((weights.shape[1], len(weights) + 1))
    columns[:, :-1], columns[:, -1] = weights.numpy().T, server
    pieces = equal_columns(columns, layers)
    coefficients = [float(column[-1]) for *_, column in pieces]
    pieces, factors = tree.without_factors((start, stop, column[:-1]) for start, stop, column in pieces)
    return SumRequest({c: i for i, c in enumerate(clients)}, pieces, factors, coefficients, of, power)


def aggregation(mix: Mixture, clients: Sequence[int]) -> SumRequest:
    """The new value that `mix` describes. The leaves of the tree are updates, not models: small differences between clients
    would drown in the rounding of large sums."""
    server = mix.server_coefficient.numpy()
    server = np.where(np.abs(server - 1) <= 1e-9, 1.0, server)
    return sum_request(clients, mix.layers, mix.coefficients, server)


def equal_columns(columns: np.ndarray, layers: LayerMap) -> list[tree.Piece]:
    """Pieces (start, stop, column [n]) of the flat vector, of at most `CHUNK`, whose tensors have equal `columns`
    [T + Tb, n]."""
    edges = [0, *(1 + np.flatnonzero((columns[1:] != columns[:-1]).any(1))), len(columns)]
    pieces = []
    for i, j in itertools.pairwise(edges):
        start, stop = layers.tensors[i].start, layers.tensors[j - 1].stop
        n = -(-(stop - start) // CHUNK)
        bounds = [start + (stop - start) * part // n for part in range(n + 1)]
        pieces += [(a, b, columns[i]) for a, b in itertools.pairwise(bounds)]
    return pieces


def chunks(request: SumRequest) -> list[SumRequest]:
    """Its pieces in messages of at least `CHUNK` floats, as long as there are enough."""
    edges, size = [0], 0
    for i, piece in enumerate(request.sizes):
        if size >= CHUNK:
            edges.append(i)
            size = 0
        size += piece
    bounds = itertools.pairwise([*edges, len(request.pieces)])
    return [
        replace(
            request, pieces=request.pieces[a:b], factors=request.factors[a:b],
            server_coefficients=request.server_coefficients[a:b],
        )
        for a, b in bounds
    ]  # fmt: skip


def destinations(engine: Engine, holders: Sequence[int], turn: int = 0) -> dict[int, SumDestination]:
    """Where the partial sums of each host go first."""
    levels = _levels(engine, holders, turn)
    return {i: SumDestination(next(engine.keys), _leads(i, levels)) for i in holders}


def merge_up(
    engine: Engine, request: SumRequest, partials: Mapping[int, Handle], sums_to: Mapping[int, SumDestination],
    turn: int = 0,
) -> tuple[int, Handle]:  # fmt: skip
    """Merge partial sums within each machine, then across: (host, handle) of the whole. Hosts take turns to merge."""
    partials = dict(partials)
    levels = _levels(engine, list(partials), turn)
    root = next(iter(partials))
    for level, groups in enumerate(levels):
        for root, *others in groups:
            to = SumDestination(sums_to[root].key, _leads(root, levels[level + 1 :]))
            args = (len(request.position), request.sizes, to, *(partials[i] for i in others))
            partials[root] = engine.call(Call(root, "merge", args))
    return root, partials[root]


def _levels(engine: Engine, holders: Sequence[int], turn: int) -> list[list[list[int]]]:
    return schedule(holders, [engine.nodes[i] for i in holders], engine.fan_in, turn)


def _leads(host: int, levels: list[list[list[int]]]) -> bool:
    """Whether the next group that `host` is in is its own: then its sums wait there for the others'."""
    group = next((group for level in levels for group in level if host in group), None)
    return group is not None and group[0] == host


@np.errstate(over="ignore", invalid="ignore")  # a round looks at its new model
def place(total: tree.Partial, request: SumRequest, server: Tensor, result: Tensor) -> None:
    """result = server_coefficient · server + factor · total for all pieces of the request, without a total that no client
    sent."""
    begin, sums, own, new = 0, total.value.numpy(), server.numpy(), result.numpy()
    described = zip(request.pieces, total.sent, request.factors, request.server_coefficients, strict=True)
    for (sent, factor, coefficient), alike in itertools.groupby(described, key=itemgetter(1, 2, 3)):
        (start, stop, _), *more = [piece for piece, *_ in alike]
        stop = more[-1][1] if more else stop
        for a in range(start, stop, tree.BLOCK):  # which stays in a core's cache
            b = min(a + tree.BLOCK, stop)
            out = new[a:b]
            if not sent:
                out[:] = own[a:b] * coefficient if coefficient else 0.0
                continue
            part = sums[begin : begin + b - a]
            begin += b - a
            if factor != 1:
                part = np.multiply(part, factor, out=out)
            if coefficient:
                np.add(own[a:b] if coefficient == 1 else own[a:b] * coefficient, part, out=out)
            elif factor == 1:
                out[:] = part
