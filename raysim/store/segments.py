"""Clients' states on disk, in segments: files that are written once and never changed.

A segment has three parts. Records: the bytes of a client's arrays in the order of their names, one client after another.
Then a table with an `ENTRY` for each client, sorted. Then the kinds as JSON: the names, types and shapes of the arrays of
all clients that keep the same things. What is read is bounded by the size of the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, cast, get_args

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from raysim.store.atomic import begin_sync
from raysim.store.documents import OPEN_SHAPE, DamagedFile, checked

Arrays = Mapping[str, np.ndarray]
ENTRY = np.dtype([("client", "<i8"), ("start", "<i8"), ("kind", "<i8"), ("sha256", "V32")])
DIGEST = np.dtype([("client", "<i8"), ("sha256", "V32")])
TABLE_BYTES = 1 << 31  # at most, of a table and its kinds
BEGIN_BYTES = 16 << 20  # after so many the disk is asked to begin
MOVED_BYTES = 32 << 20  # that `movable` takes for nothing
SEGMENTS = 64  # more than these are merged while that costs nothing

_Type = Literal[
    "|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"
]  # fmt: skip
_Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 48)]], Field(max_length=32)]
_Kinds = list[list[tuple[str, _Type, _Shape]]]
Fields = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type and shape of arrays, sorted by name


class SegmentEntry(TypedDict):
    """How a manifest names a segment."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    file: str
    table: Annotated[int, Field(ge=0, lt=1 << 62)]  # where it begins
    clients: Annotated[int, Field(ge=0, lt=1 << 31)]
    sha256: str  # of the table and the kinds; the table has those of the records


class Kind:
    """What some clients keep, and where in a record each array is."""

    def __init__(self, fields: Fields):
        self.fields = fields
        self.text = json.dumps(fields, separators=(",", ":"))
        self.places: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        self.size = 0
        for name, kind, shape in fields:
            self.places[name] = self.size, np.dtype(kind), shape
            self.size += np.dtype(kind).itemsize * math.prod(shape)
        self._begun = hashlib.sha256(self.text.encode())

    def sha256(self, *content: Any) -> bytes:
        """The hash of a record: of its kind's text, then of its bytes."""
        digest = self._begun.copy()
        for part in content:
            digest.update(part)
        return digest.digest()

    def arrays(self, content: bytes) -> dict[str, np.ndarray]:
        """The arrays of a record."""
        return {name: np.ndarray(shape, kind, content, start) for name, (start, kind, shape) in self.places.items()}


def state_sha256(state: Arrays) -> bytes:
    """The hash of a state, which its record has as well."""
    return Kind(_fields(state)).sha256(*_bytes(state))


def _fields(state: Arrays) -> Fields:
    return tuple((name, array.dtype.str, array.shape) for name, array in sorted(state.items()))


def _bytes(state: Arrays) -> list[Any]:
    """The memory of the arrays by name, without a copy where they are contiguous."""
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array in sorted(state.items())]


@dataclass(frozen=True, eq=False)
class Segment:
    """A segment whose table has been read and checked."""

    path: Path
    entry: SegmentEntry
    table: np.ndarray  # [n] of ENTRY
    kinds: tuple[Kind, ...]

    @classmethod
    def read(cls, path: Path, entry: SegmentEntry) -> Segment:
        """Raises OSError, and `DamagedFile` where the table is not as it was written, or leads out of the file."""
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            size = os.fstat(file.fileno()).st_size - entry["table"]
            if not 0 <= size <= TABLE_BYTES or not path.is_file():
                raise DamagedFile(f"{path}: is not as it was written.")
            file.seek(entry["table"])
            content = file.read(size)
        if hashlib.sha256(content).hexdigest() != entry["sha256"] or len(content) < entry["clients"] * ENTRY.itemsize:
            raise DamagedFile(f"{path}: is not as it was written.")
        table = np.frombuffer(content, ENTRY, entry["clients"])
        described: _Kinds = checked(path, _Kinds, content[table.nbytes :])
        for fields in described:
            if len({name for name, *_ in fields}) < len(fields):
                raise DamagedFile(f"{path} is damaged: a name is there twice.")
            if any(math.prod(max(n, 1) for n in shape) >= 1 << 56 for *_, shape in fields):
                raise DamagedFile(f"{path} is damaged: an array is larger than any file.")
        kinds = tuple(Kind(tuple((name, kind, tuple(shape)) for name, kind, shape in fields)) for fields in described)
        client, start, kind = table["client"], table["start"], table["kind"]
        inside = len(table) == 0 or (
            bool(((kind >= 0) & (kind < len(kinds)) & (client >= 0) & (start >= 0)).all())
            and bool((np.diff(client) > 0).all() and (start <= entry["table"] - _sizes(kinds)[kind]).all())
        )
        if not inside:
            raise DamagedFile(f"{path} is damaged: its table leads out of it.")
        return cls(path, entry, table, kinds)

    def contents(self, rows: np.ndarray) -> Iterator[tuple[Kind, bytes, int]]:
        """Kind, bytes and row of records, in the order in which they lie in the file. Raises OSError and `DamagedFile`."""
        order = rows[np.argsort(self.table["start"][rows], kind="stable")]
        entries = self.table[order]
        with open(self.path, "rb", buffering=1 << 20) as file:
            position = 0
            for row, start, number, sha256 in zip(
                order.tolist(), entries["start"].tolist(), entries["kind"].tolist(), entries["sha256"].tolist(),
                strict=True,
            ):  # fmt: skip
                kind = self.kinds[number]
                if start != position:
                    file.seek(start)
                content = file.read(kind.size)
                position = start + kind.size
                if kind.sha256(content) != sha256:
                    client = self.table["client"][row]
                    raise DamagedFile(f"{self.path}: the state of client {client} is not as it was written.")
                yield kind, content, row


