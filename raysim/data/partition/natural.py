"""The clients that the data themselves name."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.core.bounds import Count
from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.partition.base import Scheme, require
from raysim.data.partition.shards import Shards


@dataclass(frozen=True)
class Natural(Scheme):
    """The clients of the data themselves: the column `client` of a Parquet folder, `client_train` of an .npz file.

    Where test rows have clients too, they are those clients' test sets.
    """

    clients: Count | None = None
    """Number of clients, at most as many as the data have, as FEMNIST's 10 or 20 in CCN; null is all of them."""
    pick: Literal["groups", "largest"] = "groups"
    """How fewer clients are made: groups joins the data's clients at random, largest keeps those with most training
    rows."""

    def rows(self, data: Dataset) -> np.ndarray:
        return np.arange(len(data.y))

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> Shards:
        if data.client is None:
            raise DataError(
                f"natural: {data.name} names no clients; add a column `client` to its training files or choose another "
                "partition"
            )
        owner = data.client[rows]  # [rows], -1: without an owner, which only a test row may be
        nameless = (owner < 0) & (rows < data.train_rows)
        if nameless.any():
            raise DataError(f"natural: training row {rows[np.argmax(nameless)]} of {data.name} has no client; name one")
        named = data.client[
            : data.train_rows
        ]  # with the proxy set, which may take a client's last row but not its number
        ids = np.unique(named[named >= 0])
        sizes = np.bincount(np.searchsorted(ids, owner[rows < data.train_rows]), minlength=len(ids))
        clients = len(ids) if self.clients is None else self.clients
        require(
            1 <= clients <= len(ids),
            f"natural: {data.name} has {len(ids)} clients, so clients cannot be {clients}; lower it or leave it out",
        )
        group_of = np.full(len(ids) + 1, -1)  # the last entry is for rows whose client has no training rows
        if clients == len(ids):
            group_of[:clients] = np.arange(clients)
        elif self.pick == "groups":
            least, more = divmod(len(ids), clients)
            members = least + (np.arange(clients) < more)
            group_of[rng.permutation(len(ids))] = np.repeat(np.arange(clients), members)
        else:
            group_of[np.sort(np.argsort(-sizes, kind="stable")[:clients])] = np.arange(clients)
        position = np.searchsorted(ids, owner)
        holder = group_of[np.where(np.append(ids, -1)[position] == owner, position, len(ids))]
        order = np.argsort(holder, kind="stable")
        ends = np.searchsorted(holder[order], np.arange(clients + 1))
        return Shards(rows[order[ends[0] :]], ends - ends[0])
