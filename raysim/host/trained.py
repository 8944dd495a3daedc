"""What the clients of a round have trained on this host, held until the round is closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysim.core import segments, tree
from raysim.lazy import Tensor, torch

Blocks = Callable[[int, int], Any]  # (start, stop) -> [k, stop - start] of k vectors, for a `tree.WeightedSum`


class TrainedModels:
    """One row of `updates` for each client: its model minus the global one. And the further vectors they upload.

    The memory of the rows is used again in the next round.
    """

    def __init__(self, S: int, device: torch.device):
        self.updates = torch.empty(0, S, device=device)
        self.row: dict[int, int] = {}  # client -> its row
        self.vectors: dict[str, dict[int, Tensor]] = {}  # further uploads by name and client

    @property
    def device(self) -> torch.device:
        return self.updates.device

    @property
    def block(self) -> int:
        """Elements of each vector that are worked on at once."""
        return max(segments.RUN, tree.GPU_BLOCK if self.updates.is_cuda else tree.BLOCK)

    def reserve(self, clients: int) -> None:
        """Reserve memory for so many more."""
        rows, S = len(self.row) + clients, self.updates.shape[1]
        if rows > len(self.updates):
            grown = torch.empty(rows, S, device=self.device)
            grown[: len(self.updates)] = self.updates
            self.updates = grown

    def place(self, client: int) -> Tensor:
        """Where the client's update [S] belongs; memory must be reserved."""
        return self.updates[self.row.setdefault(client, len(self.row))]

    def update(self, client: int) -> Tensor:
        """The client's update [S]."""
        return self.updates[self.row[client]]

    def add_vectors(self, client: int, vectors: Mapping[str, Tensor]) -> None:
        for name, vector in vectors.items():
            self.vectors.setdefault(name, {})[client] = vector

    def gather(self, clients: Sequence[int], start: int = 0, stop: int | None = None) -> Tensor:
        """[k, S] a copy of the clients' updates, or of their elements from `start` to `stop`."""
        return self.updates[:, start:stop][[self.row[c] for c in clients]]

    def blocks(self, clients: Sequence[int], of: str = "model", power: int = 1) -> Blocks:
        """The clients' updates, or the vectors `of` that name, to a `power` of 1 or 2."""
        if of == "model":
            matrix, rows = tree.as_array(self.updates), [self.row[c] for c in clients]
            if rows == list(range(rows[0], rows[0] + len(rows))):  # without a copy
                part = matrix[rows[0] : rows[0] + len(rows)]
                return (lambda a, b: part[:, a:b] ** 2) if power == 2 else (lambda a, b: part[:, a:b])
            return lambda a, b: matrix[rows, a:b] ** power
        vectors = [tree.as_array(self.vectors[of][c]) for c in clients]
        stack: Any = tree.operations(self.updates).stack
        return lambda a, b: stack([v[a:b] for v in vectors]) ** power

    def clear(self) -> None:
        self.row, self.vectors = {}, {}
