"""Rows of the data set as model inputs on the host's device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from raysim.core.arrays import tensor_of
from raysim.core.samples import ClientData, Samples
from raysim.data import DataError, Dataset, Partition
from raysim.data.augment import Augmentation, augmented
from raysim.data.dataset import first_wrong
from raysim.lazy import Tensor, torch

CACHE_BYTES = 64 << 20  # model inputs that stay in a CPU's memory; to make others again takes about 2 % of a round
DECODED_BYTES = 256 << 20  # ... where they would have to be read and decoded again
FREE_SHARE = 0.25  # of a GPU's memory is left to training


class ReadAhead:
    """Samples that are not in memory: what is asked for next can be read, by a thread, before it is asked for."""

    def __init__(self, data: Dataset):
        self._data, self._pool = data, ThreadPoolExecutor(1)
        self._coming: tuple[bytes, Future[np.ndarray]] | None = None

    def begin(self, rows: np.ndarray) -> None:
        """Read `rows` [n]."""
        self._coming = rows.tobytes(), self._pool.submit(self._read, rows)

    def _read(self, rows: np.ndarray) -> np.ndarray:
        samples = self._data.x[rows]
        if wrong := first_wrong(samples, self._data.vocab):  # of samples in memory it is known
            raise DataError(f"{self._data.name}: {self._data.place(int(rows[wrong[0]]))} {wrong[1]}")
        return samples

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        if self._coming is None or self._coming[0] != rows.tobytes():
            return self._read(rows)
        (_, future), self._coming = self._coming, None
        return future.result()


class SampleSource:
    """Brings samples to the device, and leaves them there as long as there is room.

    A CPU keeps the inputs of clients. A GPU keeps whatever was asked for, as it is stored, and makes inputs of it again: of
    images that is a quarter of the memory, for three launches.
    """

    def __init__(
        self, data: Dataset, partition: Partition, device: torch.device, channels_last: bool,
        augment: Sequence[Augmentation] = (),
    ):  # fmt: skip
        """`augment` changes the images of every pass over a client's training samples."""
        self.augment = augment
        self.data, self.partition, self.device, self.channels_last = data, partition, device, channels_last
        self._x = data.x if isinstance(data.x, np.ndarray) else ReadAhead(data)
        self._most = DECODED_BYTES if isinstance(self._x, ReadAhead) else CACHE_BYTES
        self._following: dict[int, int] = {}  # clients, and who is asked for after each
        self._cache: dict[tuple[int, str], Samples] = {}  # on a CPU, by client and part
        self._room = self._most
        self._stored: dict[tuple[str, bytes], Tensor] = {}  # on a GPU: x or y of these rows

    def expect(self, clients: Sequence[int]) -> None:
        """These clients will be asked for, in this order."""
        self._following = dict(pairwise(clients))

    def client(self, client: int) -> ClientData:
        """The training, test and validation samples of a client."""
        rows = {"train": self.partition.train, "test": self.partition.test, "val": self.partition.val}

        def load(part: str) -> Samples:
            samples = self._cache.get((client, part)) or self.rows(rows[part][client], client)
            size = samples.x.nbytes + samples.y.nbytes
            if self.device.type == "cpu" and (client, part) not in self._cache and size <= self._room:
                self._cache[client, part] = samples
                self._room -= size
            following = self._following.pop(client, None)
            if following is not None and isinstance(self._x, ReadAhead) and (following, "train") not in self._cache:
                self._x.begin(rows["train"][following])
            return samples

        return ClientData(load, self._augmented if self.augment else None)

    def _augmented(self, x: Tensor, seed: int) -> Tensor:
        black = self.data.transform(x.new_zeros(1, x.shape[1], 1, 1)).flatten()
        return augmented(x, self.augment, black, seed)

    def rows(self, rows: np.ndarray, client: int | None = None) -> Samples:
        """Model inputs and labels of `rows` [n] of the data set; labels as `client` sees them."""
        labels = None if client is None or self.partition.label_map is None else self.partition.label_map[client]
        name = "y" if labels is None else f"y of {client}"
        return Samples(self.inputs(rows), self._brought(name, rows, self.data.y, labels))

    def inputs(self, rows: np.ndarray) -> Tensor:
        """Model inputs of `rows` [n] of the data set."""
        x = self._brought("x", rows, self._x)
        # `transform` may work in place, and a GPU's copy is to be used again.
        x = self.data.transform(x.clone() if x.is_cuda and x.is_floating_point() else x)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def clear(self) -> None:
        """Free the memory of the samples."""
        self._cache, self._room, self._stored = {}, self._most, {}

    def _brought(
        self, name: str, rows: np.ndarray, array: np.ndarray | ReadAhead, labels: np.ndarray | None = None
    ) -> Tensor:
        """array[rows], with `labels` the label of each, on the device. It must not be written to."""
        key = name, rows.tobytes()
        if key in self._stored:
            return self._stored[key]
        taken = array[rows] if labels is None else labels[array[rows]]
        tensor = tensor_of(np.ascontiguousarray(taken)).to(self.device)
        if self.device.type == "cuda":
            free, memory = torch.cuda.mem_get_info(self.device)
            if free > FREE_SHARE * memory:
                self._stored[key] = tensor
        return tensor
