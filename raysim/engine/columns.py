"""Which coordinates of a cohort's updates are worked on together, whatever the number of hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from raysim.core.mixture import Mixture
from raysim.host.messages import ColumnPiece

COLUMNS = 1 << 16  # a piece has so many at most


def column_pieces(stop: int, start: int = 0, senders: tuple[int, ...] | None = None) -> list[ColumnPiece]:
    """The coordinates from `start` to `stop`, cut at multiples of `COLUMNS`."""
    edges = [start, *range((start // COLUMNS + 1) * COLUMNS, stop, COLUMNS), stop]
    return [ColumnPiece(a, b, senders) for a, b in pairwise(edges) if a < b]


def sent_pieces(mix: Mixture) -> list[ColumnPiece]:
    """All coordinates, cut also where other clients send a tensor."""
    layers, pieces, start = mix.layers, list[ColumnPiece](), 0
    for i, spec in enumerate(layers.tensors):
        if i + 1 == len(layers.tensors) or bool((mix.sent[:, i] != mix.sent[:, i + 1]).any()):
            senders = tuple(mix.sent[:, i].nonzero().flatten().tolist())
            pieces += column_pieces(spec.stop, start, None if len(senders) == len(mix.sent) else senders)
            start = spec.stop
    return pieces


def batched(pieces: Sequence[ColumnPiece], columns: int) -> Iterator[list[ColumnPiece]]:
    """Neighbouring pieces, of so many columns together, or a single one."""
    batch: list[ColumnPiece] = []
    for piece in pieces:
        if batch and (piece.stop - batch[0].start > columns or piece.start != batch[-1].stop):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch
