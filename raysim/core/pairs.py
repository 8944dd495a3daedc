"""Numbers of pairs of clients, as far as two have met: a matrix [N, N] would be 80 GB for a hundred thousand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class Pairs:
    """Entries (client, other) → number. What it has no entry for is up to the reader."""

    clients: int  # N
    keys: Tensor  # [n] int64, sorted: client · N + other
    values: Tensor  # [n] float64

    @classmethod
    def none(cls, clients: int) -> Pairs:
        return cls(clients, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64))

    @classmethod
    def of(cls, clients: int, memory: Mapping[str, Tensor]) -> Pairs:
        """What `memory` returned."""
        return cls(clients, memory["keys"], memory["values"])

    @property
    def memory(self) -> dict[str, Tensor]:
        """As a server remembers it."""
        return {"keys": self.keys, "values": self.values}

    def row(self, client: int) -> tuple[Tensor, Tensor]:
        """The others that the client has an entry for, sorted, and the entries."""
        lo, hi = torch.searchsorted(self.keys, torch.tensor([client, client + 1]) * self.clients).tolist()
        return self.keys[lo:hi] - client * self.clients, self.values[lo:hi]

    def plus(self, rows: Sequence[int], more: Tensor) -> Pairs:
        """With the entries of `more`, sparse [K, N], added to the rows of K clients."""
        (row, other), values = more.indices(), more.values()
        keys = torch.cat([self.keys, torch.tensor(rows, dtype=torch.long)[row] * self.clients + other])
        keys, place = keys.unique(return_inverse=True)
        total = torch.zeros(len(keys), dtype=torch.float64).index_add_(0, place, torch.cat([self.values, values]))
        return Pairs(self.clients, keys, total)

    def without(self, entries: Pairs) -> Pairs:
        """Only what `entries` has not."""
        kept = ~torch.isin(self.keys, entries.keys)
        return Pairs(self.clients, self.keys[kept], self.values[kept])


def entries(index: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A sparse tensor that has `values` [n] at `index` [dimensions, n], zeros among them, and nothing elsewhere."""
    return torch.sparse_coo_tensor(index, values, torch.Size(shape), check_invariants=True)


def sparse(matrix: Tensor) -> Tensor:
    """A matrix by its entries; one that is given so already keeps entries that are zero."""
    return (matrix if matrix.is_sparse else matrix.to_sparse()).coalesce()
