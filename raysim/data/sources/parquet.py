"""Folders of tables: Parquet files, and what the Hugging Face library saves."""

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raysim.core.bounds import Count
from raysim.data.dataset import Dataset
from raysim.data.decode import ImageDecoder
from raysim.data.encoded import Encoded
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, FileFacts, Pictures, class_names, renumbered, warn_of_left_out
from raysim.data.sources.tables import ArrowReader, Folder, Kind, ParquetReader, TableColumn, TableFile
from raysim.data.text import TextEncoder, VocabularySize, build_vocabulary, facts_of

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.fs import FileInfo

READERS = 8  # files that are open at a time while a data set is looked through
# The name of a file that is one client. A small letter behind the word is refused: "trainingrid" may be Ingrid's, or Rid's.
OWNER = re.compile(
    r"(train|training|test|testing|val|valid|validation)(?![a-z])[-_.]?(?P<owner>.*)\.parquet", re.DOTALL
)


@dataclass(frozen=True)
class Tables(Pictures):
    """A folder of tables with a column of images or texts, one of labels and perhaps one of natural clients."""

    kind: ClassVar[Kind]

    path: str
    """The folder."""
    label: str = "label"
    """Column of the class numbers. Where the files name the classes, the names count: they may have other numbers in each."""
    client: str = "client"
    """Column of the natural clients, numbers or words; ignored where the training files lack it."""
    classes: Count | None = None
    """Number of classes; needed where the files name no classes and a class has no training row."""
    length: Count = 200
    """Tokens of a text; longer texts are cut, shorter ones padded."""
    max_vocab: VocabularySize | None = 32_000
    """Largest number of tokens, with the 3 special ones; null keeps every word, as FedALA's 98,635 for AG News."""

    def check(self, root: Path | None) -> str | None:
        """See `Source`; an object store is not asked before the data are read."""
        return None if "://" in self.path else self._missing(Folder.at(self.path, root))

    @abstractmethod
    def _missing(self, folder: Folder) -> str | None:
        """What is missing, in a sentence that says what to do, or None."""

    @abstractmethod
    def _split(self, folder: Folder, *names: str) -> list["FileInfo"]:
        """Files of the first split of these names that has any."""

    @abstractmethod
    def _split_names(self, folder: Folder) -> dict[str, str]:
        """The split of each table there, by its path, whether it is read or not."""

    def _splits(self, folder: Folder) -> tuple[list["FileInfo"], list["FileInfo"]]:
        """Files of training and of the test. A warning names the splits that are neither."""
        train, test = self._split(folder, "train"), self._split(folder, "test", "val")
        names = self._split_names(folder)
        read = [names.get(info.path, "") for info in train + test]  # a folder without splits has none for its files
        warn_of_left_out(folder.name, sorted({*names.values()}.difference(read)), names[test[0].path] if test else None)
        return train, test

    def files(self, root: Path | None) -> Sequence[FileFacts]:
        folder = Folder.at(self.path, root)
        train, test = self._splits(folder)
        return [(info.path.removeprefix(folder.path), info.size, info.mtime_ns or 0) for info in train + test]

    def open(self, root: Path | None) -> Dataset:
        folder = Folder.at(self.path, root)
        if problem := self._missing(folder):
            raise DataError(problem)
        train, test = (self._read(folder, infos) for infos in self._splits(folder))
        files = train + test
        y, classes = self._labels(train, test)
        train_rows = sum(file.rows for file in train)
        samples, more = self._samples(files, train_rows)
        return Dataset(folder.name, samples, y, train_rows, classes, self._clients(train, test), **more)

    def _read(self, folder: Folder, infos: "Sequence[FileInfo]") -> list[TableFile]:
        """What is known of the files: their schema, labels and clients."""
        if irregular := [info.path for info in infos if not info.is_file]:
            raise DataError(f"{irregular[0]}: is not a regular file; remove it")
        pool = ThreadPoolExecutor(READERS)
        try:
            names = {self.label, self.client}
            return list(pool.map(lambda info: TableFile(folder.system, info.path, self.kind, *names), infos))
        finally:
            pool.shutdown(cancel_futures=True)

    def _labels(self, train: Sequence[TableFile], test: Sequence[TableFile]) -> tuple[np.ndarray, tuple[str, ...]]:
        """All labels, and the names of the classes: those of the training files, in the order in which they come. A file that
        has other names numbers its classes by them."""
        files = [*train, *test]
        labels = [file.integers(self.label) for file in files]
        named = [file.class_names(self.label) for file in files]
        if None in named and len({tuple(names) for names in named if names}) > 1:
            raise DataError(
                f"{files[named.index(None)].path}: does not name its classes, and the names in the other files differ; write it "
                "again with names"
            )
        lists = [*dict.fromkeys(tuple(names) for names in named[: len(train)] if names)]
        known = lists[0] if len(lists) == 1 else tuple(dict.fromkeys(chain(*lists)))
        pairs = [
            (file.path, renumbered(file.path, part, names, known))
            for file, part, names in zip(files, labels, named, strict=True)
        ]
        classes = class_names(pairs[: len(train)], pairs[len(train) :], known or None, self.classes)
        return np.concatenate([part for _, part in pairs]), classes

    def _samples(self, files: Sequence[TableFile], train_rows: int) -> tuple[Encoded, dict[str, Any]]:
        """The samples of the files, and what else a data set of them has."""
        columns = files[0].columns
        if image := next((name for name in ("image", "img") if name in columns), None):
            for file in files:
                file.check(image, "struct<bytes, path>", _is_image)
            encoded = TableColumn.of(files, image)
            ((_, ((place, first),)),) = encoded.batches(np.arange(1))
            return Encoded(encoded, ImageDecoder.like(place, first, self.mode, self.resize)), PREPROCESSING[
                self.normalise
            ]
        if "text" in columns:
            for file in files:
                file.check("text", "strings", _is_text)
            encoded = TableColumn.of(files, "text")
            texts = (text for _, batch in encoded.batches(np.arange(train_rows)) for _, text in batch)
            vocabulary = build_vocabulary(texts, self.max_vocab)
            return Encoded(encoded, TextEncoder(vocabulary, self.length)), facts_of(vocabulary)
        raise DataError(
            f"{files[0].path}: has the columns {', '.join(columns)}; samples must be in a column "
            "'image' or 'img' (struct<bytes, path>) or 'text'"
        )

    def _clients(self, train: Sequence[TableFile], test: Sequence[TableFile]) -> np.ndarray | None:
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


