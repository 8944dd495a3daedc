"""What a run has written into its folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field
from typing_extensions import TypedDict

from raysim.paths import Anchored, UnsafeName
from raysim.report import NoData, NoTable, ReportError
from raysim.store import tables
from raysim.store.atomic import write_json
from raysim.store.documents import OPEN_SHAPE, checked, read_label, read_result, read_yaml
from raysim.store.lock import alone, is_held
from raysim.store.manifest import FAILED, read_manifest
from raysim.store.parts import DamagedTable

STACKS = ("client", "weighting", "server", "upload", "download", "attack")
MOST = {"layer": 10**5, "client": 10**7, "host": 10**6}  # that the numbers in these columns lie below, and not below 0
MOST_ROUNDS = 10**7  # that a table may have: figures have a place for each

Entry = Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=1)]  # of a catalogue: {name: fields}


class Data(TypedDict):
    """Of a run's configuration, what reports rely on."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    name: Entry
    partition: Entry


class Traits(TypedDict):
    """See `Data`."""

    speed: Entry
    up: Entry
    down: Entry
    latency: Entry
    availability: NotRequired[Entry]  # an older run has none


class Rounds(TypedDict):
    """See `Data`."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    total: int
    evaluate_every: NotRequired[Annotated[int, Field(gt=0, le=MOST_ROUNDS)]]
    selection: NotRequired[Entry]


class Settings(TypedDict):
    """See `Data`."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    seed: int
    data: Data
    rounds: Rounds
    client: list[Entry]
    weighting: list[Entry]
    server: list[Entry]
    upload: NotRequired[list[Entry]]  # an older run has none
    download: NotRequired[list[Entry]]
    attack: NotRequired[list[Entry]]
    clock: NotRequired[Traits]
    engine: Entry


CLOCK = tuple(f"clock.{trait}" for trait in Traits.__annotations__)
ENTRIES = ("data.name", "data.partition", "engine", "rounds.selection", *CLOCK)  # one entry of a catalogue each