class SegmentWriter:
    """Writes the records of a new segment, each client once, and at the end its table and kinds."""

    def __init__(self, file: BinaryIO):
        self._file, self.size = file, 0
        self._begun = 0  # up to where the disk has been asked to write
        self._numbers: dict[Fields, int] = {}
        self._kinds: list[Kind] = []
        self._rows: dict[int, tuple[int, int, int, bytes]] = {}  # by client

    @property
    def clients(self) -> list[int]:
        """Whose records there are."""
        return sorted(self._rows)

    def add(self, client: int, state: Arrays) -> None:
        """Write a state. Raises TypeError for arrays of a type that is not read again."""
        fields = _fields(state)
        if fields not in self._numbers:
            for name, kind, _ in fields:
                if kind not in get_args(_Type):
                    raise TypeError(f"the state of client {client} has an array '{name}' of {state[name].dtype}")
        number, parts = self._number(fields), _bytes(state)
        for part in parts:
            self._file.write(part)
        self._enter(client, number, self._kinds[number].sha256(*parts))

    def copy(self, client: int, kind: Kind, content: bytes, sha256: bytes) -> None:
        """Write a record of another segment."""
        self._file.write(content)
        self._enter(client, self._number(kind.fields), sha256)

    def finish(self, path: Path) -> Segment:
        """Write the table. The segment is that of the file at `path`, once that is closed."""
        table = np.array([self._rows[client] for client in self.clients], ENTRY)
        content = table.tobytes() + json.dumps([kind.fields for kind in self._kinds]).encode()
        self._file.write(content)
        sha256 = hashlib.sha256(content).hexdigest()
        entry = {"file": path.name, "table": self.size, "clients": len(table), "sha256": sha256}
        return Segment(path, cast(SegmentEntry, entry), table, tuple(self._kinds))

    def _number(self, fields: Fields) -> int:
        number = self._numbers.setdefault(fields, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(Kind(fields))
        return number

    def _enter(self, client: int, number: int, sha256: bytes) -> None:
        self._rows[client] = client, self.size, number, sha256
        self.size += self._kinds[number].size
        if self.size - self._begun >= BEGIN_BYTES:
            begin_sync(self._file, self._begun)
            self._begun = self.size


def _places(segment: Segment, number: int) -> np.ndarray:
    """[4, n] of each client of a segment: itself, the segment's number, the row of its table, and bytes."""
    n, sizes = len(segment.table), _sizes(segment.kinds)[segment.table["kind"]]
    return np.array([segment.table["client"], np.full(n, number), np.arange(n), sizes])


def _sizes(kinds: Sequence[Kind]) -> np.ndarray:
    """[n] bytes of records; of what no record can have, because it is larger than any file, a number that says so."""
    return np.array([min(kind.size, 1 << 62) for kind in kinds], np.int64)


class SavedStates(Mapping[int, dict[str, np.ndarray]]):
    """The newest state of every client in some segments: read when it is asked for, and checked."""

    def __init__(self, segments: tuple[Segment, ...] = ()):
        """Of two segments that have a client, the later one counts."""
        places = [_places(segment, i) for i, segment in enumerate(segments)]
        every = np.concatenate([np.empty((4, 0), np.int64), *reversed(places)], axis=1)
        _, first = np.unique(every[0], return_index=True)
        self._take(segments, every[:, first])
        self._last: dict[int, dict[str, np.ndarray]] = {}  # what was read last: its arrays are asked for one by one

    def _take(self, segments: tuple[Segment, ...], places: np.ndarray) -> None:
        """Hold `places` [4, n], and of the segments those that any of them is in."""
        alive = np.bincount(places[1], minlength=len(segments)) > 0
        if not alive.all():
            places[1] = (np.cumsum(alive) - 1)[places[1]]
        self.segments = tuple(compress(segments, alive))
        self._client, self._segment, self._row, self._size = self._places = places

    def and_then(self, segment: Segment) -> SavedStates:
        """With those of a segment that was written later."""
        later, places = _places(segment, len(self.segments)), self._places.copy()
        at = np.searchsorted(self._client, later[0])
        known = at < len(self._client)
        known[known] = self._client[at[known]] == later[0, known]
        places[:, at[known]] = later[:, known]
        if not known.all():
            places = np.insert(places, at[~known], later[:, ~known], axis=1)
        result = SavedStates()
        result._take((*self.segments, segment), places)
        return result

    def __getitem__(self, client: int) -> dict[str, np.ndarray]:
        """The client's arrays, read-only. Raises OSError and `DamagedFile`."""
        if client not in self._last:
            segment, row = self._place(client)
            ((kind, content, _),) = segment.contents(np.array([row]))
            self._last = {client: kind.arrays(content)}
        return self._last[client]

    def kind(self, client: int) -> Kind:
        """What there is of the client, without reading it."""
        segment, row = self._place(client)
        return segment.kinds[int(segment.table["kind"][row])]

    def _place(self, client: int) -> tuple[Segment, int]:
        i = int(np.searchsorted(self._client, client))
        if i == len(self._client) or self._client[i] != client:
            raise KeyError(client)
        return self.segments[self._segment[i]], int(self._row[i])

    def __contains__(self, client: object) -> bool:
        i = int(np.searchsorted(self._client, client))  # type: ignore[call-overload]
        return i < len(self._client) and bool(self._client[i] == client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._client.tolist())

    def __len__(self) -> int:
        return len(self._client)

    def clients_where(self, of: Callable[[Kind], bool]) -> list[int]:
        """The clients with states of such kinds, sorted."""
        known = np.array([of(kind) for segment in self.segments for kind in segment.kinds], bool)
        first = np.cumsum([0, *(len(segment.kinds) for segment in self.segments)])
        found: list[int] = self._client[known[first[self._segment] + self._entries("kind")]].tolist()
        return found

    def _entries(self, field: str) -> np.ndarray:
        """[n] a field of every client's entry."""
        found = np.empty(len(self._client), ENTRY[field])
        order = np.argsort(self._segment, kind="stable")
        bounds = np.searchsorted(self._segment[order], np.arange(len(self.segments) + 1))
        for segment, a, b in zip(self.segments, bounds, bounds[1:], strict=False):
            found[order[a:b]] = segment.table[field][self._row[order[a:b]]]
        return found

    def digests(self) -> np.ndarray:
        """[n] of DIGEST, sorted by client."""
        found = np.empty(len(self._client), DIGEST)
        found["client"], found["sha256"] = self._client, self._entries("sha256")
        return found

    def verify_newest(self) -> None:
        """Read all that counts of the newest segment. Raises OSError, and `DamagedFile` for what is not as it was
        written."""
        for segment in self.segments[-1:]:
            for _ in segment.contents(self._row[self._segment == len(self.segments) - 1]):
                pass

    def movable(self, writer: SegmentWriter) -> Iterator[tuple[int, Kind, bytes, bytes]]:
        """Records for `SegmentWriter.copy`, of segments that contain little current data, without those that the writer has.

        There are some where less than half of all bytes count, or there are many segments; and never more than the
        writer has written, so that a checkpoint costs at most twice its own bytes.
        """
        counting = np.bincount(self._segment, self._size, len(self.segments))
        written = sum(segment.entry["table"] for segment in self.segments)
        if written <= 2 * counting.sum() and len(self.segments) <= SEGMENTS:
            return
        order = np.argsort(counting, kind="stable")
        chosen = order[np.cumsum(counting[order]) <= max(MOVED_BYTES, writer.size)]
        own = np.array(writer.clients, np.int64)
        for i in chosen.tolist():
            segment = self.segments[i]
            rows = self._row[self._segment == i]
            rows = rows[~np.isin(segment.table["client"][rows], own)]
            for kind, content, row in segment.contents(rows):
                yield int(segment.table["client"][row]), kind, content, bytes(segment.table["sha256"][row])