def _is_image(kind: "pyarrow.DataType") -> bool:
    from pyarrow.types import is_struct

    return bool(is_struct(kind) and kind.get_field_index("bytes") >= 0)


def _is_text(kind: "pyarrow.DataType") -> bool:
    from pyarrow.types import is_large_string, is_string

    return bool(is_string(kind) or is_large_string(kind))


@dataclass(frozen=True)
class Parquet(Tables):
    """Parquet folder in the Hugging Face layout: images or texts, labels and, optionally, natural clients."""

    kind = ParquetReader

    path: str
    """Folder that holds any number of files train*.parquet and test*.parquet (or valid*, val*) itself or in its folder
    data/; or its URI in an object store, such as s3://BUCKET/FOLDER or gs://BUCKET/FOLDER."""

    client_files: bool = False
    """Whether each training file is one client, as LEAF's sets come: train-NAME.parquet, with the tests of the same client,
    if any, in test-NAME.parquet. Two training files of one name are refused."""

    def _missing(self, folder: Folder) -> str | None:
        if not folder.is_there():
            return f"parquet: the folder {folder.path} is missing; put the Parquet files there or correct the path."
        if not (train := self._split(folder, "train")):
            return f"parquet: {folder.path} holds no train*.parquet, nor does its folder data; rename or add the files."
        return _unclear_owner(train, self._split(folder, "test", "val")) if self.client_files else None

    def _split(self, folder: Folder, *names: str) -> list["FileInfo"]:
        listed = self._listed(folder)
        found = ([info for info in listed if info.base_name.startswith(name)] for name in names)
        return next(filter(None, found), [])

    def _listed(self, folder: Folder) -> list["FileInfo"]:
        listed = [*folder.listed(), *folder.below("data").listed()]
        return [info for info in listed if info.base_name.endswith(".parquet") and not info.base_name.startswith(".")]

    def _split_names(self, folder: Folder) -> dict[str, str]:
        return {info.path: re.split(r"[-_.]", info.base_name)[0] for info in self._listed(folder)}

    def _clients(self, train: Sequence[TableFile], test: Sequence[TableFile]) -> np.ndarray | None:
        if not self.client_files:
            return super()._clients(train, test)
        owners = [_owner(file.path) or "" for file in (*train, *test)]  # `_missing` refused files without
        numbers = np.unique(owners, return_inverse=True)[1]
        return np.repeat(numbers.astype(np.int64), [file.rows for file in (*train, *test)])


