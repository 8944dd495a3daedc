"""What a run writes down: Parquet tables that can be read while they grow, JSON files, and traces of single rounds.

    <run>/manifest.json
    <run>/rounds/part-000000-000199-000000.parquet      the same for every table of TABLES
    <run>/trace/round-0003/client-0007.safetensors

Every file appears whole or not at all. A table is a folder of parts and `read` unites them; a round that is in `rounds`
has its rows in all other tables. One process writes a run folder, any number read it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from torch import Tensor

FLUSH_SECONDS = 5.0  # how far readers may lag behind
MERGE = 16  # parts of one width become one: a long run keeps dozens of files, not thousands


# ---- tables ----------------------------------------------------------------------------------------------------------

_TYPES = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}


def _schema(*rows: tuple[str, str, str, str]) -> pa.Schema:
    """Rows of (name, type, unit, description); a `?` after the type marks a column that may be null."""
    return pa.schema(
        [
            pa.field(name, _TYPES[kind.rstrip("?")], kind.endswith("?"), {"unit": unit, "description": about})
            for name, kind, unit, about in rows
        ]
    )


_ROUND = ("round", "int", "round", "global round, from 0")
_CLIENT = ("client", "int", "id", "client id")

# `rounds` comes first: it is trimmed first and flushed last, so that a round it lists is complete everywhere.
TABLES: dict[str, pa.Schema] = {
    "rounds": _schema(
        _ROUND,
        ("accuracy", "float?", "fraction", "top-1 test accuracy of the global model; null if not evaluated this round"),
        ("loss", "float?", "nats", "mean test loss of the global model"),
        ("train_loss", "float?", "nats", "mean training loss of the cohort"),
        ("personal_accuracy_micro", "float?", "fraction", "personal models: correct samples over all samples"),
        ("personal_accuracy_macro", "float?", "fraction", "personal models: mean of the clients' accuracies"),
        ("personal_accuracy_std", "float?", "fraction", "personal models: standard deviation over clients"),
        ("personal_accuracy_worst10", "float?", "fraction", "personal models: mean of the worst tenth of the clients"),
        ("personal_auc", "float?", "fraction", "personal models: micro-averaged area under the ROC curve"),
        ("clients_ok", "int", "clients", "clients whose model was aggregated"),
        ("clients_failed", "int", "clients", "clients sampled but left out"),
        ("bytes_up", "int", "bytes", "algorithmic uplink of the round"),
        ("bytes_down", "int", "bytes", "algorithmic downlink of the round"),
        ("seconds", "float", "seconds", "the whole round"),
        ("seconds_train", "float?", "seconds", "client visit: initialise, train, measure"),
        ("seconds_plan", "float?", "seconds", "weights: statistics of the clients, and what is learned from them"),
        ("seconds_reduce", "float?", "seconds", "tree reduction"),
        ("seconds_server", "float?", "seconds", "server steps, with their own statistics"),
        ("seconds_observe", "float?", "seconds", "instruments"),
        ("seconds_evaluate", "float?", "seconds", "evaluation"),
        ("wall", "float", "seconds", "end of the round, since the run's start"),
    ),
    "clients": _schema(
        _ROUND,
        _CLIENT,
        ("samples", "int?", "samples", "training samples"),
        ("steps", "int?", "steps", "local optimiser steps taken"),
        ("loss_first", "float?", "nats", "mean training loss of the first local epoch"),
        ("loss_last", "float?", "nats", "mean training loss of the last local epoch"),
        ("weight", "float?", "fraction", "aggregation weight; null if the client was left out"),
        ("seconds", "float?", "seconds", "time of the client's visit"),
        ("status", "text", "", "'ok', or why the client was left out"),
        ("node", "text?", "", "node that trained the client"),
        ("host", "int?", "id", "client host (actor) that trained the client"),
        ("test_correct", "int?", "samples", "correct test samples of the client's own shard"),
        ("test_samples", "int?", "samples", "test samples of the client's own shard"),
        ("test_loss", "float?", "nats", "mean test loss on the client's own shard"),
    ),
    # Open: what a method reports per layer, such as fedlws.gamma, becomes a further nullable float column.
    "layers": _schema(
        _ROUND,
        ("layer", "int", "index", "position of the layer"),
        ("name", "text", "", "name of the layer"),
        ("parameters", "int", "floats", "parameters in the layer"),
        ("norm", "float", "1", "2-norm of the global layer after the round"),
        ("update_norm", "float", "1", "2-norm of the global layer's change in the round"),
    ),
    "traffic": _schema(
        _ROUND,
        _CLIENT,
        *(
            (f"{way}_{what}", "int", "bytes", f"algorithmic {way}link: {what}")
            for way in ("up", "down")
            for what in ("params", "buffers", "vectors", "scalars", "masks")
        ),
        ("bytes", "int", "bytes", "sum of the ten columns before"),
        ("transport_up", "int?", "bytes", "payload really serialised on its way from the client's process"),
        ("transport_down", "int?", "bytes", "payload really serialised on its way to the client's process"),
    ),
    "timeline": _schema(
        _ROUND,
        ("host", "int", "id", "client host (actor)"),
        ("node", "text", "", "node of the host"),
        ("phase", "text", "", "what the host did"),
        ("start", "float", "seconds", "since the run's start"),
        ("stop", "float", "seconds", "since the run's start"),
    ),
    "notes": _schema(
        _ROUND,
        ("method", "text", "", "method that reports"),
        ("name", "text", "", "what it reports"),
        ("client", "int?", "id", "client the value belongs to, if any"),
        ("layer", "text?", "", "layer the value belongs to, if any"),
        ("index", "int?", "index", "further position, if any"),
        ("value", "float", "1", "the value"),
    ),
    "personal": _schema(
        _ROUND,
        _CLIENT,
        ("correct", "int", "samples", "correct test samples of the client's shard, by its personal model"),
        ("samples", "int", "samples", "test samples of the client's shard"),
        ("loss", "float?", "nats", "mean test loss on the client's shard"),
        ("auc", "float?", "fraction", "area under the ROC curve, micro average over the classes"),
    ),
}  # fmt: skip

_OPEN = frozenset({"layers"})
_KNOWN = {table: frozenset(schema.names) for table, schema in TABLES.items()}
_REQUIRED = {table: frozenset(field.name for field in schema if not field.nullable) for table, schema in TABLES.items()}


# ---- whole files -----------------------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; at the end it is on disk and renamed to `path`. After an error nothing has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # hidden: no reader's pattern matches it
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)  # or a power cut may forget the rename


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as JSON, atomically. TypeError if it is not JSON; tuples come back as lists, keys as strings."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor | np.ndarray]) -> str:
    """Write tensors under their names as a safetensors file, atomically. Returns the file's SHA-256.

    Views, shared storage and any device or memory format are fine: what is written is a contiguous copy of each.
    """
    import torch
    from safetensors.torch import save

    if "__metadata__" in tensors:  # safetensors would write a file that nobody can read
        raise ValueError("'__metadata__' cannot be the name of a tensor")
    alone = {
        name: torch.from_numpy(np.array(tensor, order="C"))
        if isinstance(tensor, np.ndarray)
        else tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    content = save(alone)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def write_table(folder: Path, table: str, rows: pa.Table) -> None:
    """Write a table that is known as a whole, such as the partition; `read` finds it. Replaces what was there."""
    with replacing(folder / table / "part-000000-000000-000000.parquet") as temporary:
        pq.write_table(rows, temporary)


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A file of a table: rounds `first` to `last`, from flushes number `start` to `stop` (several once merged)."""

    path: Path
    first: int
    last: int
    start: int
    stop: int

    @classmethod
    def at(cls, folder: Path, first: int, last: int, start: int, stop: int) -> _Part:
        flushes = f"{start:06d}" if start == stop else f"{start:06d}-{stop:06d}"
        return cls(folder / f"part-{first:06d}-{last:06d}-{flushes}.parquet", first, last, start, stop)

    @property
    def width(self) -> int:
        return self.stop - self.start + 1


