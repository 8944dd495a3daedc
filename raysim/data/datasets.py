"""One in-memory data set type, and the sources it is read from."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raysim.data.errors import DataError
from raysim.data.images import Mode, decode_images
from raysim.data.pickles import read_arrays
from raysim.data.text import build_vocabulary, encode

if TYPE_CHECKING:
    import pyarrow
    import torch

Normalise = Literal["half", "unit"]

# half: (x / 255 - 0.5) / 0.5, in [-1, 1]; unit: x / 255, in [0, 1]
_PREPROCESSING: dict[str, dict[str, Any]] = {
    "half": {"scale": 255.0, "mean": (0.5,), "std": (0.5,)},
    "unit": {"scale": 255.0},
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples as contiguous arrays, decoded once per node, then only read. Raises DataError if they do not fit."""

    name: str
    x: np.ndarray  # [n, C, H, W] uint8 images | [n, T] int32 tokens | [n, F] float32 features; train rows first
    y: np.ndarray  # [n] int64
    train_rows: int  # rows [0, train_rows) are the training split, the others the test split
    classes: tuple[str, ...]
    client: np.ndarray | None = None  # [n] int64 natural client of each row, -1 where a row has none
    scale: float = 1.0  # the model's input is (x / scale - mean) / std, per channel; tokens go in as they are
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    vocab: int | None = None  # number of token ids, for text

    def __post_init__(self) -> None:
        n = len(self.x)
        if not self.x.flags.c_contiguous:
            raise DataError(f"{self.name}: x is not C-contiguous; pass it through numpy.ascontiguousarray")
        if self.y.shape != (n,) or (self.client is not None and self.client.shape != (n,)):
            raise DataError(f"{self.name}: {n} samples need {n} labels, and as many clients where there are any")
        if not 0 < self.train_rows <= n:
            raise DataError(
                f"{self.name}: {self.train_rows} training rows of {n}; at least one row must be for training"
            )
        wrong = np.flatnonzero((self.y < 0) | (self.y >= self.num_classes))
        if wrong.size:
            raise DataError(
                f"{self.name}: row {wrong[0]} has label {self.y[wrong[0]]}, outside 0..{self.num_classes - 1}; "
                "number the classes from 0"
            )

    def sha256(self) -> str:
        """Of all samples and labels."""
        digest = hashlib.sha256(repr((self.x.shape, self.x.dtype.str, self.train_rows)).encode())
        digest.update(self.x.data)
        digest.update(np.ascontiguousarray(self.y).data)
        return digest.hexdigest()

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.x.shape[1:]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def is_text(self) -> bool:
        return self.vocab is not None

    def transform(self, x: "torch.Tensor") -> "torch.Tensor":
        """Rows of `x` [B, ...], on any device, to the model's input: float32 of the same shape, or int64 tokens."""
        if self.is_text:
            return x.long()
        x = x / self.scale if self.scale != 1 else x.float()
        # In place, and in the order of torchvision's ToTensor and Normalize: the bits agree.
        for values, neutral, change in ((self.mean, 0, x.sub_), (self.std, 1, x.div_)):
            if len(values) == 1:
                if values[0] != neutral:
                    change(values[0])
            else:
                change(x.new_tensor(values).view((-1,) + (1,) * (x.dim() - 2)))
        return x


# A source is a frozen dataclass of settings with two methods: `load(root)` returns the Dataset, and `check(root)`
# says in a sentence what is missing, or None, without decoding anything. `root` is the folder of all data sets.


def _located(path: str, root: Path | None) -> Path:
    """`path` under `root` where it exists there, else relative to the working directory."""
    if root is not None and (root / path).exists():
        return root / path
    return Path(path)


