"""NumPy archives."""

import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, FileFacts, Normalise, Source, class_names, files_below, located


@dataclass(frozen=True)
class Npz(Source):
    """NumPy archive: x_train and y_train (or x and y) and, optionally, x_test, y_test, client_train, client_test."""

    path: str
    """The .npz file."""
    task: Literal["classification", "multilabel", "regression"] = "classification"
    """What y holds: integers [n], the classes; 0 and 1 [n, L], which of L labels a sample has; numbers [n] or [n, F],
    targets."""
    classes: int | None = None
    """Number of classes; needed where a class has no training row."""
    normalise: Normalise = "half"
    """Range of the pixels as the model sees them: half is [-1, 1], unit is [0, 1]; floating-point features are
    taken as they are."""

    def check(self, root: Path | None) -> str | None:
        file = located(self.path, root)
        return None if file.is_file() else f"npz: the file {file} is missing; put it there or correct the path."

    def files(self, root: Path | None) -> list[FileFacts]:
        return files_below(located(self.path, root))

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        file = located(self.path, root)
        try:
            _check_sizes(file)
            with np.load(file, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
            if any(not isinstance(array, np.ndarray) for array in arrays.values()):
                raise ValueError("a member is not an array")
        except Exception as error:  # zipfile, NumPy and the file system each have their own errors
            raise DataError(f"{file}: not a readable .npz archive of plain arrays ({error}); save it again") from error
        for short in ("x", "y", "client"):
            if short in arrays:
                arrays.setdefault(f"{short}_train", arrays.pop(short))
        if "x_train" not in arrays or "y_train" not in arrays:
            raise DataError(f"{file}: holds {', '.join(arrays) or 'nothing'}; it needs x_train and y_train, or x and y")

        splits = [split for split in ("train", "test") if f"x_{split}" in arrays]
        x = [self._samples(file, f"x_{split}", arrays) for split in splits]
        y, classes = self._labels(file, arrays, {split: len(part) for split, part in zip(splits, x, strict=True)})
        client = None
        if "client_train" in arrays:
            arrays.setdefault("client_test", np.full(sum(map(len, x[1:])), -1))
            client = np.concatenate(
                [self._numbers(file, f"client_{split}", arrays, len(p)) for split, p in zip(splits, x, strict=True)]
            )
        if len({(part.shape[1:], part.dtype) for part in x}) > 1:
            raise DataError(f"{file}: x_test {x[1].shape} {x[1].dtype} is unlike x_train {x[0].shape} {x[0].dtype}")
        preprocessing = PREPROCESSING[self.normalise] if x[0].dtype == np.uint8 else {}
        samples = np.concatenate(x)
        return Dataset(file.stem, samples, y, len(x[0]), classes, client, task=self.task, **preprocessing)

    @staticmethod
    def _samples(file: Path, key: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
        x = arrays[key]
        if x.size == 0:
            raise DataError(f"{file}: {key} is empty; save it again with its samples")
        if x.dtype == np.uint8 and x.ndim in (3, 4):
            if x.ndim == 3:
                return np.ascontiguousarray(x[:, None])
            channels_last = x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)  # as Keras saves images
            return np.ascontiguousarray(np.moveaxis(x, 3, 1) if channels_last else x)
        if np.issubdtype(x.dtype, np.floating) and x.ndim >= 2:
            with np.errstate(over="ignore"):
                samples = np.ascontiguousarray(x, np.float32)
            finite = np.isfinite(samples).reshape(len(x), -1).all(1)  # as float32, which is what models take
            if not finite.all():
                raise DataError(
                    f"{file}: {key} row {int(np.argmin(finite))} holds NaN, infinity or a number beyond float32's "
                    "3.4e38; repair the row"
                )
            return samples
        raise DataError(
            f"{file}: {key} is {x.dtype} {x.shape}; it must be uint8 images [n, H, W], [n, C, H, W] or [n, H, W, C], "
            "or floating-point features [n, F]"
        )

    def _labels(
        self, file: Path, arrays: dict[str, np.ndarray], sizes: dict[str, int]
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """All of y, training rows first, and the names of a model's outputs."""
        if self.task == "classification":
            y = [self._numbers(file, f"y_{split}", arrays, size) for split, size in sizes.items()]
            named = [(f"{file} y_{split}", part) for split, part in zip(sizes, y, strict=True)]
            return np.concatenate(y), class_names(named[:1], named[1:], count=self.classes)
        if self.classes is not None:
            raise DataError(f"{file}: {self.task} has as many outputs as y has columns; leave `classes` out")
        y = [self._columns(file, f"y_{split}", arrays, size) for split, size in sizes.items()]
        return np.concatenate(y), tuple(str(column) for column in range(y[0].shape[1]))

    def _columns(self, file: Path, key: str, arrays: dict[str, np.ndarray], n: int) -> np.ndarray:
        """Labels or targets [n, columns] float32."""
        y = _member(file, key, arrays)
        if self.task == "multilabel":
            fits, words = y.ndim == 2 and y.dtype.kind in "bui" and bool(np.isin(y, (0, 1)).all()), "0 and 1 [n, L]"
        else:
            fits, words = y.ndim in (1, 2) and y.dtype.kind in "fui", "numbers [n] or [n, F]"
        if not (fits and y.size and len(y) == n and y.shape[1:] == arrays["y_train"].shape[1:]):
            raise DataError(
                f"{file}: {key} is {y.dtype} {y.shape}; {self.task} needs {words}, n = {n}, in the columns of y_train"
            )
        with np.errstate(over="ignore"):  # `Dataset` refuses what float32 does not hold
            return y.reshape(n, -1).astype(np.float32)

    @staticmethod
    def _numbers(file: Path, key: str, arrays: dict[str, np.ndarray], n: int) -> np.ndarray:
        """Classes or clients [n] int64."""
        numbers = _member(file, key, arrays)
        if numbers.shape != (n,) or not np.issubdtype(numbers.dtype, np.integer):
            other = "; for labels or targets set `task`" if key.startswith("y_") else ""
            raise DataError(
                f"{file}: {key} is {numbers.dtype} {numbers.shape}; it must be {n} integers, one a row{other}"
            )
        return numbers.astype(np.int64)


def _member(file: Path, key: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    if key not in arrays:
        raise DataError(f"{file}: holds no {key}; it has {', '.join(arrays)}")
    return arrays[key]


def _check_sizes(file: Path) -> None:
    """Raise where the arrays, as the archive and their own headers declare them, are larger than the machine's memory, or
    larger than what the archive holds of them. Nothing is unpacked."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > memory:
            raise ValueError(f"its arrays need more than this machine's {memory:,} bytes of memory")
        for member in archive.infolist():
            with archive.open(member) as content:
                version = np.lib.format.read_magic(content)
                read = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }.get(version)
                if read is None:
                    raise ValueError(f"{member.filename} has a format that raysim does not read, {version}")
                shape, _, dtype = read(content)
                if min(shape, default=0) < 0 or math.prod(shape) * max(1, dtype.itemsize) > member.file_size:
                    raise ValueError(f"{member.filename} is shorter than its shape {shape}")
