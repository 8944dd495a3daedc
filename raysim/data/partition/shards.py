"""Rows of many clients in two arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

import numpy as np


class Shards(Sequence[np.ndarray]):
    """The rows of N clients, one client's after the other's: `shards[i]` are those of client i, without a copy.

    Two arrays, however many clients there are: Ray's actors on a machine share them.
    """

    def __init__(self, rows: np.ndarray, offsets: np.ndarray):
        """`rows` [n] int64 and `offsets` [N + 1] int64: client i has rows[offsets[i] : offsets[i + 1]]."""
        self.rows, self.offsets = rows, offsets

    @classmethod
    def of(cls, parts: Iterable[np.ndarray]) -> Self:
        """From the rows of every client."""
        parts = list(parts)
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        rows = np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64, copy=False)
        return cls.sized(rows, sizes)

    @classmethod
    def sized(cls, rows: np.ndarray, sizes: np.ndarray) -> Self:
        """From all rows, and how many each client has [N]."""
        return cls(rows, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64 rows of each client."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> np.ndarray:
        """[n] int64 the client of each row."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)

    def where(self, chosen: np.ndarray) -> Self:
        """The `chosen` [n] bool rows of every client, in their order."""
        if chosen.all():
            return self
        kept = np.flatnonzero(chosen)
        return type(self)(self.rows[kept], np.searchsorted(kept, self.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, client: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, client: slice) -> list[np.ndarray]: ...

    def __getitem__(self, client: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        client = range(len(self))[client]
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))
