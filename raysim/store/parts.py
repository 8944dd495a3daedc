"""The files of a table: a folder of Parquet parts, one for each flush, merged sixteen by sixteen.

    part-000200-000204-000041.parquet           rounds 200 to 204, written by flush 41
    part-000000-000199-000000-000015.parquet    rounds 0 to 199, merged from the parts of flushes 0 to 15

A part whose flushes lie inside another's was merged into it; it does not count, and waits for its removal. One process
writes the folder, any number read it.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from raysim.lazy import pc, pq
from raysim.store.atomic import own_folder, remove, replacing
from raysim.store.documents import DamagedFile

MERGE = 16
"""So many neighbouring parts of one width become one. Measured with a run that flushes each of 1,500 rounds: without
merging it leaves 9,000 files of 47 MB in all, and a table takes 1.2 to 2.3 s to read (by pyarrow.dataset 1.0 to 2.3 s);
with merging these are 180 files, 1 MB, and 0.02 to 0.04 s."""


class DamagedTable(DamagedFile):
    """A file of a table is not as it was written."""


class Part(NamedTuple):
    """A file with the rows of rounds `first` to `last`, from the flushes `start` to `stop` (one, until it is merged)."""

    path: Path
    first: int
    last: int
    start: int
    stop: int

    @classmethod
    def at(cls, folder: Path, first: int, last: int, start: int, stop: int) -> Part:
        flushes = f"{start:06d}" if start == stop else f"{start:06d}-{stop:06d}"
        return cls(folder / f"part-{first:06d}-{last:06d}-{flushes}.parquet", first, last, start, stop)

    @property
    def width(self) -> int:
        return self.stop - self.start + 1


_NAME = re.compile(r"part-(\d+)-(\d+)-(\d+)(?:-(\d+))?\.parquet")


def _files(folder: Path) -> list[Part]:
    """All part files in the order of their flushes. Of two that start with the same flush, the wider comes first."""
    names = [match for path in folder.glob("part-*.parquet") if (match := _NAME.fullmatch(path.name))]
    parts = [
        Part(folder / match[0], int(match[1]), int(match[2]), int(match[3]), int(match[4] or match[3]))
        for match in names
    ]
    return sorted(parts, key=lambda part: (part.start, -part.stop))


def parts_of(folder: Path) -> list[Part]:
    """The parts that make up the table, in the order of their flushes."""
    parts: list[Part] = []
    for part in _files(folder):
        if not parts or part.stop > parts[-1].stop:
            parts.append(part)
    return parts


@contextmanager
def _opened(part: Part) -> Iterator[pq.ParquetFile]:
    irregular = DamagedTable(f"{part.path} is not a regular file.")
    try:
        if not stat.S_ISREG(part.path.stat().st_mode):
            raise irregular
        with pq.ParquetFile(part.path) as file:  # not read_table, which takes a folder named a=1 for a column
            yield file
    except FileNotFoundError:
        if part.path.is_symlink():  # to nothing; other files were merged away
            raise irregular from None
        raise
    except (pa.ArrowException, OSError) as error:
        raise DamagedTable(f"{part.path} is damaged: {error}. Remove it to go on without its rows.") from None


def load(parts: Iterable[Part], schema: pa.Schema | None) -> pa.Table:
    """The rows of all parts. They have the columns of `schema` and those that any part has besides."""
    tables = [] if schema is None else [schema.empty_table()]
    required = [field.name for field in schema or () if not field.nullable]
    for part in parts:
        with _opened(part) as file:
            rows = file.read()
            try:
                tables = [pa.concat_tables([*tables, rows], promote_options="default")]
            except pa.ArrowException as error:
                raise DamagedTable(f"{part.path} is damaged: {error}.") from None
            if empty := [name for name in required if tables[0][name].null_count]:
                raise DamagedTable(f"{part.path} is damaged: its column {empty[0]} has gaps.")
    return tables[0]


def load_all(folder: Path, schema: pa.Schema | None) -> pa.Table | None:
    """The rows of the whole table as of one moment, also while it is written; see `load`. None: no parts, no schema."""
    while True:
        parts = parts_of(folder)
        if not parts and schema is None:
            return None
        try:
            rows = load(parts, schema)
        except FileNotFoundError:  # merged away after we looked
            continue
        # A listing is no snapshot: one taken during a merge can miss both the old parts and the new one.
        now = parts_of(folder)
        if set(parts) <= set(now) and (parts or not now):
            return rows


def write(part: Part, rows: pa.Table) -> None:
    """Write the file of `part`, atomically."""
    with replacing(part.path) as temporary:
        pq.write_table(rows, temporary)


def append(folder: Path, rows: pa.Table, schema: pa.Schema) -> None:
    """Write the rows of a flush as the next part. Raises ValueError for a negative round."""
    bounds = pc.min_max(rows["round"]).as_py()
    if bounds["min"] < 0:
        raise ValueError(f"table {folder.name}: rounds count from 0, not {bounds['min']}")
    parts = parts_of(folder)
    flush = parts[-1].stop + 1 if parts else 0
    parts.append(Part.at(folder, bounds["min"], bounds["max"], flush, flush))
    write(parts[-1], rows)
    while len(parts) >= MERGE and len({part.width for part in parts[-MERGE:]}) == 1:
        parts[-MERGE:] = [_merge(parts[-MERGE:], schema)]


def merge_all(folder: Path, schema: pa.Schema) -> None:
    """Leave one file."""
    parts = parts_of(folder)
    if len(parts) > 1:
        _merge(parts, schema)


def _merge(parts: Sequence[Part], schema: pa.Schema) -> Part:
    first, last = min(part.first for part in parts), max(part.last for part in parts)
    merged = Part.at(parts[0].path.parent, first, last, parts[0].start, parts[-1].stop)
    write(merged, load(parts, schema))
    for part in parts:  # readers have ignored them since the merged file appeared
        remove(part.path)
    return merged


def trim(folder: Path, start_round: int) -> None:
    """Remove the rows of `start_round` and later rounds, and what an interrupted writer left behind.

    Wherever this is interrupted, no row of an earlier round is lost or doubled. Raises `DamagedTable` where an earlier
    round's rows cannot be read.
    """
    if own_folder(folder):
        for temporary in folder.glob(".part-*.parquet.tmp"):
            remove(temporary)
    parts = parts_of(folder)
    for superseded in set(_files(folder)) - set(parts):
        remove(superseded.path)
    for part in parts:
        if part.first >= start_round:
            remove(part.path)
            continue
        with _opened(part):  # a damaged file shows now, not when the run ends
            pass
        if part.last >= start_round:
            rows = load([part], None)
            rows = rows.filter(pc.less(rows["round"], start_round))
            # First the content under the old name, then the name: at no time is a row there twice or not at all.
            write(part, rows)
            last = pc.max(rows["round"]).as_py()
            part.path.rename(Part.at(folder, part.first, last, part.start, part.stop).path)