def _class_names(
    train: Sequence[tuple[str, np.ndarray]],
    test: Sequence[tuple[str, np.ndarray]],
    names: Sequence[str] | None = None,
    count: int | None = None,
) -> tuple[str, ...]:
    """Names of the classes of (file, labels) pairs: the given names, or the numbers 0..C-1.

    Without names and without a count, the training split decides, and must then hold every class: a single stray label
    would otherwise pass for thousands of classes. Raises DataError naming file and row of a label that does not fit.
    """
    for file, labels in (*train, *test):
        if (labels < 0).any():
            row = int(np.argmax(labels < 0))
            raise DataError(f"{file}: row {row} has label {labels[row]}; classes are numbered from 0")
    if names is not None:
        classes, way_out = tuple(names), "correct it"
    elif count is not None:
        classes, way_out = tuple(str(c) for c in range(count)), "correct it or set `classes` to their number"
    else:
        seen = np.unique(np.concatenate([labels for _, labels in train]))
        gap = int(np.argmin(np.append(seen == np.arange(len(seen)), False)))
        classes = tuple(str(c) for c in range(gap))
        way_out = f"no training row has label {gap}: number the classes from 0 without gaps, or set `classes`"
    for file, labels in (*train, *test):
        if (labels >= len(classes)).any():
            row = int(np.argmax(labels >= len(classes)))
            raise DataError(
                f"{file}: row {row} has label {labels[row]}, but there are {len(classes)} classes; {way_out}"
            )
    return classes


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


def _check_torchvision(name: str, folder: Path, download: bool) -> str | None:
    if find_spec("torchvision") is None:
        return f"{name} needs the package torchvision; install it."
    if not download and not folder.is_dir():
        return f"{name}: the folder {folder} is missing; set download: true or copy the files there."
    return None


@dataclass(frozen=True)
class MNIST:
    """Handwritten digits, 1×28×28, 10 classes, 60,000 / 10,000 (LeCun et al., 1998; torchvision)."""

    download: bool = True

    def check(self, root: Path | None) -> str | None:
        return _check_torchvision("mnist", (root or Path("data")) / "MNIST" / "raw", self.download)

    def load(self, root: Path | None) -> Dataset:
        x, y, train_rows, classes = _idx_images("mnist", "MNIST", root, self.download)
        return Dataset("mnist", x, y, train_rows, classes, **_PREPROCESSING["half"])


@dataclass(frozen=True)
class FashionMNIST:
    """Zalando articles, 1×28×28, 10 classes, 60,000 / 10,000 (Xiao et al., 2017; torchvision)."""

    download: bool = True

    def check(self, root: Path | None) -> str | None:
        return _check_torchvision("fashion_mnist", (root or Path("data")) / "FashionMNIST" / "raw", self.download)

    def load(self, root: Path | None) -> Dataset:
        x, y, train_rows, classes = _idx_images("fashion_mnist", "FashionMNIST", root, self.download)
        return Dataset("fashion_mnist", x, y, train_rows, classes, **_PREPROCESSING["unit"])


@dataclass(frozen=True)
class EMNIST:
    """Handwritten characters, 1×28×28, up to 62 classes (Cohen et al., 2017; torchvision; stored transposed)."""

    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "byclass"
    download: bool = True

    def check(self, root: Path | None) -> str | None:
        return _check_torchvision("emnist", (root or Path("data")) / "EMNIST" / "raw", self.download)

    def load(self, root: Path | None) -> Dataset:
        x, y, train_rows, classes = _idx_images("emnist", "EMNIST", root, self.download, split=self.split)
        if self.split == "letters":  # torchvision numbers the letters from 1 and names class 0 "N/A"
            y, classes = y - 1, classes[1:]
        return Dataset(f"emnist_{self.split}", x, y, train_rows, classes, **_PREPROCESSING["half"])


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
    return Dataset(name, x, y, len(y_train), classes, **_PREPROCESSING["half"])


@dataclass(frozen=True)
class CIFAR10:
    """Colour photographs, 3×32×32, 10 classes, 50,000 / 10,000 (Krizhevsky, 2009; torchvision)."""

    download: bool = True

    def check(self, root: Path | None) -> str | None:
        return _check_torchvision("cifar10", (root or Path("data")) / "cifar-10-batches-py", self.download)

    def load(self, root: Path | None) -> Dataset:
        return _cifar("cifar10", "CIFAR10", root, self.download)