_PART_NAME = re.compile(r"part-(\d+)-(\d+)-(\d+)(?:-(\d+))?\.parquet")


def _files(folder: Path) -> list[_Part]:
    """All part files, in the order of their flushes; the wider of two that start together comes first."""
    names = [match for path in folder.glob("part-*.parquet") if (match := _PART_NAME.fullmatch(path.name))]
    parts = [
        _Part(folder / match[0], int(match[1]), int(match[2]), int(match[3]), int(match[4] or match[3]))
        for match in names
    ]
    return sorted(parts, key=lambda part: (part.start, -part.stop))


def _parts(folder: Path) -> list[_Part]:
    """The files that make up the table. A part inside another's range was merged into it and waits for its removal."""
    parts: list[_Part] = []
    for part in _files(folder):
        if not parts or part.stop > parts[-1].stop:
            parts.append(part)
    return parts


@contextmanager
def _opened(part: _Part) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(part.path) as file:  # not read_table, which takes a folder named a=1 for a column
            yield file
    except pa.ArrowInvalid as error:
        raise DamagedTable(
            f"{part.path} is damaged: {error}. Without that file all goes on, but for its rows."
        ) from None


def _load(parts: Iterable[_Part], schema: pa.Schema | None) -> pa.Table:
    tables = [] if schema is None else [schema.empty_table()]
    for part in parts:
        with _opened(part) as file:
            tables.append(file.read())
    return pa.concat_tables(tables, promote_options="default")


