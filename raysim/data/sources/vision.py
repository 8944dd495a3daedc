"""Image data sets of torchvision, by their names there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.decode import ImageDecoder
from raysim.data.encoded import BATCH, Batch, Encoded
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, FileFacts, Pictures, downloading, files_below

# Classes that give an image and a class, and whose readers run no pickle: one of LSUN's index would run whatever it asks for.
KNOWN = {
    "Caltech101", "Caltech256", "CLEVRClassification", "Country211", "DTD", "EMNIST", "EuroSAT",
    "FashionMNIST", "FER2013", "FGVCAircraft", "Flowers102", "Food101", "GTSRB", "Imagenette", "ImageNet",
    "INaturalist", "KMNIST", "LFWPeople", "MNIST", "Omniglot", "OxfordIIITPet", "PCAM", "Places365", "QMNIST",
    "RenderedSST2", "SEMEION", "StanfordCars", "STL10", "SUN397", "SVHN", "USPS",
}  # fmt: skip
OWN_READER = {"CIFAR10": "cifar10", "CIFAR100": "cifar100"}  # torchvision's would run what their pickles ask for
TRAINING = {"OxfordIIITPet": "trainval", "Places365": "train-standard"}  # names of splits, where that is not train
LABELS = ("targets", "labels", "_labels")  # where the data sets of torchvision keep them


@dataclass(frozen=True)
class Torchvision(Pictures):
    """A data set of torchvision with an image and a class for each sample, by its name there, such as SVHN or Flowers102."""

    name: str
    """The class in torchvision.datasets."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of that class, such as {split: balanced} or {version: 2021_train_mini}."""
    download: bool = True
    """Whether to download the files if they are missing, where torchvision can."""

    def check(self, root: Path | None) -> str | None:
        from torchvision import datasets

        if self.name in OWN_READER:
            return f"torchvision: raysim reads {self.name} itself; write data.name: {OWN_READER[self.name]}."
        if self.name not in KNOWN or not hasattr(datasets, self.name):
            return (
                f"torchvision: {self.name!r} is none of the data sets that raysim takes from there: "
                f"{', '.join(sorted(KNOWN))}. Any other goes through @raysim.dataset()."
            )
        if "root" in self.options:
            return "torchvision: root is no option; set data.root to the folder of the files."
        return None

    def fetch(self, root: Path | None) -> None:
        if not self.files(root):
            self.open(root)

    def files(self, root: Path | None) -> Sequence[FileFacts]:
        return files_below(self.folder(root))

    def folder(self, root: Path | None) -> Path:
        """Of this data set's files. It is all of `root` where torchvision's class does not say in which folder they are."""
        from torchvision import datasets

        kind = getattr(datasets, self.name, None)
        own = self.name if hasattr(kind, "raw_folder") else getattr(kind, "base_folder", "")
        return (root or Path("data")) / own

    def open(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        root = (root or Path("data")).absolute()
        with downloading(root, self.name):
            train, test = self._splits(root)
        parts = [train] if test is None else [train, test]
        samples = Samples(self.name, parts)
        ((_, ((place, first),)),) = samples.batches(np.arange(1))
        decode = ImageDecoder.like(place, first, self.mode, self.resize)
        y = np.concatenate([self._labels(part) for part in parts])
        names = getattr(train, "classes", None) or range(int(y.max()) + 1)
        classes = tuple(str(name) for name in names)
        return Dataset(
            self.name.lower(), Encoded(samples, decode), y, len(train), classes, **PREPROCESSING[self.normalise]
        )

    def _splits(self, root: Path) -> tuple[Any, Any]:
        """The training and the test split; None where there is but one."""
        from torchvision import datasets

        make = getattr(datasets, self.name)
        known = _parameters(make)
        arguments = (
            {"root": str(root)} | ({"download": True} if self.download and "download" in known else {}) | self.options
        )
        try:
            if "train" in known and "train" not in self.options:
                return make(train=True, **arguments), make(train=False, **arguments)
            if "split" in known and "split" not in self.options:
                train = make(split=TRAINING.get(self.name, "train"), **arguments)
                return train, _first_labelled(partial(make, **arguments), "test", "val", "valid")
            return make(**arguments), None
        except Exception as error:  # broken files, wrong options, a failed download and a full disk all arrive here
            raise DataError(
                f"torchvision: {self.name} cannot be made with {arguments} ({error}). Correct the options, or copy its files "
                "to data.root"
            ) from error

    def _labels(self, part: Any) -> np.ndarray:
        """[n] int64, as the data set keeps them or, where it does not, as its samples say."""
        kept = (np.asarray(getattr(part, name, None)) for name in LABELS)
        labels = next((found for found in kept if found.shape == (len(part),)), None)
        if labels is None:
            labels = np.asarray([part[i][1] for i in range(len(part))])
        if labels.shape != (len(part),) or labels.dtype.kind not in "iu":
            raise DataError(f"torchvision: {self.name} has no single class for each sample; choose another data set")
        return labels.astype(np.int64)


def _parameters(make: type) -> set[str]:
    """What the class takes, and what it passes on by name to those that it inherits from, as EMNIST does to MNIST."""
    known: set[str] = set()
    for kind in make.__mro__:
        parameters = inspect.signature(kind).parameters
        known |= parameters.keys()
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return known


def _first_labelled(make: Callable[..., Any], *splits: str) -> Any:
    """The first of the `splits` that there is and has labels; None where there is none."""
    for split in splits:
        try:
            part = make(split=split)
        except ValueError:  # of a name that it does not know
            continue
        if len(part) and part[0][1] is not None:
            return part
    return None


@dataclass(eq=False)
class Samples:
    """The samples of the splits, one after the other."""

    name: str
    parts: Sequence[Any]
    held_bytes: int = 0  # nothing is held: a sample is read by itself

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def reach(self, rows: np.ndarray) -> int:
        return len(rows)

    def batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Batch]]:
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH].tolist()
            batch = [(f"{self.name} row {row}", partial(self._image, row)) for row in part]
            yield np.arange(start, start + len(part)), batch

    def _image(self, row: int) -> Any:
        first = len(self.parts[0])
        return self.parts[0][row][0] if row < first else self.parts[1][row - first][0]
