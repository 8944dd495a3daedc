"""The tables of a run: what each column is, the one writer and the one reader.

A run folder holds each of TABLES as a folder of Parquet parts (see `store.parts`). They can be read while they grow. A
round that is in `rounds` has its rows in all other tables.

To add a column, add its row to a schema; to add a table, add a schema; to time a further phase of the round, add it to
PHASES. Writer, reader and report find them there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from raysim.clock import CLOCK, Clock
from raysim.paths import below
from raysim.store import parts
from raysim.store.atomic import subfolder

FLUSH_SECONDS = 5.0  # how far readers may lag behind

_TYPES = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}


def schema(*columns: tuple[str, str, str, str]) -> pa.Schema:
    """A table's schema, from each column's name, type, unit and description. A `?` after the type: it may be null."""
    return pa.schema(
        [
            pa.field(name, _TYPES[kind.rstrip("?")], kind.endswith("?"), {"unit": unit, "description": about})
            for name, kind, unit, about in columns
        ]
    )


PHASES = {
    "train": "the clients: initialise, train, measure",
    "plan": "weights: statistics of the clients, and what is learned from them",
    "reduce": "tree reduction",
    "server": "server steps, with their own statistics",
    "observe": "instruments",
    "evaluate": "evaluation",
}
"""The phases of a round, in their order, and what each is. `rounds` has a column `seconds_<phase>` of each."""

_ROUND = ("round", "int", "round", "global round, from 0")
_CLIENT = ("client", "int", "id", "client id")
_LOSS = "nats, or the unit of the task's loss"  # the manifest's loss_unit

# `rounds` comes first: it is trimmed first and flushed last, so that a round it lists is complete everywhere.
TABLES: dict[str, pa.Schema] = {
    "rounds": schema(
        _ROUND,
        ("accuracy", "float?", "fraction", "top-1 test accuracy of the global model; null if the round or task has none"),
        ("loss", "float?", _LOSS, "mean test loss of the global model"),
        ("train_loss", "float?", _LOSS, "mean training loss of the cohort"),
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
        *((f"seconds_{phase}", "float?", "seconds", about) for phase, about in PHASES.items()),
        ("wall", "float", "seconds", "end of the round, since the run's start"),
        ("sim_idle", "float?", "simulated seconds", "before the round, until enough clients were available; null without a clock"),
        ("sim_seconds", "float?", "simulated seconds", "the whole round; null without a clock"),
        ("sim_clock", "float?", "simulated seconds", "end of the round, since the run's start; null without a clock"),
    ),
    "clients": schema(
        _ROUND,
        _CLIENT,
        ("samples", "int?", "samples", "training samples"),
        ("steps", "int?", "steps", "local optimiser steps taken"),
        ("loss_first", "float?", _LOSS, "mean training loss of the first local epoch"),
        ("loss_last", "float?", _LOSS, "mean training loss of the last local epoch"),
        ("weight", "float?", "fraction", "aggregation weight; null if the client was left out or sent nothing"),
        ("seconds", "float?", "seconds", "to initialise, train and measure the client"),
        ("status", "text", "", "'ok', or why the client was left out; 'asked': for its loss, and not chosen"),
        ("attack", "text?", "", "attacks of a malicious client; null: honest"),
        ("utility", "float?", "", "what the selection chose the client by, such as its loss"),
        ("selected_by", "text?", "", "why the selection chose it"),
        ("version", "int?", "index", "round whose model the client was sent, where that may be an older one"),
        ("sim_start", "float?", "simulated seconds", "when it was sent the model, since the run's start; null without a clock"),
        ("sim_down", "float?", "simulated seconds", "latency, and to receive, as far as it came; null without a clock"),
        ("sim_train", "float?", "simulated seconds", "to train; null without a clock"),
        ("sim_up", "float?", "simulated seconds", "to send; null without a clock"),
        ("node", "text?", "", "node that trained the client"),
        ("host", "int?", "id", "client host (actor) that trained the client"),
        ("test_correct", "int?", "samples", "correct test samples of the client's own shard"),
        ("test_samples", "int?", "samples", "test samples of the client's own shard"),
        ("test_loss", "float?", _LOSS, "mean test loss on the client's own shard"),
    ),
    "layers": schema(
        _ROUND,
        ("layer", "int", "index", "position of the layer"),
        ("name", "text", "", "name of the layer"),
        ("parameters", "int", "floats", "parameters in the layer"),
        ("norm", "float", "1", "2-norm of the global layer after the round"),
        ("update_norm", "float", "1", "2-norm of the global layer's change in the round"),
    ),
    "traffic": schema(
        _ROUND,
        _CLIENT,
        *(
            (f"{way}_{what}", "int", "bytes", f"algorithmic {way}link: {what}")
            for way in ("up", "down")
            for what in ("params", "buffers", "vectors", "scalars", "masks")
        ),
        *(
            (f"{way}_{what}", "int?", "bytes", f"algorithmic {way}link: {what} of encoded values")
            for way in ("up", "down")
            for what in ("positions", "scales")
        ),
        ("bytes", "int", "bytes", "sum of the columns before"),
        ("transport_up", "int?", "bytes", "payload really serialised on its way from the client's process"),
        ("transport_down", "int?", "bytes", "not measured: always null"),
    ),
    "timeline": schema(
        _ROUND,
        ("host", "int", "id", "client host (actor)"),
        ("node", "text", "", "node of the host"),
        ("phase", "text", "", "what the host did"),
        ("start", "float", "seconds", "since the run's start"),
        ("stop", "float", "seconds", "since the run's start"),
    ),
    "notes": schema(
        _ROUND,
        ("method", "text", "", "method that reports"),
        ("name", "text", "", "what it reports"),
        ("client", "int?", "id", "client the value belongs to, if any"),
        ("layer", "text?", "", "layer the value belongs to, if any"),
        ("index", "int?", "index", "further position, if any"),
        ("value", "float", "1", "the value"),
    ),
    "events": schema(
        _ROUND,
        ("of", "text", "", "what failed: client, actor, driver or run"),
        ("client", "int?", "id", "the client, if it was one"),
        ("node", "text?", "", "node where it happened, if known"),
        ("message", "text", "", "what went wrong, and what was done about it"),
    ),
    "personal": schema(
        _ROUND,
        _CLIENT,
        ("correct", "int?", "samples", "correct test samples of the client's shard, by its personal model"),
        ("samples", "int", "samples", "test samples of the client's shard"),
        ("loss", "float?", _LOSS, "mean test loss on the client's shard"),
        ("auc", "float?", "fraction", "area under the ROC curve, micro average over the classes"),
    ),
}  # fmt: skip


class OpenColumns(NamedTuple):
    """A table that takes further columns, nullable floats, whose names begin with `prefix`."""

    prefix: str
    unit: str
    about: str


OPEN = {
    "rounds": OpenColumns("metric.", "", "a metric of the task"),
    "layers": OpenColumns("", "1", "reported by a method"),
}
"""The tables with open columns: `rounds` one for each further metric, such as metric.mae, and `layers` one for each
quantity that a method reports by layer, such as fedlws.gamma."""


def add_column(table: str, name: str, kind: str, unit: str, about: str) -> None:
    """Give `table` a further column, here and for all that read it; `kind` is int, float or text, with a `?` where it may
    be null. Raises KeyError for an unknown table and ValueError for a name that is taken."""
    if name in TABLES[table].names:
        raise ValueError(f"the table {table} has a column {name!r} already")
    TABLES[table] = pa.schema([*TABLES[table], *schema((name, kind, unit, about))])


def add_phase(name: str, about: str) -> None:
    """Give the round's clock a further phase, and `rounds` its column. Raises ValueError for a name that is taken."""
    add_column("rounds", f"seconds_{name}", "float?", "seconds", about)
    PHASES[name] = about