def read(folder: Path, table: str) -> pa.Table:
    """A table of the run in `folder`, sorted by round, rows of a round in the order they were added.

    Safe while the run writes. A table without rows yet is empty, with its schema. Raises FileNotFoundError for a table
    that is neither in TABLES nor there.
    """
    while True:
        parts = _parts(folder / table)
        if not parts and table not in TABLES:
            raise FileNotFoundError(f"the run has no table {table!r}")
        try:
            rows = _load(parts, TABLES.get(table))
        except FileNotFoundError:  # merged away after we looked
            continue
        # A listing is no snapshot: one taken during a merge can miss both the old parts and the new one.
        now = _parts(folder / table)
        if set(parts) <= set(now) and (parts or not now):
            return rows.sort_by("round") if "round" in rows.column_names else rows


# ---- writing ---------------------------------------------------------------------------------------------------------


class DamagedTable(ValueError):
    """A file of a table is not as it was written."""


class Recorder:
    """Writes the tables of one run into its folder.

    The run is about to play round `start_round`: rows of that and later rounds are left-overs of an interrupted attempt
    and are removed (at 0, all of them). No row of an earlier round is lost or doubled, wherever a crash strikes.
    """

    def __init__(self, folder: Path, start_round: int = 0):
        """Raises `DamagedTable` where an earlier round's rows cannot be read."""
        self.folder = Path(folder)
        self._buffers: dict[str, list[tuple[int, dict[str, Any]]]] = {table: [] for table in TABLES}
        self._flushed = time.monotonic()
        for table in TABLES:
            self._trim(self.folder / table, start_round)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, table: str, /, **columns: Any) -> None:
        """Append rows. Sequences and [n] arrays give n rows, scalars are repeated; all scalars give one row.

        Missing nullable columns become null (NaN stays NaN). In `layers`, unknown columns become float columns of their
        own. Values are copied. Raises ValueError for unknown or missing columns and unequal lengths; wrong types show
        at the flush.
        """
        if table not in TABLES:
            raise ValueError(f"unknown table {table!r}; there are {', '.join(TABLES)}")
        if missing := _REQUIRED[table] - columns.keys():
            raise ValueError(f"table {table}: missing {', '.join(sorted(missing))}")
        if table not in _OPEN and (unknown := columns.keys() - _KNOWN[table]):
            raise ValueError(f"table {table} has no column {', '.join(sorted(unknown))}")
        values = {name: _plain(value) for name, value in columns.items()}
        lengths = {len(value) for value in values.values() if type(value) is list}
        if len(lengths) > 1:
            sizes = {name: len(value) for name, value in values.items() if type(value) is list}
            raise ValueError(f"table {table}: columns of unequal length: {sizes}")
        self._buffers[table].append((lengths.pop() if lengths else 1, values))

    def maybe_flush(self) -> None:
        """Flush if the last is FLUSH_SECONDS ago. Call it between rounds, so that readers see whole rounds."""
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last flush. Raises ValueError, naming table and column, for a wrong type."""
        for table in reversed(TABLES):
            if self._buffers[table]:
                rows = _assemble(table, self._buffers[table])
                if rows.num_rows:
                    self._append(self.folder / table, rows)
                self._buffers[table] = []
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush, and leave one file a table. The recorder stays usable."""
        self.flush()
        for table, schema in TABLES.items():
            parts = _parts(self.folder / table)
            if len(parts) > 1:
                self._merge(parts, schema)

    def _append(self, folder: Path, rows: pa.Table) -> None:
        bounds = pc.min_max(rows["round"]).as_py()
        if bounds["min"] < 0:
            raise ValueError(f"table {folder.name}: rounds count from 0, not {bounds['min']}")
        parts = _parts(folder)
        number = parts[-1].stop + 1 if parts else 0
        part = _Part.at(folder, bounds["min"], bounds["max"], number, number)
        with replacing(part.path) as temporary:
            pq.write_table(rows, temporary)
        parts.append(part)
        while len(parts) >= MERGE and len({part.width for part in parts[-MERGE:]}) == 1:
            parts[-MERGE:] = [self._merge(parts[-MERGE:], TABLES[folder.name])]

    @staticmethod
    def _merge(parts: Sequence[_Part], schema: pa.Schema) -> _Part:
        first, last = min(part.first for part in parts), max(part.last for part in parts)
        merged = _Part.at(parts[0].path.parent, first, last, parts[0].start, parts[-1].stop)
        with replacing(merged.path) as temporary:
            pq.write_table(_load(parts, schema), temporary)
        for part in parts:  # readers have ignored them since the rename
            part.path.unlink()
        return merged

    @staticmethod
    def _trim(folder: Path, start_round: int) -> None:
        for temporary in folder.glob(".*.tmp"):
            temporary.unlink()
        parts = _parts(folder)
        for superseded in set(_files(folder)) - set(parts):
            superseded.path.unlink()
        for part in parts:
            if part.first >= start_round:
                part.path.unlink()
                continue
            with _opened(part):  # what is damaged shows now, not when the run ends
                pass
            if part.last >= start_round:
                rows = _load([part], None)
                rows = rows.filter(pc.less(rows["round"], start_round))
                # First the content, under the old name, then the name: at no time is a row there twice or not at all.
                with replacing(part.path) as temporary:
                    pq.write_table(rows, temporary)
                last = pc.max(rows["round"]).as_py()
                part.path.rename(_Part.at(folder, part.first, last, part.start, part.stop).path)


