"""NumPy archives."""

import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from raysim.core.bounds import Count
from raysim.data.arrays import Reading, Split, assemble
from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.sources.base import FileFacts, Normalise, Source, files_below, located, warn_of_left_out


@dataclass(frozen=True)
class Npz(Source):
    """NumPy archive: x_train and y_train (or x and y) and, optionally, x_test, y_test, client_train, client_test."""

    path: str
    """The .npz file."""
    task: Literal["classification", "multilabel", "regression"] = "classification"
    """What y holds: integers [n], the classes; 0 and 1 [n, L], which of L labels a sample has; numbers [n] or [n, F],
    targets."""
    classes: Count | None = None
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

        others = [key[2:] for key in arrays if key.startswith("x_") and key not in ("x_train", "x_test")]
        warn_of_left_out(file.stem, others, "test" if "x_test" in arrays else None)
        splits = [
            Split(split, arrays[f"x_{split}"], _member(file, f"y_{split}", arrays), arrays.get(f"client_{split}"))
            for split in ("train", "test")
            if f"x_{split}" in arrays
        ]
        reading = Reading(task=self.task, classes=self.classes, normalise=self.normalise)
        return assemble(str(file), file.stem, splits, reading)


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