@dataclass(frozen=True)
class CIFAR100:
    """Colour photographs, 3×32×32, 100 classes, 50,000 / 10,000 (Krizhevsky, 2009; torchvision)."""

    download: bool = True

    def check(self, root: Path | None) -> str | None:
        return _check_torchvision("cifar100", (root or Path("data")) / "cifar-100-python", self.download)

    def load(self, root: Path | None) -> Dataset:
        return _cifar("cifar100", "CIFAR100", root, self.download)


@dataclass(frozen=True)
class Parquet:
    """Parquet folder in the Hugging Face layout: images or texts, labels and, optionally, natural clients."""

    path: str  # folder of train*.parquet and test*.parquet (or valid*, val*), or whose folder data/ holds them
    label: str = "label"  # the column of class numbers
    client: str = "client"  # the column of natural clients (numbers or words); ignored where the training files lack it
    classes: int | None = None  # for files without class names, in which a class has no training row
    normalise: Normalise = "half"
    mode: Mode | None = None  # convert every image; null refuses a mix of grey and colour
    length: int = 200  # tokens of a text
    max_vocab: int | None = 32_000  # with the 3 special tokens; null: every word, as FedALA's 98,635 for AG News

    def __post_init__(self) -> None:
        if self.length < 1 or (self.max_vocab is not None and self.max_vocab < 4):
            raise DataError(
                f"parquet: length is {self.length} and max_vocab {self.max_vocab}; a text has at least the classifier "
                "token, a vocabulary at least one word beside the 3 special tokens"
            )

    def check(self, root: Path | None) -> str | None:
        folder = _located(self.path, root)
        if not folder.is_dir():
            return f"parquet: the folder {folder} is missing; put the Parquet files there or correct the path."
        if not self._files(folder, "train"):
            return f"parquet: {folder} holds no train*.parquet, nor does its folder data; rename or add the files."
        return None

    @staticmethod
    def _files(folder: Path, *splits: str) -> list[Path]:
        """Files of the first of `splits` that has any."""
        found = ([f for at in (folder, folder / "data") for f in sorted(at.glob(f"{s}*.parquet"))] for s in splits)
        return next(filter(None, found), [])

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        folder = _located(self.path, root)
        train = [_ParquetFile(file) for file in self._files(folder, "train")]
        test = [_ParquetFile(file) for file in self._files(folder, "test", "val")]
        files = train + test

        labels = [(str(file.path), file.integers(self.label)) for file in files]
        classes = _class_names(
            labels[: len(train)], labels[len(train) :], train[0].class_names(self.label), self.classes
        )
        settings: dict[str, Any] = {
            "y": np.concatenate([part for _, part in labels]),
            "train_rows": sum(file.rows for file in train),
            "classes": classes,
            "client": self._clients(train, test),
        }
        if image := next((name for name in ("image", "img") if name in train[0].columns), None):
            batches = (batch for file in files for batch in file.images(image))
            x = decode_images(batches, sum(file.rows for file in files), self.mode)
            return Dataset(folder.resolve().name, x, **settings, **_PREPROCESSING[self.normalise])
        if "text" in train[0].columns:
            texts = [file.texts("text") for file in files]
            vocabulary = build_vocabulary((text for part in texts[: len(train)] for text in part), self.max_vocab)
            x = np.concatenate([encode(part, vocabulary, self.length) for part in texts])
            return Dataset(folder.resolve().name, x, **settings, vocab=len(vocabulary) + 3)
        raise DataError(
            f"{train[0].path}: has the columns {', '.join(train[0].columns)}; samples must be in a column "
            "'image' or 'img' (struct<bytes, path>) or 'text'"
        )

    def _clients(self, train: "list[_ParquetFile]", test: "list[_ParquetFile]") -> np.ndarray | None:
        if self.client not in train[0].columns:
            return None
        parts = [file.clients(self.client) if self.client in file.columns else None for file in (*train, *test)]
        given = np.concatenate([part for part in parts if part is not None])
        if given.dtype != np.int64:
            words = np.unique(given)  # clients with names are numbered in the order of their names
            parts = [None if part is None else np.searchsorted(words, part.astype(words.dtype)) for part in parts]
        return np.concatenate(
            [
                np.full(file.rows, -1) if part is None else part
                for file, part in zip((*train, *test), parts, strict=True)
            ]
        )