def _plain(value: Any) -> Any:
    """A Python scalar, or a list that nobody else holds."""
    dimensions = getattr(value, "ndim", None)
    if dimensions is None:
        return value if isinstance(value, str) or not hasattr(value, "__len__") else list(value)
    if dimensions > 1:
        raise ValueError(f"a column has one dimension, not shape {tuple(value.shape)}")
    return value.tolist()


def _assemble(table: str, chunks: Sequence[tuple[int, Mapping[str, Any]]]) -> pa.Table:
    schema = TABLES[table]
    for name in dict.fromkeys(name for _, columns in chunks for name in columns):
        if name not in _KNOWN[table]:
            about = {"unit": "1", "description": "reported by a method"}
            schema = schema.append(pa.field(name, pa.float64(), metadata=about))
    arrays = []
    for field in schema:
        values: list[Any] = []
        for rows, columns in chunks:
            value = columns.get(field.name)
            values.extend(value if type(value) is list else repeat(value, rows))
        try:
            # Arrow cuts 3.5 to 3 when it builds integers, and refuses when it casts to them.
            integer = pa.types.is_integer(field.type)
            arrays.append(pa.array(values).cast(field.type) if integer else pa.array(values, type=field.type))
        except pa.ArrowException as error:
            raise ValueError(f"table {table}, column {field.name}: {error}") from error
        if not field.nullable and arrays[-1].null_count:
            raise ValueError(f"table {table}, column {field.name}: must not be null")
    return pa.Table.from_arrays(arrays, schema=schema)


