"""Who holds which rows of a data set, and for what."""

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.partition.shards import Shards

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows of a Dataset by client and use.

    A row has one use, except that the server may test on the clients' test rows and on an oracle's proxy set.
    """

    train: Shards
    """Per client the int64 training rows; empty where a client got nothing."""
    test: Shards
    """Per client the rows of its own test."""
    val: Shards
    """Per client the rows of its validation."""
    server_test: np.ndarray
    """Rows that the global model is tested on."""
    proxy: np.ndarray
    """Rows of the server's proxy set."""
    label_map: np.ndarray | None = None
    """[N, C] int64: the class that client i takes class c for (`label_swap`); None is the truth."""

    def __post_init__(self) -> None:
        for name in ("train", "test", "val"):
            if not isinstance(getattr(self, name), Shards):
                object.__setattr__(self, name, Shards.of(getattr(self, name)))

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64 training samples."""
        return self.train.sizes

    def unused(self, data: Dataset) -> np.ndarray:
        """The rows of `data` that neither a client nor the server has."""
        uses = (self.train.rows, self.test.rows, self.val.rows, self.server_test, self.proxy)
        return np.setdiff1d(np.arange(len(data.y)), np.concatenate(uses))

    def seen_labels(self, data: Dataset) -> np.ndarray:
        """[n] int64 classes of the training samples, in the order of `train.rows`, as their clients see them; see
        `Dataset.labels`."""
        labels: np.ndarray = data.labels[self.train.rows]
        if self.label_map is not None:
            labels = self.label_map[self.train.owners, labels]
        return labels

    def label_counts(self, data: Dataset) -> np.ndarray:
        """[N, C] int64 training samples by client and by the class that the client sees."""
        C = data.num_classes
        seen = self.train.owners * C + self.seen_labels(data)
        return np.bincount(seen, minlength=self.clients * C).reshape(self.clients, C)

    def sha256(self) -> str:
        """Hash of all rows, their order and the label map: the same on every machine."""
        digest = hashlib.sha256(f"{self.clients} {self.label_map is not None}".encode())
        maps = [] if self.label_map is None else list(self.label_map)
        for shards in (self.train, self.test, self.val, Shards.of([self.server_test, self.proxy, *maps])):
            # Before each client's rows their number, so that every division of the rows has a hash of its own.
            digest.update(np.insert(shards.rows, shards.offsets[:-1], shards.sizes).astype("<i8", copy=False).data)
        return digest.hexdigest()

    def to_table(self, data: Dataset | None = None) -> "pyarrow.Table":
        """Columns sample, client (-1: the server) and split; the number of clients and the label map are metadata.

        With `data` there are also a column label, the class that the holder takes the sample for, and the names of the
        classes, so that the table can be read without the data set. The samples without an owner then are the split `unused`.
        """
        import pyarrow

        uses = {"train": self.train, "test": self.test, "val": self.val}
        servers = {"server_test": self.server_test, "proxy": self.proxy}
        if data is not None:
            servers["unused"] = self.unused(data)
        rows = [*(shards.rows for shards in uses.values()), *servers.values()]
        owners = [*(shards.owners for shards in uses.values()), *(np.full(len(r), -1) for r in servers.values())]
        split = np.repeat(np.arange(len(rows), dtype=np.int8), [len(r) for r in rows])
        header = {"clients": self.clients, "label_map": None if self.label_map is None else self.label_map.tolist()}
        columns = {
            "sample": np.concatenate(rows),
            "client": np.concatenate(owners),
            "split": pyarrow.DictionaryArray.from_arrays(split, [*uses, *servers]),
        }
        if data is not None:
            truth = data.labels[columns["sample"]]
            seen = truth if self.label_map is None else self.label_map[columns["client"], truth]
            columns["label"] = np.where(columns["client"] < 0, truth, seen)
            header |= {"data": data.name, "classes": data.label_names}
        return pyarrow.table(columns).replace_schema_metadata({"raysim.partition": json.dumps(header)})
