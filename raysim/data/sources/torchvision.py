"""MNIST and its kin, and CIFAR, through torchvision, which downloads them and checks their sums."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.pickles import read_arrays
from raysim.data.sources.base import PREPROCESSING, FileFacts, Normalise, Source, downloading, files_below


@dataclass(frozen=True)
class _Downloaded(Source):
    """A data set in its own folder, which torchvision fills."""

    name: ClassVar[str]
    folder: ClassVar[str]
    reader: ClassVar[str]  # the class of torchvision
    normalise: ClassVar[Normalise] = "half"
    download: bool = field(default=True, kw_only=True)
    """Whether to download the files if they are missing."""

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


class _Idx(_Downloaded):
    """Images 1×28×28 in MNIST's file format."""

    def load(self, root: Path | None) -> Dataset:
        return self._dataset(*self._images(root))

    def _dataset(self, x: np.ndarray, y: np.ndarray, train_rows: int, classes: tuple[str, ...]) -> Dataset:
        return Dataset(self.name, x, y, train_rows, classes, **PREPROCESSING[self.normalise])

    def _images(self, root: Path | None, **split: str) -> tuple[np.ndarray, np.ndarray, int, tuple[str, ...]]:
        """x [n, 1, 28, 28], y [n], train_rows and class names."""
        from torchvision import datasets

        root, make = root or Path("data"), getattr(datasets, self.reader)
        try:
            with downloading(root, self.reader):
                halves = [make(root, train=train, download=self.download, **split) for train in (True, False)]
        except Exception as error:  # broken files, a failed download and a full disk all arrive here
            raise DataError(
                f"{self.name}: torchvision cannot {'download or ' * self.download}read {root / self.reader} ({error}). Copy the "
                "files there; or, where there is a network, delete that folder and set download: true."
            ) from error
        x = np.concatenate([half.data.numpy() for half in halves])[:, None]
        y = np.concatenate([half.targets.numpy() for half in halves]).astype(np.int64)
        return x, y, len(halves[0].targets), tuple(halves[0].classes)


@dataclass(frozen=True)
class MNIST(_Idx):
    """Handwritten digits, 1×28×28, 10 classes, 60,000 / 10,000 (LeCun et al., 1998; torchvision)."""

    name, folder, reader = "mnist", "MNIST/raw", "MNIST"


@dataclass(frozen=True)
class FashionMNIST(_Idx):
    """Zalando articles, 1×28×28, 10 classes, 60,000 / 10,000 (Xiao et al., 2017; torchvision)."""

    name, folder, reader = "fashion_mnist", "FashionMNIST/raw", "FashionMNIST"
    normalise: ClassVar[Normalise] = "unit"


@dataclass(frozen=True)
class EMNIST(_Idx):
    """Handwritten characters, 1×28×28, up to 62 classes (Cohen et al., 2017; torchvision; stored transposed)."""

    name, folder, reader = "emnist", "EMNIST/raw", "EMNIST"
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "byclass"
    """Part of EMNIST, by its name in the paper."""

    def load(self, root: Path | None) -> Dataset:
        x, y, train_rows, classes = self._images(root, split=self.split)
        if self.split == "letters":  # torchvision numbers the letters from 1 and names class 0 "N/A"
            y, classes = y - 1, classes[1:]
        return replace(self._dataset(x, y, train_rows, classes), name=f"emnist_{self.split}")


class _Cifar(_Downloaded):
    """torchvision downloads the archive and knows its checksums; its reader would run whatever the pickles ask for."""

    def load(self, root: Path | None) -> Dataset:
        from torchvision import datasets
        from torchvision.datasets.utils import check_integrity, download_and_extract_archive

        root = root or Path("data")
        archive = getattr(datasets, self.reader)
        folder = root / archive.base_folder
        checksums = dict([*archive.train_list, *archive.test_list, (archive.meta["filename"], archive.meta["md5"])])

        def broken_file() -> str | None:
            return next((file for file, md5 in checksums.items() if not check_integrity(str(folder / file), md5)), None)

        if self.download and broken_file():
            try:
                with downloading(root, self.reader):
                    if broken_file():  # another process may have downloaded it meanwhile
                        download_and_extract_archive(
                            archive.url, str(root), filename=archive.filename, md5=archive.tgz_md5
                        )
            except Exception as error:  # no network, a full disk, a changed archive
                raise DataError(
                    f"{self.name}: cannot download {archive.url} ({error}); unpack the archive in {root} yourself"
                ) from error
        if file := broken_file():
            raise DataError(
                f"{folder / file}: missing, or its checksum is wrong; delete {folder} and set download: true"
            )

        def read(files: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
            batches = [read_arrays(folder / file) for file, _ in files]
            x = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
            labels = [batch["labels"] if "labels" in batch else batch["fine_labels"] for batch in batches]
            return x, np.concatenate(labels).astype(np.int64)

        (x_train, y_train), (x_test, y_test) = read(archive.train_list), read(archive.test_list)
        classes = tuple(read_arrays(folder / archive.meta["filename"])[archive.meta["key"]])
        x, y = np.concatenate([x_train, x_test]), np.concatenate([y_train, y_test])
        return Dataset(self.name, x, y, len(y_train), classes, **PREPROCESSING[self.normalise])


@dataclass(frozen=True)
class CIFAR10(_Cifar):
    """Colour photographs, 3×32×32, 10 classes, 50,000 / 10,000 (Krizhevsky, 2009; torchvision)."""

    name, folder, reader = "cifar10", "cifar-10-batches-py", "CIFAR10"


@dataclass(frozen=True)
class CIFAR100(_Cifar):
    """Colour photographs, 3×32×32, 100 classes, 50,000 / 10,000 (Krizhevsky, 2009; torchvision)."""

    name, folder, reader = "cifar100", "cifar-100-python", "CIFAR100"
