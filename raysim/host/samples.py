"""Rows of the data set as model inputs on the host's device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raysim.core.samples import ClientData, Samples
from raysim.data import Dataset, Partition

CACHE_BYTES = 256 << 20  # model inputs that stay on the device from round to round


class SampleSource:
    """Brings samples to the device, and leaves those of clients there as long as there is room."""

    def __init__(self, data: Dataset, partition: Partition, device: torch.device, channels_last: bool):
        self.data, self.partition, self.device, self.channels_last = data, partition, device, channels_last
        self._cache: dict[tuple[int, str], Samples] = {}  # by client and part
        self._room = CACHE_BYTES

    def client(self, client: int) -> ClientData:
        """The training, test and validation samples of a client."""
        rows = {"train": self.partition.train, "test": self.partition.test, "val": self.partition.val}

        def load(part: str) -> Samples:
            samples = self._cache.get((client, part)) or self.rows(rows[part][client], client)
            size = samples.x.nbytes + samples.y.nbytes
            if (client, part) not in self._cache and size <= self._room:
                self._cache[client, part] = samples
                self._room -= size
            return samples

        return ClientData(load)

    def rows(self, rows: np.ndarray, client: int | None = None) -> Samples:
        """Model inputs and labels of `rows` [n] of the data set; labels as `client` sees them."""
        y = self.data.y[rows]
        if client is not None and self.partition.label_map is not None:
            y = self.partition.label_map[client][y]
        return Samples(self.inputs(rows), torch.from_numpy(np.ascontiguousarray(y)).to(self.device))

    def inputs(self, rows: np.ndarray) -> Tensor:
        """Model inputs of `rows` [n] of the data set."""
        x = self.data.transform(torch.from_numpy(self.data.x[rows]).to(self.device))
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x
