"""What every source has, and what several of them share."""

import hashlib
import os
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.decode import Mode, Size
from raysim.data.encoded import Encoded
from raysim.data.errors import DataError
from raysim.store.lock import alone

Normalise = Literal["half", "unit"]

FileFacts = tuple[str, int, int]  # name, size in bytes, time of the last change in nanoseconds

# How uint8 pixels become the model's input. half: (x / 255 - 0.5) / 0.5, in [-1, 1]; unit: x / 255, in [0, 1].
PREPROCESSING: dict[Normalise, dict[str, Any]] = {
    "half": {"scale": 255.0, "mean": (0.5,), "std": (0.5,)},
    "unit": {"scale": 255.0},
}


MOST_CLASSES = 1_000_000


class Source(ABC):
    """Where a data set comes from. Subclasses are frozen dataclasses of settings.

    `root` is the folder of all data sets; None means that each source uses its own default.
    """

    def check(self, root: Path | None) -> str | None:
        """What is missing, in a sentence that says what to do, or None. Nothing is decoded."""
        return None

    def files(self, root: Path | None) -> Sequence[FileFacts]:
        """What changes when the files that are read change; empty where a source reads none or cannot say. Then
        its data are not cached."""
        return ()

    def fetch(self, root: Path | None) -> None:  # noqa: B027 - most have nothing to fetch
        """Download what is absent, once for all runs that will read it. Raises DataError."""

    @abstractmethod
    def load(self, root: Path | None) -> Dataset:
        """Read the data set. Raises DataError with the file and the row that is wrong."""


class EncodedSource(Source):
    """A source whose samples lie encoded in files, from which single ones can be read."""

    @abstractmethod
    def open(self, root: Path | None) -> Dataset:
        """The data set with all that is known without decoding; its samples are `Encoded`. Raises as `load`."""

    def load(self, root: Path | None) -> Dataset:
        data = self.open(root)
        assert isinstance(data.x, Encoded)
        return replace(data, x=data.x.whole())


@dataclass(frozen=True)
class Pictures(EncodedSource):
    """A source of encoded images."""

    normalise: Normalise = field(default="half", kw_only=True)
    """Range of the pixels as the model sees them: half is [-1, 1], unit is [0, 1]."""
    mode: Mode | None = field(default=None, kw_only=True)
    """Pillow mode that every image is converted to; null refuses a mix of grey and colour."""
    resize: Size | None = field(default=None, kw_only=True)
    """Height and width in pixels that every image is scaled to, bilinearly and whatever its proportions; null refuses
    unequal sizes."""


def downloading(root: Path, name: str) -> AbstractContextManager[None]:
    """While this lasts, no other process of this user on this machine downloads the data `name` into `root`: what one has begun to
    write has its last name already, and another would read it."""
    place = hashlib.sha256(os.fsencode(root.absolute() / name)).hexdigest()[:16]
    return alone(Path(tempfile.gettempdir(), f".raysim-download-{os.geteuid()}-{place}.lock"))


def files_below(path: Path) -> list[FileFacts]:
    """Of the file `path`, or of all files in that folder and below it; of none where there is none."""
    if path.is_file():
        return [facts(path, path.parent)]
    found = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    return sorted(facts(file, path) for file in found if file.is_file())


def facts(file: Path, folder: Path) -> FileFacts:
    """Of a file in or below `folder`."""
    about = file.stat()
    return str(file.relative_to(folder)), about.st_size, about.st_mtime_ns


def located(path: str, root: Path | None) -> Path:
    """`path` under `root` where it exists there, else relative to the working directory."""
    if root is not None and (root / path).exists():
        return root / path
    return Path(path)


def warn_of_left_out(name: str, splits: Sequence[str], test: str | None) -> None:
    """Warn of the `splits` of the data `name` that are neither its training samples nor the test, which `test` is."""
    if splits:
        warnings.warn(
            f"{name}: {', '.join(splits)} is left out: raysim trains on train and tests on {test or 'nothing'}. "
            "data.client_val_frac holds out validation samples of each client.",
            stacklevel=3,
        )


def class_names(
    train: Sequence[tuple[str, np.ndarray]],
    test: Sequence[tuple[str, np.ndarray]],
    names: Sequence[str] | None = None,
    count: int | None = None,
) -> tuple[str, ...]:
    """Names of the classes of (file, labels) pairs: the given names, or the numbers 0..C-1.

    Without names and without a count, the training split decides. It must then hold every class, because a single
    stray label would otherwise pass for thousands of classes. Raises DataError with file and row of a wrong label.
    """
    if count is not None and not 0 < count <= MOST_CLASSES:
        raise DataError(f"classes is {count}; set it to their number, from 1 to {MOST_CLASSES:,}")
    for file, labels in (*train, *test):
        if (labels < 0).any():
            row = int(np.argmax(labels < 0))
            raise DataError(f"{file}: row {row} has label {labels[row]}; classes are numbered from 0")
    if names is not None:
        classes, way_out = tuple(names), f"but there are {len(names)} classes; correct it"
    elif count is not None:
        classes = tuple(str(c) for c in range(count))
        way_out = f"but there are {count} classes; correct it or set `classes` to their number"
    else:
        seen = np.unique(np.concatenate([labels for _, labels in train]))
        gap = int(np.argmin(np.append(seen == np.arange(len(seen)), False)))
        classes = tuple(str(c) for c in range(gap))
        way_out = f"and no training row has label {gap}: number the classes from 0 without gaps, or set `classes`"
    for file, labels in (*train, *test):
        if (labels >= len(classes)).any():
            row = int(np.argmax(labels >= len(classes)))
            raise DataError(f"{file}: row {row} has label {labels[row]}, {way_out}")
    return classes


def renumbered(
    place: str, y: np.ndarray, classes: Sequence[str] | None, names: Sequence[str] | None
) -> np.ndarray:  # fmt: skip
    """Numbers [n] of `classes` as those of the training's `names`. Raises DataError for a class that is none of them."""
    if not classes or not names or [*classes] == [*names]:
        return y
    class_names([(place, y)], [], classes)  # whose numbers they are
    number = {name: i for i, name in enumerate(names)}
    numbers: np.ndarray = np.array([number.get(name, -1) for name in classes])[y]
    if (numbers < 0).any():
        row = int(np.argmax(numbers < 0))
        raise DataError(f"{place} row {row} is {classes[y[row]]!r}, which is no class of the training samples")
    return numbers
