"""Files of tables, Parquet or Arrow, on this machine or in an object store. A file is open only while it is read, so that
a data set may have any number of them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from raysim.data.encoded import BATCH, Batch
from raysim.data.errors import DataError
from raysim.data.sources.base import located

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.fs

MOST_ROWS = 100_000_000


@dataclass(frozen=True)
class Folder:
    """A folder of files: here, or in an object store."""

    system: pyarrow.fs.FileSystem
    path: str
    _listings: dict[str, list[pyarrow.fs.FileInfo]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def at(cls, path: str, root: Path | None) -> Folder:
        """`path` is a URI, such as s3://bucket/folder, or looked up as by `located`. Raises DataError for a URI that is
        none."""
        import pyarrow
        from pyarrow.fs import FileSystem, LocalFileSystem

        if "://" not in path:
            here = located(path, root)
            # Other processes, which may have other working directories, read there too.
            return cls(LocalFileSystem(use_mmap=True), str(here.absolute() if here.exists() else here))
        try:
            return cls(*FileSystem.from_uri(path))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: not a folder that pyarrow can read ({error}); correct it") from error

    @property
    def name(self) -> str:
        """Its last part."""
        from pyarrow.fs import LocalFileSystem

        here = isinstance(self.system, LocalFileSystem)
        return Path(self.path).resolve().name if here else self.path.rstrip("/").rpartition("/")[2]

    def below(self, name: str) -> Folder:
        return Folder(self.system, f"{self.path.rstrip('/')}/{name}", self._listings)

    def listed(self) -> list[pyarrow.fs.FileInfo]:
        """What lay in it when this was first asked, sorted by name; nothing where it is missing. Raises DataError where it
        cannot be read."""
        from pyarrow.fs import FileSelector

        if self.path not in self._listings:
            found = self._asked(FileSelector(self.path, allow_not_found=True))
            self._listings[self.path] = sorted(found, key=lambda info: str(info.base_name))
        return self._listings[self.path]

    def is_there(self) -> bool:
        from pyarrow.fs import FileType

        return bool(self._asked(self.path).type == FileType.Directory)

    def _asked(self, what: Any) -> Any:
        import pyarrow

        try:
            return self.system.get_file_info(what)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.path}: the folder cannot be listed ({error}); correct data.name") from error


class Reader(Protocol):
    """An open file of a table, in groups of rows that are read at once."""

    schema: pyarrow.Schema
    groups: list[int]  # rows of each

    def read(self, column: str, group: int | None = None) -> pyarrow.ChunkedArray:
        """A column of a group, or of all."""


class ParquetReader:
    """A Parquet file and its row groups."""

    kind = "Parquet"

    def __init__(self, file: pyarrow.NativeFile):
        from pyarrow.parquet import ParquetFile

        self._file = ParquetFile(file)
        about = self._file.metadata
        self.schema = self._file.schema_arrow
        self.groups = [about.row_group(i).num_rows for i in range(about.num_row_groups)]

    def read(self, column: str, group: int | None = None) -> pyarrow.ChunkedArray:
        import pyarrow

        table = self._file.read([column]) if group is None else self._file.read_row_group(group, [column])
        rows = sum(self.groups) if group is None else self.groups[group]
        if table.num_rows != rows:  # each column has a count of its own, which pyarrow believes
            raise pyarrow.ArrowInvalid(f"column {column!r} has {table.num_rows} values in {rows} rows")
        return table[column]


class ArrowReader:
    """An Arrow file or stream and its record batches, as the Hugging Face library saves them. A local file is mapped."""

    kind = "Arrow"

    def __init__(self, file: pyarrow.NativeFile):
        from pyarrow.ipc import open_file, open_stream

        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            reader = open_file(file)
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        else:
            reader = open_stream(file)
            self._batches = list(reader)
        self.schema, self.groups = reader.schema, [batch.num_rows for batch in self._batches]

    def read(self, column: str, group: int | None = None) -> pyarrow.ChunkedArray:
        import pyarrow

        batches = self._batches if group is None else [self._batches[group]]
        kind = self.schema.field(column).type
        values = pyarrow.chunked_array([batch.column(column) for batch in batches], kind)
        # The bytes are used as they lie in the file: in a damaged one, they may point anywhere.
        values.validate(full=True)
        return values


Kind = type[ParquetReader] | type[ArrowReader]


@contextmanager
def opened(system: pyarrow.fs.FileSystem, path: str, kind: Kind) -> Iterator[Reader]:
    """The file's reader. Raises DataError for a file that is not readable, also later, while it is read."""
    import pyarrow

    try:
        with system.open_input_file(path) as file:
            yield kind(file)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable {kind.kind} file ({error}); write or download it again") from error


