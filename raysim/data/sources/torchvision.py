"""MNIST and its kin, and CIFAR, through torchvision, which downloads them and checks their sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.pickles import read_arrays
from raysim.data.sources.base import PREPROCESSING, FileFacts, Source, files_below


def _idx_images(
    name: str, reader: str, root: Path | None, download: bool, **split: str
) -> tuple[np.ndarray, np.ndarray, int, tuple[str, ...]]:
    """x [n, 1, 28, 28], y [n], train_rows and class names of a data set in MNIST's file format."""
    from torchvision import datasets

    root = root or Path("data")
    try:
        halves = [getattr(datasets, reader)(root, train=train, download=download, **split) for train in (True, False)]
    except Exception as error:  # broken files, a failed download and a full disk all arrive here
        raise DataError(
            f"{name}: torchvision cannot {'download or ' * download}read {root / reader} ({error}). Copy the files there; or, "
            "where there is a network, delete that folder and set download: true."
        ) from error
    x = np.concatenate([half.data.numpy() for half in halves])[:, None]
    y = np.concatenate([half.targets.numpy() for half in halves]).astype(np.int64)
    return x, y, len(halves[0].targets), tuple(halves[0].classes)


class _Downloaded(Source):
    """A data set in a folder of its own, which torchvision fills."""

    name: ClassVar[str]
    folder: ClassVar[str]
    download: bool

    def check(self, root: Path | None) -> str | None:
        if find_spec("torchvision") is None:
            return f"{self.name} needs the package torchvision; install it."
        if not self.download and not self._place(root).is_dir():
            return (
                f"{self.name}: the folder {self._place(root)} is missing; set download: true or copy the files there."
            )
        return None

    def fetch(self, root: Path | None) -> None:
        if not self._place(root).is_dir():
            self.load(root)

    def files(self, root: Path | None) -> Sequence[FileFacts]:
        return files_below(self._place(root))

    def _place(self, root: Path | None) -> Path:
        return (root or Path("data")) / self.folder


@dataclass(frozen=True)
class MNIST(_Downloaded):
    """Handwritten digits, 1×28×28, 10 classes, 60,000 / 10,000 (LeCun et al., 1998; torchvision)."""

    name, folder = "mnist", "MNIST/raw"

    download: bool = True
    """Whether to download the files if they are missing."""

    def load(self, root: Path | None) -> Dataset:
        x, y, train_rows, classes = _idx_images("mnist", "MNIST", root, self.download)
        return Dataset("mnist", x, y, train_rows, classes, **PREPROCESSING["half"])


@dataclass(frozen=True)
class FashionMNIST(_Downloaded):
    """Zalando articles, 1×28×28, 10 classes, 60,000 / 10,000 (Xiao et al., 2017; torchvision)."""

    name, folder = "fashion_mnist", "FashionMNIST/raw"

    download: bool = True
    """Whether to download the files if they are missing."""

    def load(self, root: Path | None) -> Dataset:
        x, y, train_rows, classes = _idx_images("fashion_mnist", "FashionMNIST", root, self.download)
        return Dataset("fashion_mnist", x, y, train_rows, classes, **PREPROCESSING["unit"])


@dataclass(frozen=True)
class EMNIST(_Downloaded):
    """Handwritten characters, 1×28×28, up to 62 classes (Cohen et al., 2017; torchvision; stored transposed)."""

    name, folder = "emnist", "EMNIST/raw"

    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "byclass"
    """Part of EMNIST, by its name in the paper."""
    download: bool = True
    """Whether to download the files if they are missing."""

    def load(self, root: Path | None) -> Dataset:
        x, y, train_rows, classes = _idx_images("emnist", "EMNIST", root, self.download, split=self.split)
        if self.split == "letters":  # torchvision numbers the letters from 1 and names class 0 "N/A"
            y, classes = y - 1, classes[1:]
        return Dataset(f"emnist_{self.split}", x, y, train_rows, classes, **PREPROCESSING["half"])


def _cifar(name: str, reader: str, root: Path | None, download: bool) -> Dataset:
    """torchvision downloads the archive and knows its checksums; its reader would run whatever the pickles ask for."""
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity, download_and_extract_archive

    root = root or Path("data")
    archive = getattr(datasets, reader)
    folder = root / archive.base_folder
    checksums = dict([*archive.train_list, *archive.test_list, (archive.meta["filename"], archive.meta["md5"])])

    def broken_file() -> str | None:
        return next((file for file, md5 in checksums.items() if not check_integrity(str(folder / file), md5)), None)

    if download and broken_file():
        try:
            download_and_extract_archive(archive.url, str(root), filename=archive.filename, md5=archive.tgz_md5)
        except Exception as error:  # no network, a full disk, a changed archive
            raise DataError(
                f"{name}: cannot download {archive.url} ({error}); unpack the archive in {root} yourself"
            ) from error
    if file := broken_file():
        raise DataError(f"{folder / file}: missing, or its checksum is wrong; delete {folder} and set download: true")

    def read(files: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        batches = [read_arrays(folder / file) for file, _ in files]
        x = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        labels = [batch["labels"] if "labels" in batch else batch["fine_labels"] for batch in batches]
        return x, np.concatenate(labels).astype(np.int64)

    (x_train, y_train), (x_test, y_test) = read(archive.train_list), read(archive.test_list)
    classes = tuple(read_arrays(folder / archive.meta["filename"])[archive.meta["key"]])
    x, y = np.concatenate([x_train, x_test]), np.concatenate([y_train, y_test])
    return Dataset(name, x, y, len(y_train), classes, **PREPROCESSING["half"])


@dataclass(frozen=True)
class CIFAR10(_Downloaded):
    """Colour photographs, 3×32×32, 10 classes, 50,000 / 10,000 (Krizhevsky, 2009; torchvision)."""

    name, folder = "cifar10", "cifar-10-batches-py"

    download: bool = True
    """Whether to download the files if they are missing."""

    def load(self, root: Path | None) -> Dataset:
        return _cifar("cifar10", "CIFAR10", root, self.download)


@dataclass(frozen=True)
class CIFAR100(_Downloaded):
    """Colour photographs, 3×32×32, 100 classes, 50,000 / 10,000 (Krizhevsky, 2009; torchvision)."""

    name, folder = "cifar100", "cifar-100-python"

    download: bool = True
    """Whether to download the files if they are missing."""

    def load(self, root: Path | None) -> Dataset:
        return _cifar("cifar100", "CIFAR100", root, self.download)
