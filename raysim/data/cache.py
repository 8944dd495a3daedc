"""Data sets decoded once, in files that later runs and all processes of a machine map."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from raysim.data.dataset import Dataset
from raysim.data.encoded import Encoded
from raysim.data.errors import DataError
from raysim.data.sources.base import EncodedSource, Source
from raysim.store.atomic import creating, write_json
from raysim.store.documents import OPEN_SHAPE, DamagedFile, open_regular, read_json
from raysim.store.lock import alone
from raysim.version import __version__

FORM = 4  # of the files of a cache; those of another are made again

Size = Annotated[int, Field(ge=0)]


class About(TypedDict):
    """What `data.json` holds: what is known of the data set, and of the files beside it."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    name: str
    train_rows: int
    classes: list[str]
    scale: float
    mean: list[float]
    std: list[float]
    vocab: int | None
    words: list[str]
    task: str
    shape: list[Size]
    dtype: Annotated[str, Field(pattern=r"^[<>|][bfiu]\d+$")]
    digest: str  # of the data set
    files: dict[str, str]  # their SHA-256, by name
    sha256: str  # of all of this


class CacheError(DataError, OSError):
    """A cache cannot be made or read, which is its machine's fault."""


@dataclass(eq=False)
class Mapped:
    """Samples [n, ...] in a file that all processes of a machine map. A machine without the file makes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sha256: str
    """Of the file."""
    digest: str
    """Of the data set."""
    make: Callable[[], Dataset]
    """Makes the file, and a data set of it."""
    _array: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        if self._array is None:
            if self.file.exists():
                self._array = self.array()
            else:
                made = self.make()
                assert isinstance(made.x, Mapped)
                file = made.x.file  # in another folder where this machine's copy of the data has other times
                if made.digest != self.digest:
                    raise DataError(f"{file}: made here from other data than the run began with; copy those here")
                self.file, self._array = file, made.x._array
        assert self._array is not None
        return self._array[rows].copy() if isinstance(rows, slice) else self._array[rows]

    def array(self) -> np.ndarray:
        """All samples, mapped. Raises `CacheError` where the file is not what was written."""
        with _clearly(self.file.parent), _verified(self.file, self.sha256) as (content, size):
            start = size - math.prod(self.shape) * self.dtype.itemsize  # behind the header
            return np.memmap(content, self.dtype, "r", start, self.shape).view(np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        """Without the array: who gets this maps the file."""
        return self.__dict__ | {"_array": None}


def cached(source: Source, root: Path | None, cache: Path) -> Dataset:
    """The data set of `source`, in the folder below `cache` that is named for all that decides its bytes: the settings,
    where the files are looked for, their names, sizes and times, and the versions of what decodes them. Raises DataError."""
    place = str((root or Path.cwd()).resolve())
    read = [f"{type(source).__module__}.{source!r}", place, source.files(root), __version__, version("pillow"), FORM]
    folder = cache.absolute() / hashlib.sha256(json.dumps(read).encode()).hexdigest()[:32]
    with _clearly(folder):
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with alone(folder.with_name(f".{folder.name}.lock")):
                if not folder.is_dir():  # no other process has made it meanwhile
                    _make(source, root, folder)
        return _read(folder, partial(cached, source, root and root.absolute(), cache.absolute()))


@contextmanager
def _clearly(folder: Path) -> Iterator[None]:
    """Say what to do about an error of the files in `folder`."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise CacheError(
            f"data.cache: {folder} cannot be made or read ({error}); delete it, or leave data.cache out"
        ) from error


def _read(folder: Path, make: Callable[[], Dataset]) -> Dataset:
    path = folder / "data.json"
    about = read_json(path, About)
    if about["sha256"] != _digest(about) or not {"x.npy", "y.npy"} <= about["files"].keys():
        raise _changed(path)
    arrays = {name: _array(folder / name, sha256) for name, sha256 in about["files"].items() if name != "x.npy"}
    samples = Mapped(
        folder / "x.npy", tuple(about["shape"]), np.dtype(about["dtype"]), about["files"]["x.npy"], about["digest"], make
    )  # fmt: skip
    samples._array = samples.array()  # what is wrong with it shows before anything is started
    return Dataset(
        about["name"], samples, arrays["y.npy"], about["train_rows"], tuple(about["classes"]), arrays.get("client.npy"),
        about["scale"], tuple(about["mean"]), tuple(about["std"]), about["vocab"], about["task"], about["digest"],
        words=tuple(about["words"]),
    )  # fmt: skip


def _array(path: Path, sha256: str) -> np.ndarray:
    with _verified(path, sha256) as (file, _):
        array: np.ndarray = np.load(file)
    return array


@contextmanager
def _verified(path: Path, sha256: str) -> Iterator[tuple[BufferedReader, int]]:
    """A file that has this hash, and its bytes. Raises `DamagedFile` for another."""
    with open_regular(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise _changed(path)
        size = file.tell()
        file.seek(0)
        yield file, size


def _changed(path: Path) -> DamagedFile:
    return DamagedFile(f"{path} is not what was written")


def _digest(about: Mapping[str, Any]) -> str:
    hashed = {key: value for key, value in about.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


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
        files = {}
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                files[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        about = {
            "name": data.name, "train_rows": data.train_rows, "classes": data.classes, "scale": float(data.scale),
            "mean": [*map(float, data.mean)], "std": [*map(float, data.std)], "vocab": data.vocab,
            "words": data.words,
            "task": data.task if isinstance(data.task, str) else data.task.name,
            "shape": data.x.shape, "dtype": data.x.dtype.str, "digest": digest.hexdigest(), "files": files,
        }  # fmt: skip
        write_json(temporary / "data.json", about | {"sha256": _digest(about)})
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