class _ParquetFile:
    """One file's columns as arrays; every fault names file and row."""

    def __init__(self, path: Path):
        import pyarrow
        import pyarrow.parquet

        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file ({error}); write or download it again") from error
        self.rows = self._file.metadata.num_rows
        self.columns = self._file.schema_arrow.names
        if self.rows == 0:
            raise DataError(f"{path}: holds no rows; remove the file or write it again")

    def class_names(self, column: str) -> list[str] | None:
        """Names that the Hugging Face library stores beside the schema, where it wrote the file."""
        stored = json.loads((self._file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
        return stored.get("info", {}).get("features", {}).get(column, {}).get("names")

    def _column(self, column: str, allowed: str, fits) -> "pyarrow.ChunkedArray":
        if column not in self.columns:
            raise DataError(
                f"{self.path}: has no column {column!r} (it has {', '.join(self.columns)}); name the right one"
            )
        kind = self._file.schema_arrow.field(column).type
        if not fits(kind):
            raise DataError(f"{self.path}: column {column!r} holds {kind}; it must hold {allowed}")
        values = self._read(column)
        if values.null_count:
            row = int(np.argmax(values.is_null().to_numpy()))
            raise DataError(f"{self.path}: row {row} has nothing in column {column!r}; fill it in or remove the row")
        return values

    def _read(self, column: str) -> "pyarrow.ChunkedArray":
        import pyarrow

        try:
            return self._file.read([column])[column]
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{self.path}: column {column!r} is unreadable ({error}); write or download it again"
            ) from error

    def integers(self, column: str) -> np.ndarray:
        from pyarrow.types import is_integer

        return self._column(column, "class numbers (integers)", is_integer).to_numpy().astype(np.int64)

    def clients(self, column: str) -> np.ndarray:
        """[rows] int64, or strings."""
        from pyarrow.types import is_integer, is_large_string, is_string

        values = self._column(
            column, "numbers or words", lambda kind: is_integer(kind) or is_string(kind) or is_large_string(kind)
        )
        if not is_integer(values.type):
            return values.to_numpy().astype(str)
        clients = values.to_numpy().astype(np.int64)
        if (clients < 0).any():
            row = int(np.argmax(clients < 0))
            raise DataError(f"{self.path}: row {row} has client {clients[row]}; clients are numbered from 0")
        return clients

    def texts(self, column: str) -> list[str]:
        from pyarrow.types import is_large_string, is_string

        return self._column(column, "strings", lambda kind: is_string(kind) or is_large_string(kind)).to_pylist()

    def images(self, column: str) -> Iterator[list[tuple[str, bytes]]]:
        """Batches of (place, encoded bytes)."""
        from pyarrow.types import is_struct

        def fits(kind) -> bool:
            return is_struct(kind) and kind.get_field_index("bytes") >= 0

        row = 0
        for chunk in self._column(column, "struct<bytes, path>", fits).chunks:
            for start in range(0, len(chunk), 4096):  # bounds the copies of encoded bytes held at a time
                batch = []
                for encoded in chunk.slice(start, 4096).field("bytes"):
                    if not encoded.is_valid:
                        raise DataError(f"{self.path}: row {row} holds a path but no bytes; embed the image")
                    batch.append((f"{self.path} row {row}", encoded.as_py()))
                    row += 1
                yield batch


_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"}


@dataclass(frozen=True)
class Images:
    """Folder of images, train/CLASS/ and test/CLASS/ (or val/, valid/), as CINIC-10 and Tiny-ImageNet come."""

    path: str
    normalise: Normalise = "half"
    mode: Mode = "RGB"  # every image is converted, as the papers' codes do: Tiny-ImageNet mixes grey and colour

    def check(self, root: Path | None) -> str | None:
        folder = _located(self.path, root)
        if not (folder / "train").is_dir():
            return f"images: the folder {folder / 'train'} is missing; it must hold one folder of images a class."
        return None

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        folder = _located(self.path, root)
        classes = tuple(sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir()))
        if not classes:
            raise DataError(f"{folder / 'train'}: holds no class folders; give each class a folder of images")
        train = _class_folders(folder / "train", classes)
        test = self._test_files(folder, classes)
        files = train + test
        x = decode_images(
            [[(str(file), file) for file, _ in files[i : i + 4096]] for i in range(0, len(files), 4096)],
            len(files),
            self.mode,
        )
        y = np.array([label for _, label in files], np.int64)
        return Dataset(folder.resolve().name, x, y, len(train), classes, **_PREPROCESSING[self.normalise])

    @staticmethod
    def _test_files(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
        for split in (folder / "test", folder / "val", folder / "valid"):
            if (split / "val_annotations.txt").is_file():
                return _annotated_files(split, classes)
            if any((split / name).is_dir() for name in classes):  # Tiny-ImageNet's own test/ is unlabelled
                return _class_folders(split, classes)
        return []


def _class_folders(split: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """(file, label) of the images below each class folder of `split`, in a fixed order."""
    unknown = sorted(entry.name for entry in split.iterdir() if entry.is_dir() and entry.name not in classes)
    if unknown:
        raise DataError(f"{split / unknown[0]}: not one of the training classes; remove it or add training images")
    files = []
    for label, name in enumerate(classes):
        found = sorted(file for file in (split / name).rglob("*") if file.suffix.lower() in _IMAGE_SUFFIXES)
        if not found and (split / name).is_dir():
            raise DataError(f"{split / name}: holds no images; fill or remove the folder")
        files += [(file, label) for file in found]
    return files


def _annotated_files(split: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """(file, label) by Tiny-ImageNet's val_annotations.txt: lines of file name, class and more, tab-separated."""
    annotations = split / "val_annotations.txt"
    files = []
    for row, line in enumerate(annotations.read_text().splitlines()):
        name, *rest = line.split("\t")
        if not rest or rest[0] not in classes:
            raise DataError(f"{annotations}: row {row} ({line!r}) names no training class; correct or remove it")
        if not (split / "images" / name).is_file():
            raise DataError(
                f"{annotations}: row {row} names {name}, which is not in {split / 'images'}; add or remove it"
            )
        files.append((split / "images" / name, classes.index(rest[0])))
    return files


@dataclass(frozen=True)
class Npz:
    """NumPy archive: x_train and y_train (or x and y) and, optionally, x_test, y_test, client_train, client_test."""

    path: str
    classes: int | None = None  # where a class has no training row
    normalise: Normalise = "half"  # of uint8 images; floating-point features are taken as they are

    def check(self, root: Path | None) -> str | None:
        file = _located(self.path, root)
        return None if file.is_file() else f"npz: the file {file} is missing; put it there or correct the path."

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        file = _located(self.path, root)
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in archive.files}
        except Exception as error:  # zipfile, NumPy and the file system each have their own errors
            raise DataError(f"{file}: not a readable .npz archive of plain arrays ({error}); save it again") from error
        for short in ("x", "y", "client"):
            if short in arrays:
                arrays.setdefault(f"{short}_train", arrays.pop(short))
        if "x_train" not in arrays or "y_train" not in arrays:
            raise DataError(f"{file}: holds {', '.join(arrays) or 'nothing'}; it needs x_train and y_train, or x and y")

        splits = [split for split in ("train", "test") if f"x_{split}" in arrays]
        x = [self._samples(file, f"x_{split}", arrays) for split in splits]
        y = [self._numbers(file, f"y_{split}", arrays, len(part)) for split, part in zip(splits, x, strict=True)]
        labels = [(f"{file} y_{split}", part) for split, part in zip(splits, y, strict=True)]
        classes = _class_names(labels[:1], labels[1:], count=self.classes)
        client = None
        if "client_train" in arrays:
            arrays.setdefault("client_test", np.full(sum(map(len, x[1:])), -1))
            client = np.concatenate(
                [self._numbers(file, f"client_{split}", arrays, len(p)) for split, p in zip(splits, x, strict=True)]
            )
        if len({(part.shape[1:], part.dtype) for part in x}) > 1:
            raise DataError(f"{file}: x_test {x[1].shape} {x[1].dtype} is unlike x_train {x[0].shape} {x[0].dtype}")
        preprocessing = _PREPROCESSING[self.normalise] if x[0].dtype == np.uint8 else {}
        samples = np.concatenate(x)
        return Dataset(file.stem, samples, np.concatenate(y), len(x[0]), classes, client, **preprocessing)

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
            finite = np.isfinite(x).reshape(len(x), -1).all(1)
            if not finite.all():
                raise DataError(f"{file}: {key} row {int(np.argmin(finite))} holds NaN or infinity; repair the row")
            return np.ascontiguousarray(x, np.float32)
        raise DataError(
            f"{file}: {key} is {x.dtype} {x.shape}; it must be uint8 images [n, H, W], [n, C, H, W] or [n, H, W, C], "
            "or floating-point features [n, F]"
        )

    @staticmethod
    def _numbers(file: Path, key: str, arrays: dict[str, np.ndarray], n: int) -> np.ndarray:
        if key not in arrays:
            raise DataError(f"{file}: holds no {key}; it has {', '.join(arrays)}")
        if arrays[key].shape != (n,) or not np.issubdtype(arrays[key].dtype, np.integer):
            raise DataError(
                f"{file}: {key} is {arrays[key].dtype} {arrays[key].shape}; it must be {n} integers, one a row"
            )
        return arrays[key].astype(np.int64)


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, 1×8×8, 10 classes, 1,797 rows split 80/20 (Alpaydin and Kaynak, 1998; scikit-learn)."""

    def check(self, root: Path | None) -> str | None:
        return None if find_spec("sklearn") else "digits comes with the package scikit-learn; install it."

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        nth = np.empty(len(y), np.int64)  # which of its class a row is
        for c in range(10):
            nth[y == c] = np.arange((y == c).sum())
        is_test = nth % 5 == 4  # every fifth of each class: stratified, and the same everywhere
        order = np.argsort(is_test, kind="stable")
        images = x[order].astype(np.uint8).reshape(-1, 1, 8, 8)  # grey levels 0..16
        classes = tuple(str(c) for c in range(10))
        return Dataset("digits", images, y[order].astype(np.int64), int((~is_test).sum()), classes, scale=16.0)


@dataclass(frozen=True)
class Synthetic:
    """Gaussian clouds around one random prototype a class; images for a shape of three numbers, else features."""

    samples: int = 2000  # training rows
    test_samples: int = 500
    shape: tuple[int, ...] = (1, 8, 8)  # (C, H, W) or (F,)
    classes: int = 10
    noise: float = 1.0  # standard deviation around prototypes whose entries have standard deviation 1
    seed: int = 0

    def check(self, root: Path | None) -> str | None:
        return None

    def load(self, root: Path | None) -> Dataset:
        if len(self.shape) not in (1, 3) or min(self.shape) < 1 or self.samples < self.classes or self.classes < 1:
            raise DataError(
                f"synthetic: shape {self.shape}, {self.samples} samples, {self.classes} classes; the shape must be "
                "(C, H, W) or (F,), and every class needs a sample"
            )
        rng = np.random.default_rng(self.seed)
        prototypes = rng.standard_normal((self.classes, *self.shape), np.float32)
        rows = np.concatenate([np.arange(self.samples), np.arange(self.test_samples)])
        y = rows.astype(np.int64) % self.classes  # both splits are class-balanced
        x = prototypes[y] + np.float32(self.noise) * rng.standard_normal((len(y), *self.shape), np.float32)
        classes = tuple(str(c) for c in range(self.classes))
        if len(self.shape) == 1:
            return Dataset("synthetic", x, y, self.samples, classes)
        grey = np.rint(127.5 + 32 * x).clip(0, 255).astype(np.uint8)  # four standard deviations reach black and white
        return Dataset("synthetic", grey, y, self.samples, classes, **_PREPROCESSING["half"])


SOURCES: dict[str, type] = {
    "mnist": MNIST,
    "fashion_mnist": FashionMNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "emnist": EMNIST,
    "parquet": Parquet,
    "images": Images,
    "npz": Npz,
    "digits": Digits,
    "synthetic": Synthetic,
}
