"""Samples that lie encoded in files, and are read and decoded when rows of them are asked for."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from raysim.data.errors import DataError

SHOWN_SECONDS = 0.5  # between two lines of progress
BATCH = 256  # samples that are decoded at a time: bounds what is held of them twice

Batch = Sequence[tuple[str, Any]]  # how an error names each sample, and what it is encoded as


class Files(Protocol):
    """Where encoded samples lie."""

    held_bytes: int
    """Of what was read last, so much stays in memory."""

    def __len__(self) -> int:
        """Samples."""

    def reach(self, rows: np.ndarray) -> int:
        """How many samples must be read for these `rows` [n] int64."""

    def batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Batch]]:
        """All of `rows` [n] int64, up to `BATCH` at a time: positions in `rows`, and what lies there. Ascending rows come in
        their order, and nothing is read twice for them."""


class Decoder(Protocol):
    """How samples are encoded."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one decoded sample."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __call__(self, batch: Batch, pool: ThreadPoolExecutor | None = None) -> np.ndarray:
        """Samples [b, ...], decoded by the threads of `pool` where there is one. Raises DataError naming the sample."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Samples [n, ...] in `files`; only what was read last is in memory."""

    files: Files
    decode: Decoder

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.files), *self.decode.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.decode.dtype

    def __getitem__(self, rows: Any) -> np.ndarray:
        rows = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        out = np.empty((len(rows), *self.decode.shape), self.dtype)
        for positions, batch in self.files.batches(rows):
            out[positions] = self.decode(batch)
        return out

    def parts(self) -> Iterator[np.ndarray]:
        """All samples in their order, decoded in parallel."""
        # Decoders of images release the interpreter lock.
        with ThreadPoolExecutor() as pool, _shown(len(self)) as show:
            for _, batch in self.files.batches(np.arange(len(self))):
                yield self.decode(batch, pool)
                show(len(batch))

    def whole(self) -> np.ndarray:
        """All samples in memory. Raises DataError where there is not enough of it."""
        try:
            out, start = np.empty(self.shape, self.dtype), 0
        except MemoryError:
            first = next(self.files.batches(np.arange(1)))[1][0][0]
            raise DataError(
                f"{first}: {len(self)} samples of this size need {math.prod(self.shape) * self.dtype.itemsize:,} bytes of "
                "memory; set data.cache or data.storage"
            ) from None
        for part in self.parts():
            out[start : start + len(part)] = part
            start += len(part)
        return out


@dataclass(eq=False)
class SingleFiles:
    """Samples that are a file each."""

    paths: Sequence[Path]
    held_bytes: int = 0  # nothing is held: a file is read for one sample

    def __len__(self) -> int:
        return len(self.paths)

    def reach(self, rows: np.ndarray) -> int:
        return len(rows)

    def batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Batch]]:
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            paths = [self.paths[row] for row in part]
            yield np.arange(start, start + len(part)), [(str(path), path) for path in paths]


@contextmanager
def _shown(total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of samples just decoded. In a terminal a line shows the progress."""
    done, shown = 0, time.monotonic()

    def show(more: int) -> None:
        nonlocal done, shown
        done += more
        if sys.stderr.isatty() and (now := time.monotonic()) - shown > SHOWN_SECONDS:
            shown = now
            print(f"\r{done:,} of {total:,} samples are decoded", end="", file=sys.stderr, flush=True)

    began = shown
    try:
        yield show
    finally:
        if shown != began:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