def write_table(folder: Path, table: str, rows: pa.Table) -> None:
    """Write a table that is known as a whole, such as the partition; `read` finds it. Replaces an earlier one."""
    below(folder, table)
    inside = Path(folder)
    inside.mkdir(parents=True, exist_ok=True)
    for name in table.split("/"):
        inside = subfolder(inside / name)
    parts.write(parts.Part.at(inside, 0, 0, 0, 0), rows)


def read(folder: Path, table: str) -> pa.Table:
    """A table of the run in `folder`, sorted by round; rows of a round are in the order in which they were added.

    Safe while the run writes. A table that has no rows yet is empty, with its schema. Raises FileNotFoundError for one
    that is neither in TABLES nor in the folder.
    """
    rows = parts.load_all(below(folder, table), TABLES.get(table))
    if rows is None:
        raise FileNotFoundError(f"the run has no table {table!r}")
    return rows.sort_by("round") if "round" in rows.column_names else rows


def check_complete(folder: Path, rounds: int) -> None:
    """Raises `DamagedTable` where a table lacks rows of the first `rounds` rounds: `traffic` has some of each in which bytes
    were sent, the others have some of all."""
    sums = read(folder, "rounds")
    every = {*range(rounds)}
    sent = {*sums.filter(pc.greater(pc.add(sums["bytes_up"], sums["bytes_down"]), 0))["round"].to_pylist()}
    for table, due in (("layers", every), ("clients", every), ("rounds", every), ("traffic", every & sent)):
        there = {*read(folder, table)["round"].unique().to_pylist()}
        if missing := sorted(due - there):
            raise parts.DamagedTable(
                f"{folder / table}: the rows of {len(missing)} of {rounds} rounds are missing, the first of round "
                f"{missing[0]}. They were removed and cannot be written again: start another run."
            )


