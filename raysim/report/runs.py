"""Runs as they lie on disk, and which of them are the same but for the seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import yaml

from raysim.report import NoData, ReportError, need
from raysim.store import tables

if TYPE_CHECKING:
    from raysim.report.canvas import Canvas

STACKS = ("client", "weighting", "server")
ENTRIES = ("data.name", "data.partition", "engine")  # settings that are one entry of a catalogue
BESIDE = {"preset", "name", "seed", "record", "data.root"}  # settings that do not tell two methods apart


class Run:
    """The folder of a run, finished or still growing; `run["rounds"]` is a table, `run.figure("accuracy")` a figure.

    Tables are read once, when they are first asked for. Raises `ReportError` where the folder is not that of a run.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.config: dict[str, Any] = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ReportError(f"{self.folder}: holds no config.yaml, so it is not the folder of a run.") from None
        self._tables: dict[str, pa.Table] = {}
        self._columns: dict[str, dict[str, np.ndarray]] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}): {self.stack}, {self.played} of {self.rounds} rounds"

    # What is written.

    def __getitem__(self, table: str) -> pa.Table:
        """A table as Arrow has it; `.to_pandas()` makes a data frame of it. Raises KeyError for a name not in `tables`."""
        if table not in self._tables:
            try:
                self._tables[table] = tables.read(self.folder, table)
            except FileNotFoundError:
                raise KeyError(f"the run has no table {table!r}; there are {', '.join(self.tables)}") from None
        return self._tables[table]

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables."""
        measures = sorted(f"measures/{path.name}" for path in (self.folder / "measures").glob("[a-z]*"))
        written = ["partition"] if (self.folder / "partition").is_dir() else []
        return (*tables.TABLES, *written, *measures)

    def columns(self, table: str) -> dict[str, np.ndarray]:
        """The columns of a table; what is null is NaN, or None in texts."""
        if table not in self._columns:
            rows = self[table]
            self._columns[table] = {name: rows[name].to_numpy() for name in rows.column_names}
        return self._columns[table]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Versions, hardware and hashes."""
        return self._json("manifest.json") or {}

    @cached_property
    def result(self) -> dict[str, Any] | None:
        """Scores, bytes and the hash of the model; None while the run is not finished."""
        return self._json("result.json")

    def _json(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    # What it says.

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def rounds(self) -> int:
        """Rounds that the configuration asks for."""
        return self.config["rounds"]["total"]

    @property
    def played(self) -> int:
        """Rounds that are on disk."""
        return self["rounds"].num_rows

    @property
    def stack(self) -> str:
        """The methods, as `raysim run` prints them."""
        client, weighting, server = ([next(iter(entry)) for entry in self.config[stack]] for stack in STACKS)
        return " + ".join((client + weighting or ["fedavg"]) + server)

    @cached_property
    def shares(self) -> Shares:
        """Who holds how much of what. Raises `NoData` where the run has come to its end before it wrote that."""
        if "partition" not in self.tables:
            raise NoData("The run has not written its partition.")
        return Shares.of(self["partition"])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting by its path, in the order of the configuration; a stack's own entry names its methods."""
        found: dict[str, Any] = {}
        _flatten(self.config, "", found)
        return found

    def figure(self, name: str) -> Canvas:
        """One of `figures`, as a matplotlib figure. Raises `ReportError` for another name and where data are missing."""
        need("matplotlib.figure")
        from raysim.report.figures import draw

        return draw(name, [self])

    @property
    def figures(self) -> list[str]:
        """Names of the figures for which the run has recorded the data."""
        need("matplotlib.figure")
        from raysim.report.figures import available

        return available([self])


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


@dataclass(frozen=True)
class Shares:
    """What the table `partition` tells: samples by client."""

    data: str
    classes: tuple[str, ...]
    counts: np.ndarray | None  # [N, C] int64 training samples by client and class; None in runs older than the column
    sizes: dict[str, np.ndarray]  # by split (train, test, val), [N] int64

    @classmethod
    def of(cls, table: pa.Table) -> Shares:
        header = json.loads(table.schema.metadata[b"raysim.partition"])
        clients, classes = header["clients"], tuple(header.get("classes", ()))
        client, split = table["client"].to_numpy(), table["split"].to_numpy()
        sizes = {
            name: np.bincount(client[(split == name) & (client >= 0)], minlength=clients)
            for name in ("train", "test", "val")
        }
        counts = None
        if classes:
            train = split == "train"
            cells = client[train] * len(classes) + table["label"].to_numpy()[train]
            counts = np.bincount(cells, minlength=clients * len(classes)).reshape(clients, len(classes))
        return cls(header.get("data", ""), classes, counts, sizes)


# ------------------------------------------------------------------------------------------------------ several runs


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, which differ in the seed alone."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]


def find(folders: Iterable[str | Path]) -> list[Run]:
    """The runs that these folders are or hold, each once. Raises `ReportError` where one is or holds none."""
    found: dict[Path, Run] = {}
    for folder in map(Path, folders):
        inside = (
            [folder] if (folder / "config.yaml").is_file() else sorted(p.parent for p in folder.rglob("config.yaml"))
        )
        if not inside:
            raise ReportError(f"{folder}: neither is nor holds the folder of a run.")
        for one in inside:
            found.setdefault(one.resolve(), Run(one))
    return list(found.values())


def compare(runs: Sequence[Run]) -> list[Group]:
    """Runs by configuration, in the order in which they came, labelled by what tells them apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        told = {path: value for path, value in run.settings.items() if path.partition(".")[0] not in BESIDE}
        told.pop("data.root", None)
        groups.setdefault(json.dumps(told, sort_keys=True), []).append(run)
    labels: list[str] = []
    firsts = [members[0] for members in groups.values()]
    for run in firsts:
        twins = [other for other in firsts if other.stack == run.stack]
        varied = _short([path for path in differences(twins) if path not in STACKS])
        parts = [f"{words} {_shown(run.settings[path])}" for path, words in varied if path in run.settings]
        label = ", ".join(parts if len(twins) == len(firsts) and parts else [run.stack, *parts])
        labels.append(label)
    for i in reversed(range(len(labels))):  # the settings of an older raysim may differ in being absent
        if (number := labels[: i + 1].count(labels[i])) > 1:
            labels[i] += f" ({number})"
    return [Group(label, tuple(members)) for label, members in zip(labels, groups.values(), strict=True)]


def differences(runs: Sequence[Run]) -> list[str]:
    """Paths of the settings that have several values among the runs that have them."""
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    values = {path: {json.dumps(run.settings[path]) for run in runs if path in run.settings} for path in paths}
    return [
        path for path in paths if len(values[path]) > 1 and path.partition(".")[0] not in BESIDE and path not in BESIDE
    ]


def _short(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Each path with as few of its last words as tell it from the others."""
    short = []
    for path in paths:
        words = path.split(".")
        for count in range(1, len(words) + 1):
            tail = ".".join(words[-count:])
            if sum(other == tail or other.endswith(f".{tail}") for other in paths) == 1:
                break
        short.append((path, tail))
    return short


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def clouds(
    groups: Sequence[Group], points: Callable[[Run], np.ndarray], missing: str
) -> list[tuple[int, str, np.ndarray]]:
    """Number, label and points [n, 2] of every group that has any; raises `NoData(missing)` where none has."""
    found = [(i, g.label, np.concatenate([points(run) for run in g.runs])) for i, g in enumerate(groups)]
    held = [cloud for cloud in found if len(cloud[2])]
    if not held:
        raise NoData(missing)
    return held