class Header(TypedDict):
    """The metadata of the table `partition`."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    clients: Annotated[int, Field(ge=0, le=10**7)]
    classes: NotRequired[list[str]]
    data: NotRequired[str]


class RunFolder:
    """What a run has written into its folder, finished or still growing; `run["rounds"]` is a table.

    A table is read once, when it is first used. Raises `ReportError` where the folder is not that of a run.
    """

    folder = Anchored()

    def __init__(self, folder: str | Path):
        self.folder = folder
        path = self.folder / "config.yaml"
        try:
            # As JSON it has texts for keys, and neither objects nor anything that holds itself.
            self.config: dict[str, Any] = dict(checked(path, Settings, json.dumps(read_yaml(path))))
        except (FileNotFoundError, NotADirectoryError):
            raise ReportError(f"{self.folder}: holds no config.yaml, so it is not the folder of a run.") from None
        self._tables: dict[str, pa.Table] = {}
        self._columns: dict[str, dict[str, np.ndarray]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}): {self.stack}, {self.rounds_done} of {self.rounds} rounds"

    def __getitem__(self, table: str) -> pa.Table:
        """An Arrow table; `.to_pandas()` makes a data frame of it. Raises `NoTable` for a name that is not in `tables`."""
        if table not in self._tables:
            try:
                self._tables[table] = self._complete(table, tables.read(self.folder, table))
            except (FileNotFoundError, UnsafeName):
                raise NoTable(f"the run has no table {table!r}; there are {', '.join(self.tables)}.") from None
        return self._tables[table]

    def _complete(self, table: str, rows: pa.Table) -> pa.Table:
        """Only the rows of rounds that are in `rounds`, which is written last: of a round in progress, and of one at
        whose end the run was killed, other tables may hold a part."""
        if table == "rounds":
            numbers = pc.min_max(rows["round"]).as_py()
            if rows.num_rows and not 0 <= numbers["min"] <= numbers["max"] < MOST_ROUNDS:
                raise DamagedTable(f"{self.folder / table} is damaged: it has a round {numbers['max']}.")
        elif table in tables.TABLES:
            last = pc.max(self["rounds"]["round"]).as_py()
            rows = rows.filter(
                pc.and_(pc.less_equal(rows["round"], -1 if last is None else last), pc.greater_equal(rows["round"], 0))
            )
            for name in MOST.keys() & {*rows.column_names}:
                self._check_numbers(table, rows[name], name)
        return rows

    def _check_numbers(self, table: str, column: pa.ChunkedArray, name: str) -> None:
        """Raises `DamagedTable` where one stands for nothing: figures have a place for each."""
        if pa.types.is_integer(column.type):
            found = pc.min_max(column).as_py()
            for number in (found["min"], found["max"]):
                if number is not None and not 0 <= number < MOST[name]:
                    raise DamagedTable(f"{self.folder / table} is damaged: it has a {name} {number}.")

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables."""
        measures = sorted(f"measures/{path.name}" for path in (self.folder / "measures").glob("[a-z]*"))
        written = ["partition"] if (self.folder / "partition").is_dir() else []
        return (*tables.TABLES, *written, *measures)

    def columns(self, table: str) -> dict[str, np.ndarray]:
        """The columns of a table as [n] arrays; a null is NaN, or None in a column of texts."""
        if table not in self._columns:
            rows = self[table]
            self._columns[table] = {name: rows[name].to_numpy() for name in rows.column_names}
        return self._columns[table]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Versions, hardware and hashes."""
        return read_manifest(self.folder)

    @property
    def result(self) -> dict[str, Any] | None:
        """Scores, bytes and the hash of the model; None while the run is not finished."""
        return read_result(self.folder)

    @property
    def tags(self) -> tuple[str, ...]:
        """What `raysim tag` has put on the run."""
        return tuple(read_label(self.folder)["tags"])

    @property
    def note(self) -> str:
        """What `raysim note` has said of the run."""
        return read_label(self.folder)["note"]

    def label(self, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> None:
        """Put tags on the run, take some away, or replace its note. Nothing that it computes depends on them, and it may be
        running."""
        with alone(self.folder):
            said, gone = read_label(self.folder), {*remove}
            tags = [tag for tag in dict.fromkeys([*said["tags"], *add]) if tag not in gone]
            write_json(self.folder / "label.json", {"tags": tags, "note": said["note"] if note is None else note})

    @property
    def state(self) -> Literal["running", "finished", "failed", "stopped"]:
        """As far as the folder shows: a run on a machine whose locks do not reach ours counts as stopped."""
        if self.result is not None:
            return "finished"
        if is_held(self.folder / ".lock"):
            return "running"
        return "failed" if (self.folder / FAILED).exists() else "stopped"

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def rounds(self) -> int:
        """Rounds that the configuration sets."""
        return int(self.config["rounds"]["total"])

    @property
    def evaluate_every(self) -> int:
        """Of so many rounds the last is evaluated; and so is the last of all."""
        return int(self.config["rounds"].get("evaluate_every", 1))

    @property
    def rounds_done(self) -> int:
        """Rounds that are on disk."""
        return int(self["rounds"].num_rows)

    @property
    def played(self) -> int:
        """The last release's name of `rounds_done`, until the next one."""
        warnings.warn("Run.played is now Run.rounds_done", DeprecationWarning, stacklevel=2)
        return self.rounds_done

    @property
    def stack(self) -> str:
        """Names of the methods, as `raysim run` prints them."""
        named = [[next(iter(entry)) for entry in self.config.get(stack, [])] for stack in STACKS]
        return methods_line(*named)

    @cached_property
    def shares(self) -> Shares:
        """How many samples each client holds. Raises `NoData` where the run ended before it wrote its partition."""
        if "partition" not in self.tables:
            raise NoData("The run has not written its partition.")
        return Shares.of(self["partition"])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting by its path, in the order of the configuration. The entry of a stack names its methods."""
        found: dict[str, Any] = {}
        _flatten(self.config, "", found)
        return found


def methods_line(
    client: list[str], weighting: list[str], server: list[str], upload: list[str], download: list[str], attack: list[str]
) -> str:  # fmt: skip
    """The methods of a run by name, in one line."""
    others = ("up", upload), ("down", download), ("attack", attack)
    sent = [f"{way} {', '.join(names)}" for way, names in others if names]
    return " + ".join([*(client + weighting or ["fedavg"]), *server, *sent])


def _flatten(value: Any, path: str, found: dict[str, Any]) -> None:
    inside = f"{path}." if path else ""
    if path in STACKS:
        found[path] = " + ".join(next(iter(entry)) for entry in value)
        for entry in value:
            ((name, fields),) = entry.items()
            _flatten(fields, f"{inside}{name}", found)
    elif path in ENTRIES:
        ((name, fields),) = value.items()
        found[path] = name
        _flatten(fields, f"{inside}{name}", found)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _flatten(one, f"{inside}{key}", found)
    else:
        found[path] = value


def of_loss(words: str, runs: Iterable[RunFolder]) -> str:
    """`words` for a loss, with its unit where all runs have the same one."""
    units = {run.manifest.get("loss_unit", "nats") for run in runs}  # an older manifest has none: cross-entropies
    unit = units.pop() if len(units) == 1 else ""
    return f"{words} ({unit})" if unit else words


@dataclass(frozen=True)
class Shares:
    """How many samples each client holds, from the table `partition`."""

    data: str
    classes: tuple[str, ...]
    counts: np.ndarray | None  # [N, C] int64 training samples by client and class; None in runs older than the column
    sizes: dict[str, np.ndarray]  # by split (train, test, val), [N] int64

    @classmethod
    def of(cls, table: pa.Table) -> Shares:
        where = Path("the table partition")
        header = checked(where, Header, (table.schema.metadata or {}).get(b"raysim.partition", b""))
        clients, classes = header["clients"], tuple(header.get("classes", ()))
        needed = ("client", "split", *(["label"] if classes else []))
        if any(table.column_names.count(name) != 1 for name in needed):
            raise DamagedTable(f"{where} is damaged: it needs one column each of {', '.join(needed)}.")
        client, split = table["client"].to_numpy(), table["split"].to_numpy()
        label = table["label"].to_numpy() if classes else np.zeros(len(client), np.int64)
        for name, values, count in (("client", client, clients), ("label", label, max(1, len(classes)))):
            if values.dtype.kind not in "iu" or not ((values >= -1) & (values < count)).all():
                raise DamagedTable(f"{where} is damaged: a {name} is not one of {count}.")
        sizes = {
            name: np.bincount(client[(split == name) & (client >= 0)], minlength=clients)
            for name in ("train", "test", "val")
        }
        counts = None
        if classes:
            train = split == "train"
            cells = client[train] * len(classes) + label[train]
            counts = np.bincount(cells, minlength=clients * len(classes)).reshape(clients, len(classes))
        return cls(header.get("data", ""), classes, counts, sizes)
