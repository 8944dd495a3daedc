"""Data sets decoded once, in files that later runs and all processes of a machine map."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.encoded import Encoded
from raysim.data.errors import DataError
from raysim.data.sources.base import EncodedSource, Source
from raysim.store.atomic import creating, open_to_append, write_json
from raysim.version import __version__

ABOUT = ("name", "train_rows", "classes", "scale", "mean", "std", "vocab")  # of a data set, what JSON holds


@dataclass(eq=False)
class Mapped:
    """Samples [n, ...] in a file that all processes of a machine map. A machine without the file makes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    digest: str
    """Of the data set."""
    make: Callable[[], Dataset]
    """Makes the file, and a data set of it."""
    _array: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        if self._array is None:
            if not self.file.exists():
                made = self.make()
                assert isinstance(made.x, Mapped)
                file = made.x.file  # in another folder where this machine's copy of the data has other times
                if made.digest != self.digest:
                    raise DataError(f"{file}: made here from other data than the run began with; copy those here")
                self.file = file
            self._array = np.load(self.file, mmap_mode="r").view(np.ndarray)
        return self._array[rows].copy() if isinstance(rows, slice) else self._array[rows]

    def __getstate__(self) -> dict[str, Any]:
        """Without the array: who gets this maps the file."""
        return self.__dict__ | {"_array": None}


def cached(source: Source, root: Path | None, cache: Path) -> Dataset:
    """The data set of `source`, in the folder below `cache` that is named for all that decides its bytes: the settings,
    the names, sizes and times of the files, and the versions of what decodes them. Raises DataError."""
    read = [f"{type(source).__module__}.{source!r}", source.files(root), __version__, version("pillow")]
    folder = cache.absolute() / hashlib.sha256(json.dumps(read).encode()).hexdigest()[:32]
    try:
        if not folder.is_dir():
            with _locked(folder):
                if not folder.is_dir():  # no other process has made it meanwhile
                    _make(source, root, folder)
        return _read(folder, partial(cached, source, root and root.absolute(), cache.absolute()))
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"data.cache: {folder} cannot be made or read ({error}); delete it, or leave data.cache out"
        ) from error


def _read(folder: Path, make: Callable[[], Dataset]) -> Dataset:
    about = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    shape, dtype, digest = tuple(about.pop("shape")), np.dtype(about.pop("dtype")), about.pop("digest")
    for name in ("classes", "mean", "std"):
        about[name] = tuple(about[name])
    client = np.load(folder / "client.npy") if (folder / "client.npy").exists() else None
    samples = Mapped(folder / "x.npy", shape, dtype, digest, make)
    return Dataset(x=samples, y=np.load(folder / "y.npy"), client=client, digest=digest, **about)


def _make(source: Source, root: Path | None, folder: Path) -> None:
    """Decode into a temporary folder, which becomes `folder` when all of it is on disk."""
    data = source.open(root) if isinstance(source, EncodedSource) else source.load(root)
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir()
    try:
        digest = data.begin_digest()
        with creating(temporary / "x.npy") as file:
            header = {"descr": data.x.dtype.str, "fortran_order": False, "shape": data.x.shape}
            np.lib.format.write_array_header_1_0(file, header)
            for part in data.x.parts() if isinstance(data.x, Encoded) else [data.x[:]]:
                file.write(part.data)
                digest.update(part.data)
        digest.update(np.ascontiguousarray(data.y).data)
        for name, array in {"y": data.y, "client": data.client}.items():
            if array is not None:
                with creating(temporary / f"{name}.npy") as file:
                    np.save(file, array)
        about = {name: getattr(data, name) for name in ABOUT}
        about |= {"task": data.task if isinstance(data.task, str) else data.task.name, "digest": digest.hexdigest()}
        write_json(temporary / "data.json", about | {"shape": data.x.shape, "dtype": data.x.dtype.str})
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """While this lasts, no other process makes `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_to_append(folder.with_name(f".{folder.name}.lock")), "a") as lock:
        with suppress(OSError):  # a file system without locks: both make it, and the one that is done last is left
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