class TableFile:
    """What is known of one file before its samples are read; every fault names file and row."""

    def __init__(self, system: pyarrow.fs.FileSystem, path: str, kind: Kind, *wanted: str):
        """The `wanted` columns are read, where they are there."""
        self.path, self.system, self.kind = path, system, kind
        with opened(system, path, kind) as reader:
            self.schema, self.groups, self.rows = reader.schema, reader.groups, sum(reader.groups)
            self.columns: list[str] = self.schema.names
            if self.rows == 0:
                raise DataError(f"{path}: holds no rows; remove the file or write it again")
            if min(self.groups) < 0 or self.rows > MOST_ROWS:  # a few bytes may declare any number of equal ones
                raise DataError(f"{path}: declares {self.rows} rows; write it again, with at most {MOST_ROWS:,} a file")
            if twice := [name for name in self.columns if self.columns.count(name) > 1]:
                raise DataError(f"{path}: has the column {twice[0]!r} twice; rename one")
            self._values = {name: reader.read(name) for name in wanted if name in self.columns}

    def class_names(self, column: str) -> list[str] | None:
        """Names that the Hugging Face library stores beside the schema, where it wrote the file."""
        stored = (self.schema.metadata or {}).get(b"huggingface", b"{}")
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

    def check(self, column: str, allowed: str, fits: Callable[[pyarrow.DataType], bool]) -> None:
        """Raise DataError where the column is missing or of a type that does not fit."""
        if column not in self.columns:
            raise DataError(
                f"{self.path}: has no column {column!r} (it has {', '.join(self.columns)}); name the right one"
            )
        kind = self.schema.field(column).type
        if not fits(kind):
            raise DataError(f"{self.path}: column {column!r} holds {kind}; it must hold {allowed}")

    def _column(self, column: str, allowed: str, fits: Callable[[pyarrow.DataType], bool]) -> pyarrow.ChunkedArray:
        self.check(column, allowed, fits)
        return complete(self.path, column, self._values[column])

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


def complete(path: str, column: str, values: pyarrow.ChunkedArray, first: int = 0) -> pyarrow.ChunkedArray:
    """`values`; of an image (struct<bytes, ...>) its bytes, whatever else is beside them, in any alphabet.

    `first` is the number of the first row. Raises DataError where a value is missing, or is no text in UTF-8.
    """
    import pyarrow
    from pyarrow.compute import struct_field

    try:
        values.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: column {column!r} is damaged ({error}); write it again") from error
    if values.null_count:
        row = first + int(np.argmax(values.is_null().to_numpy()))
        raise DataError(f"{path}: row {row} has nothing in column {column!r}; fill it in or remove the row")
    if not pyarrow.types.is_struct(values.type) or (place := values.type.get_field_index("bytes")) < 0:
        return values
    values = struct_field(values, [place])
    if values.null_count:
        row = first + int(np.argmax(values.is_null().to_numpy()))
        raise DataError(f"{path}: row {row} holds a path but no bytes; embed the image")
    return values


@dataclass(eq=False)
class TableColumn:
    """The samples in one column of many files. A group of rows is read at once; those read last stay in memory."""

    system: pyarrow.fs.FileSystem
    kind: Kind
    column: str
    paths: Sequence[str]
    files: np.ndarray  # [G] of each group: which path
    numbers: np.ndarray  # [G] ... and which group of that file
    firsts: np.ndarray  # [G] ... and its first row in that file
    starts: np.ndarray  # [G + 1] ... and in all files
    held_bytes: int = 0  # the group read last is held whatever its size
    _held: OrderedDict[int, Any] = field(default_factory=OrderedDict, repr=False)
    _lock: Any = field(default_factory=Lock, repr=False)  # what a client needs next is read in a thread

    @classmethod
    def of(cls, files: Sequence[TableFile], column: str) -> TableColumn:
        groups = [(f, g, size) for f, file in enumerate(files) for g, size in enumerate(file.groups) if size]
        number, group, sizes = (np.array(part, np.int64) for part in zip(*groups, strict=True))
        starts = np.concatenate([[0], np.cumsum(sizes)])
        before = np.array([0, *accumulate(file.rows for file in files)])
        return cls(
            files[0].system, files[0].kind, column, [file.path for file in files], number, group,
            starts[:-1] - before[number], starts,
        )  # fmt: skip

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Without what lies in memory."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_held", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _held=OrderedDict(), _lock=Lock())

    def reach(self, rows: np.ndarray) -> int:
        groups = np.unique(np.searchsorted(self.starts, rows, "right") - 1)
        return int((self.starts[groups + 1] - self.starts[groups]).sum())

    def batches(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Batch]]:
        group = np.searchsorted(self.starts, rows, "right") - 1
        order = np.argsort(group, kind="stable")
        bounds = np.flatnonzero(np.diff(group[order], prepend=-1, append=-1))
        for start, stop in pairwise(bounds):
            g = int(group[order[start]])
            values = self._group(g)
            for first in range(start, stop, BATCH):
                positions = order[first : min(first + BATCH, stop)]
                yield positions, self._encoded(g, values, rows[positions] - self.starts[g])

    def _group(self, g: int) -> pyarrow.ChunkedArray:
        with self._lock:
            if g in self._held:
                self._held.move_to_end(g)
                return self._held[g]
            path = self.paths[self.files[g]]
            with opened(self.system, path, self.kind) as reader:
                values = complete(
                    path, self.column, reader.read(self.column, int(self.numbers[g])), int(self.firsts[g])
                )
            self._held[g] = values
            while len(self._held) > 1 and sum(part.nbytes for part in self._held.values()) > self.held_bytes:
                self._held.popitem(last=False)
            return values

    def _encoded(self, g: int, values: pyarrow.ChunkedArray, rows: np.ndarray) -> Batch:
        """Of an image the bytes, of a text the text."""
        path, first, batch = self.paths[self.files[g]], int(self.firsts[g]), []
        ends = list(accumulate(len(chunk) for chunk in values.chunks))
        for row in rows.tolist():
            chunk = bisect_right(ends, row)
            sample = values.chunk(chunk)[row - (ends[chunk - 1] if chunk else 0)].as_py()
            batch.append((f"{path} row {first + row}", sample))
        return batch
