"""Parquet files in the Hugging Face layout."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.decode import Mode, decode_images
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, Normalise, Source, class_names, located
from raysim.data.text import build_vocabulary, encode

if TYPE_CHECKING:
    import pyarrow


MOST_ROWS = 100_000_000


@dataclass(frozen=True)
class Parquet(Source):
    """Parquet folder in the Hugging Face layout: images or texts, labels and, optionally, natural clients."""

    path: str
    """Folder that holds train*.parquet and test*.parquet (or valid*, val*) itself or in its folder data/."""
    label: str = "label"
    """Column of the class numbers."""
    client: str = "client"
    """Column of the natural clients, numbers or words; ignored where the training files lack it."""
    classes: int | None = None
    """Number of classes; needed where the files name no classes and a class has no training row."""
    normalise: Normalise = "half"
    """Range of the pixels as the model sees them: half is [-1, 1], unit is [0, 1]."""
    mode: Mode | None = None
    """Pillow mode that every image is converted to; null refuses a mix of grey and colour."""
    length: int = 200
    """Tokens of a text; longer texts are cut, shorter ones padded."""
    max_vocab: int | None = 32_000
    """Largest number of tokens, with the 3 special ones; null keeps every word, as FedALA's 98,635 for AG News."""

    def __post_init__(self) -> None:
        if self.length < 1 or (self.max_vocab is not None and self.max_vocab < 4):
            raise DataError(
                f"parquet: length is {self.length} and max_vocab {self.max_vocab}; a text has at least the classifier "
                "token, a vocabulary at least one word beside the 3 special tokens"
            )

    def check(self, root: Path | None) -> str | None:
        folder = located(self.path, root)
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
        folder = located(self.path, root)
        train = [_ParquetFile(file) for file in self._files(folder, "train")]
        test = [_ParquetFile(file) for file in self._files(folder, "test", "val")]
        files = train + test

        labels = [(str(file.path), file.integers(self.label)) for file in files]
        classes = class_names(
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
            return Dataset(folder.resolve().name, x, **settings, **PREPROCESSING[self.normalise])
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
        if not path.is_file():
            raise DataError(f"{path}: is not a regular file; remove it")
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a readable Parquet file ({error}); write or download it again") from error
        self.rows = self._file.metadata.num_rows
        self.columns = self._file.schema_arrow.names
        if self.rows == 0:
            raise DataError(f"{path}: holds no rows; remove the file or write it again")
        if not 0 < self.rows <= MOST_ROWS:  # a few bytes may declare any number of equal ones
            raise DataError(f"{path}: declares {self.rows} rows; write it again, with at most {MOST_ROWS:,} a file")
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise DataError(f"{path}: has the column {twice[0]!r} twice; rename one")

    def class_names(self, column: str) -> list[str] | None:
        """Names that the Hugging Face library stores beside the schema, where it wrote the file."""
        stored = (self._file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
        try:
            found = json.loads(stored)
            for key in ("info", "features", column, "names"):
                found = found.get(key, {})
            names = list(found or ())
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise DataError(f"{self.path}: its metadata 'huggingface' are damaged ({error}); write it again") from error
        if not all(isinstance(name, str) for name in names):
            raise DataError(
                f"{self.path}: its metadata 'huggingface' have a class name that is no text; write it again"
            )
        return names or None

    def _column(self, column: str, allowed: str, fits: Callable[["pyarrow.DataType"], bool]) -> "pyarrow.ChunkedArray":
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
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.path}: column {column!r} is unreadable ({error}); write or download it again"
            ) from error

    def integers(self, column: str) -> np.ndarray:
        from pyarrow.types import is_integer

        labels: np.ndarray = self._column(column, "class numbers (integers)", is_integer).to_numpy().astype(np.int64)
        return labels

    def clients(self, column: str) -> np.ndarray:
        """[rows] int64, or strings."""
        from pyarrow.types import is_integer, is_large_string, is_string

        values = self._column(
            column, "numbers or words", lambda kind: is_integer(kind) or is_string(kind) or is_large_string(kind)
        )
        clients: np.ndarray = values.to_numpy()
        if not is_integer(values.type):
            return clients.astype(str)
        clients = clients.astype(np.int64)
        if (clients < 0).any():
            row = int(np.argmax(clients < 0))
            raise DataError(f"{self.path}: row {row} has client {clients[row]}; clients are numbered from 0")
        return clients

    def texts(self, column: str) -> list[str]:
        from pyarrow.types import is_large_string, is_string

        values = self._column(column, "strings", lambda kind: is_string(kind) or is_large_string(kind))
        texts: list[str] = values.to_pylist()
        return texts

    def images(self, column: str) -> Iterator[list[tuple[str, bytes]]]:
        """Batches of (place, encoded bytes)."""
        from pyarrow.types import is_struct

        def fits(kind: "pyarrow.DataType") -> bool:
            return bool(is_struct(kind) and kind.get_field_index("bytes") >= 0)

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
