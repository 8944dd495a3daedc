"""Client states between their rounds: in memory up to a limit, beyond it in files, and the same bits either way."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import numpy as np
from safetensors import safe_open

from raysim.store.atomic import as_safetensors, undone_by_an_error
from raysim.store.temporary import own, owned

PREFIX = "raysim-states-"
Arrays = Mapping[str, np.ndarray]


class StateStore:
    """Holds at most `limit` bytes of arrays in memory. Those used longest ago move to files in the system's temporary
    folder (which the environment variable TMPDIR names) and are read from there, one array at a time. The files go with the
    store; those of a process that was killed go when the next one moves a state."""

    def __init__(self, limit: int):
        self.limit = limit
        self.bytes = 0  # in memory
        self.spilled = 0  # bytes moved to files so far
        self._numbers = itertools.count()
        self._memory: OrderedDict[int, Arrays] = OrderedDict()  # what was used longest ago comes first
        self._folder: Path | None = None

    def put(self, arrays: Arrays) -> StoredArrays:
        """Own `arrays` from now on. They are freed with the handle that this returns."""
        number = next(self._numbers)
        self._memory[number] = arrays
        self.bytes += size(arrays)
        while self.bytes > self.limit:
            self._spill()
        return StoredArrays(self, number, tuple(arrays))

    def read(self, number: int, name: str) -> np.ndarray:
        if number in self._memory:
            self._memory.move_to_end(number)
            return self._memory[number][name]
        with safe_open(self._path(number), "numpy") as file:
            array: np.ndarray = file.get_tensor(name)
            return array

    def drop(self, number: int) -> None:
        if number in self._memory:
            self.bytes -= size(self._memory.pop(number))
        else:
            self._path(number).unlink(missing_ok=True)

    def _spill(self) -> None:
        number, arrays = next(iter(self._memory.items()))
        path = self._path(number)
        with undone_by_an_error(path, path):  # not synced: it is of no use after a crash
            path.write_bytes(as_safetensors(arrays))
        del self._memory[number]  # only now: a full disk must not lose what does not fit
        self.bytes -= size(arrays)
        self.spilled += size(arrays)

    def _path(self, number: int) -> Path:
        if self._folder is None:
            owned(Path(tempfile.gettempdir()), PREFIX)  # removes what others have left
            self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            weakref.finalize(self, _remove, self._folder, own(self._folder))
        return self._folder / f"{number}.safetensors"


def _remove(folder: Path, lock: TextIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


class StoredArrays(Mapping[str, np.ndarray]):
    """Arrays on a state_store, by name."""

    def __init__(self, state_store: StateStore, number: int, names: tuple[str, ...]):
        self._store, self._number, self._names = state_store, number, names
        weakref.finalize(self, state_store.drop, number).atexit = False

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._store.read(self._number, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def size(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