def _owner(path: str) -> str | None:
    """The client whose file it is, by its name; None where the name does not say where the client's own begins."""
    found = OWNER.fullmatch(path.rpartition("/")[2])
    return found and found["owner"]


def _unclear_owner(train: Sequence["FileInfo"], test: Sequence["FileInfo"]) -> str | None:
    """Which of the files, that are of one client each, cannot be."""
    for info in (*train, *test):
        if _owner(info.path) is None:
            return f"parquet: client_files: {info.path} does not say whose it is; name it train-NAME.parquet or test-NAME.parquet."
    seen: dict[str | None, str] = {}
    for info in train:
        if (first := seen.setdefault(_owner(info.path), info.path)) != info.path:
            return (
                f"parquet: client_files: {first} and {info.path} are of one client by their names, but each training file is a "
                "client; rename one, or make them one file."
            )
    return None


@dataclass(frozen=True)
class HuggingFace(Tables):
    """Folder that the Hugging Face library's save_to_disk wrote: images or texts, labels and, optionally, clients."""

    kind = ArrowReader

    path: str
    """The folder, with the splits train and test (or validation), or without splits: it then holds training samples; or its
    URI in an object store, such as s3://BUCKET/FOLDER or gs://BUCKET/FOLDER."""

    def _missing(self, folder: Folder) -> str | None:
        if not folder.is_there():
            return f"huggingface: the folder {folder.path} is missing; put it there or correct the path."
        if not self._split(folder, "train"):
            return f"huggingface: {folder.path} holds no train/*.arrow and no *.arrow; write it with save_to_disk."
        return None

    def _split(self, folder: Folder, *names: str) -> list["FileInfo"]:
        for entry in folder.listed():
            if any(entry.base_name.startswith(name) for name in names) and not entry.is_file:
                return _arrow_files(folder.below(entry.base_name))
        return _arrow_files(folder) if "train" in names else []

    def _split_names(self, folder: Folder) -> dict[str, str]:
        folders = [entry.base_name for entry in folder.listed() if not entry.is_file]
        return {
            info.path: name
            for name in folders
            for info in folder.below(name).listed()
            if info.base_name.endswith(".arrow")
        }


def _arrow_files(folder: Folder) -> list["FileInfo"]:
    """Those that state.json names; where there is none, all but what the library's map and filter keep beside them."""
    listed = folder.listed()
    found = [info for info in listed if info.base_name.endswith(".arrow")]
    if not any(info.base_name == "state.json" and info.is_file for info in listed):
        return [info for info in found if not info.base_name.startswith(("cache-", "tmp"))]
    names = _named(folder)
    if lost := names - {info.base_name for info in found}:
        raise DataError(f"{folder.path}: {min(lost)} is missing, and state.json names it; copy it there")
    return [info for info in found if info.base_name in names]


def _named(folder: Folder) -> set[str]:
    """The files that state.json names, as save_to_disk writes it."""
    path = f"{folder.path}/state.json"
    try:
        with folder.system.open_input_stream(path) as file:
            return {str(part["filename"]) for part in json.loads(file.read())["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: does not name the files of the set ({error}); write it with save_to_disk") from error