# ---- manifest --------------------------------------------------------------------------------------------------------

_PACKAGES = ("raysim", "torch", "torchvision", "ray", "numpy", "pyarrow", "safetensors", "scikit-learn")


class DamagedManifest(ValueError):
    """A run's manifest that cannot be read."""


def begun(folder: Path) -> dict[str, Any]:
    """The `manifest` of the run in `folder`; empty where there is none yet. Raises `DamagedManifest`."""
    path = folder / "manifest.json"
    try:
        written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        written = None
    if not isinstance(written, dict):
        raise DamagedManifest(f"{path} is damaged: it says what the run began with. Put it back, or start another run.")
    return written


def manifest(config_hash: str, seed: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What else decides a run's bits and speed: versions and hardware, as JSON. Names no host, user or path."""
    import torch

    versions: dict[str, str] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # with its build, which the package's metadata leaves out
    return {
        "config_hash": config_hash,
        "seed": seed,
        "versions": versions,
        "hardware": {
            "os": platform.platform(),
            "cpu": _cpu(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # kernels, and so low bits, depend on it
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "gpus": _gpus(),
        },
        **extra,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _gpus() -> list[str]:
    """Names and driver versions. Not from torch: Ray hides GPUs from a driver that holds none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]


# ---- traces ----------------------------------------------------------------------------------------------------------


class Trace:
    """Every tensor of chosen rounds, so that a round can be recomputed by hand.

    `rounds` is 'rounds' for all of them, or the rounds wanted. Files are `trace/round-0003/<name>.safetensors` in the
    run folder, with names such as before, after, client-0007, client-0007.init, client-0007.state.before.
    """

    def __init__(self, folder: Path, rounds: Literal["rounds"] | Collection[int] = ()):
        if isinstance(rounds, str) and rounds != "rounds":
            raise ValueError(f"trace: {rounds!r} is neither 'rounds' nor a list of rounds")
        self.folder = Path(folder) / "trace"
        self._rounds = None if isinstance(rounds, str) else frozenset(rounds)

    def wants(self, t: int) -> bool:
        return self._rounds is None or t in self._rounds

    def path(self, t: int, name: str) -> Path:
        return self.folder / f"round-{t:04d}" / f"{name}.safetensors"

    def write(self, t: int, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors under their `state_dict` names."""
        write_tensors(self.path(t, name), tensors)

    def write_arrays(self, t: int, name: str, arrays: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Write integer arrays of unequal lengths, such as the sample indices of every step, for `read_arrays`.

        The file holds `values`, all of them in a row, and `offsets` [n + 1]: array i is
        values[offsets[i]:offsets[i + 1]]. Both are int64.
        """
        parts = [np.asarray(array, dtype=np.int64) for array in arrays]
        values = np.concatenate([np.empty(0, np.int64), *parts])
        offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        write_tensors(self.path(t, name), {"values": values, "offsets": offsets})


def read_arrays(path: Path) -> list[np.ndarray]:
    """The int64 arrays that `Trace.write_arrays` wrote."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return np.split(tensors["values"], tensors["offsets"][1:-1]) if len(tensors["offsets"]) > 1 else []