class Recorder:
    """Writes the tables of one run into its folder.

    The run is about to start round `start_round`. Rows of that and later rounds are left over from an interrupted
    attempt and are removed. No row of an earlier round is lost or doubled, wherever a crash strikes.
    """

    def __init__(self, folder: Path, start_round: int = 0, clock: Clock = CLOCK):
        """Make the folder, if need be. Raises `DamagedTable` where an earlier round's rows cannot be read."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._buffers: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
        self._flushed = self._clock.now()
        for table in TABLES:
            parts.trim(self.folder / table, start_round)
        # A table gets its folder with its first rows, and only then: should it vanish later, its rows are lost.
        self._begun = {table for table in TABLES if (self.folder / table).is_dir()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, table: str, /, **columns: Any) -> None:
        """Append rows. Sequences and [n] arrays give n rows, and scalars are repeated; only scalars give one row.

        A nullable column that is not given becomes null (NaN stays NaN). Values are copied. Raises ValueError for
        unknown or missing columns and for unequal lengths; a wrong type shows at the flush.
        """
        if table not in TABLES:
            raise ValueError(f"unknown table {table!r}; there are {', '.join(TABLES)}")
        known = TABLES[table]
        if missing := {field.name for field in known if not field.nullable} - columns.keys():
            raise ValueError(f"table {table}: missing {', '.join(sorted(missing))}")
        further = columns.keys() - set(known.names)
        if unknown := [name for name in further if table not in OPEN or not name.startswith(OPEN[table].prefix)]:
            raise ValueError(f"table {table} has no column {', '.join(sorted(unknown))}")
        values = {name: _plain(value) for name, value in columns.items()}
        lengths = {len(value) for value in values.values() if type(value) is list}
        if len(lengths) > 1:
            sizes = {name: len(value) for name, value in values.items() if type(value) is list}
            raise ValueError(f"table {table}: columns of unequal length: {sizes}")
        self._buffers[table].append((lengths.pop() if lengths else 1, values))

    def maybe_flush(self) -> None:
        """Flush if the last flush is FLUSH_SECONDS ago. Call it between rounds, so that readers see whole rounds."""
        if self._clock.now() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last flush. Raises ValueError, naming table and column, for a wrong type, and
        `FolderGone` where a table's folder is there no more."""
        # Emptied first: what fails is not tried again as the run closes.
        added, self._buffers = self._buffers, defaultdict(list)
        for table in reversed(TABLES):
            if table in added and (rows := _assemble(table, added[table])).num_rows:
                if table not in self._begun:
                    subfolder(self.folder / table)
                    self._begun.add(table)
                parts.append(self.folder / table, rows, TABLES[table])
        self._flushed = self._clock.now()

    def close(self) -> None:
        """Flush, and leave one file a table. The recorder stays usable."""
        self.flush()
        for table, known in TABLES.items():
            parts.merge_all(self.folder / table, known)


def _plain(value: Any) -> Any:
    """A Python scalar, or a new list."""
    dimensions = getattr(value, "ndim", None)
    if dimensions is None:
        return value if isinstance(value, str) or not hasattr(value, "__len__") else list(value)
    if dimensions > 1:
        raise ValueError(f"a column has one dimension, not shape {tuple(value.shape)}")
    return value.tolist()


def _assemble(table: str, chunks: Sequence[tuple[int, Mapping[str, Any]]]) -> pa.Table:
    fields = list(TABLES[table])
    for name in dict.fromkeys(name for _, columns in chunks for name in columns):
        if name not in TABLES[table].names:
            unit, about = OPEN[table].unit, OPEN[table].about
            fields.append(pa.field(name, pa.float64(), metadata={"unit": unit, "description": about}))
    arrays = []
    for field in fields:
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
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))
