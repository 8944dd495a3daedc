"""The clients that the data themselves name."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.partition.base import Scheme, require


@dataclass(frozen=True)
class Natural(Scheme):
    """The clients of the data themselves: the column `client` of a Parquet folder, `client_train` of an .npz file.

    Where test rows have clients too, they are those clients' test sets.
    """

    clients: int | None = None
    """Number of clients, at most as many as the data have, as FEMNIST's 10 or 20 in CCN; null is all of them."""
    pick: Literal["groups", "largest"] = "groups"
    """How fewer clients are made: groups joins the data's clients at random, largest keeps those with most training
    rows."""
    seed: int | None = None
    """Seed of the draws; null takes the seed of the run."""

    def rows(self, data: Dataset) -> np.ndarray:
        return np.arange(len(data.y))

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        if data.client is None:
            raise DataError(
                f"natural: {data.name} names no clients; add a column `client` to its training files or choose another "
                "partition"
            )
        owner = data.client[rows]  # [rows], -1: nobody's, which only a test row may be
        nameless = (owner < 0) & (rows < data.train_rows)
        if nameless.any():
            raise DataError(f"natural: training row {rows[np.argmax(nameless)]} of {data.name} has no client; name one")
        ids, sizes = np.unique(owner[rows < data.train_rows], return_counts=True)
        clients = len(ids) if self.clients is None else self.clients
        require(
            1 <= clients <= len(ids),
            f"natural: {data.name} has {len(ids)} clients, so clients cannot be {clients}; lower it or leave it out",
        )
        if clients == len(ids):
            groups = list(np.arange(clients)[:, None])
        elif self.pick == "groups":
            groups = np.array_split(rng.permutation(len(ids)), clients)
        else:
            groups = list(np.sort(np.argsort(-sizes, kind="stable")[:clients])[:, None])

        group_of = np.full(len(ids) + 1, -1)  # the last entry is for rows whose client has no training rows
        for client, members in enumerate(groups):
            group_of[members] = client
        position = np.searchsorted(ids, owner)
        holder = group_of[np.where(np.append(ids, -1)[position] == owner, position, len(ids))]
        order = np.argsort(holder, kind="stable")
        ends = np.searchsorted(holder[order], np.arange(clients + 1))
        return [rows[order[a:b]] for a, b in pairwise(ends)]
