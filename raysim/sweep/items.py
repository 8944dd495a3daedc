"""The tables and figures that have a configuration: which there are, and the runs of each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from raysim.config import ConfigError, load
from raysim.config.messages import nearest
from raysim.config.shipped import folder as configurations
from raysim.paths import natural
from raysim.store.documents import YAML_BYTES, DamagedFile, parse_yaml, read_bytes, read_yaml
from raysim.sweep.grid import Choice, MatchedOverrides, Point, choices, overrides, runs, seeded
from raysim.sweep.table import Axis, Label, Table, labels, read_table

PAPERS = {
    "ccn": "Client contribution normalization (CCN, 2024)",
    "fedala": "FedALA (Zhang et al., 2023)",
    "fedlaw": "FedLAW (Li et al., 2023)",
    "fedldf": "FedLDF (2024)",
    "fedlws": "FedLWS (Shi et al., 2025)",
}
TITLES = PAPERS | {"time": "Time on a network"}  # of the folders of `configs/` that hold tables


@dataclass(frozen=True)
class Cell:
    """Where a run belongs."""

    row: Label
    column: Label
    seed: int


@dataclass(frozen=True)
class Item:
    """One file of `configs/`: `fedlws/table1`."""

    name: str
    path: Path

    @cached_property
    def table(self) -> Table:
        """Raises `ConfigError` where the file has none, or a wrong one."""
        return read_table(self.path)

    @property
    def title(self) -> str:
        paper = TITLES.get(self.path.parent.name, self.path.parent.name)
        name, what = next(iter(self.table.items.items()))
        return f"{paper}, {name}: {what.partition(' (')[0]}"  # what follows is the command for a figure

    def axes(self, scale: str, only: Collection[str] = ()) -> tuple[list[Axis], list[Axis]]:
        """Columns' and rows', as far as they are run: of those that the scale has, the choices in `only`, where an axis
        has one of them."""
        columns, rows = (
            [_part(_part(axis, self.table.scales[scale].only), only) for axis in axes]
            for axes in self.table.axes(scale)
        )
        return columns, rows

    def beside(self, cell: Cell, choice: str, scale: str) -> Cell:
        """The cell that has `choice` in the place of its own."""
        columns, rows = self.table.axes(scale)
        row, column = (
            tuple(choice if choice in axis else own for own, axis in zip(label, axes, strict=True))
            for label, axes in ((cell.row, rows), (cell.column, columns))
        )
        return replace(cell, row=row, column=column)

    def plan(
        self, scale: str, seeds: Sequence[int], changes: Sequence[str], only: Sequence[str] = ()
    ) -> dict[Cell, list[Choice]]:
        """The choices that make each run, all cells of a seed before those of the next. `changes` are `path=value`, `only`
        are names of rows and columns.

        Raises `ConfigError` where the table has no such scale, row or column.
        """
        table = self.table
        if scale not in table.scales:
            raise ConfigError(f"{self.name} has no scale {scale}. There are {', '.join(table.scales)}.")
        there = [name for axis in itertools.chain(*self.axes(scale)) for name in axis]
        if unknown := [name for name in only if name not in there]:
            raise ConfigError(f"--only: {self.name} has no row or column {unknown[0]!r}.{nearest(unknown[0], there)}")
        scaled, (columns, rows) = table.scales[scale], self.axes(scale, only)
        settings, matched = ("", overrides(scaled.set)), MatchedOverrides()
        axes = [choices(axis) for axis in (*columns, *rows)]
        planned = {}
        for seed, row, column in itertools.product(seeds or scaled.seeds, labels(rows), labels(columns)):
            theirs = table.theirs(row, column)
            if theirs and all(number is None for _, number in theirs):
                continue
            chosen = [axis[name] for axis, name in zip(axes, (*column, *row), strict=True)]
            always, here = (
                [("", overrides(cells.set)) for cells in special if {*cells.of} <= {*row, *column}]
                for special in (table.cells, scaled.cells)
            )
            cell = [*chosen, *always, settings, *here]
            changed = [text for texts in matched.by(self.path, cell, changes).values() for text in texts]
            planned[Cell(row, column, seed)] = [*cell, ("", changed), seeded(seed)]
        matched.check()
        return planned

    def runs(
        self, scale: str, seeds: Sequence[int], changes: Sequence[str], out: Path, only: Sequence[str] = ()
    ) -> dict[Cell, Point]:
        """Raises `ConfigError` as `plan`, and where a cell cannot be run, such as for want of its data."""
        planned = self.plan(scale, seeds, changes, only)
        return dict(zip(planned, runs(self.path, planned.values(), out), strict=True))


def _part(axis: Axis, only: Collection[str]) -> Axis:
    """The choices of an axis that `only` names, or all."""
    return {name: axis[name] for name in axis if name in only} or axis


def items() -> dict[str, Item]:
    """Every table and figure that has a file, by name: what comes with raysim, and those in `configs` in the working
    directory, which come first."""
    own = [path for path in Path("configs").glob("*/*.yaml") if _has_table(path)]
    shipped = [
        path for path in configurations().glob("*/*.yaml") if path.parent.name != "cluster"
    ]  # where the runs are
    found = {f"{path.parent.name}/{path.stem}": path for path in (*shipped, *own)}
    return {
        name: Item(name, found[name]) for name in sorted(found, key=lambda name: (name.split("/")[0], natural(name)))
    }


def _has_table(path: Path) -> bool:
    """Whether a file, which may be anything, has a key `table`."""
    try:
        return re.search(rb"^table:", read_bytes(path, YAML_BYTES), re.M) is not None
    except (OSError, DamagedFile):
        return False


def find(name: str) -> Item:
    """The item of that name. Raises `ConfigError` where there is none."""
    there = items()
    if name not in there:
        of_paper = [one for one in there if one.startswith(f"{name}/")]
        hint = f" There are {', '.join(of_paper)}." if of_paper else nearest(name, there, listed=False)
        raise ConfigError(f"there is no table or figure {name!r}.{hint} `raysim reproduce --list` shows all.")
    return there[name]


def listing(there: Mapping[str, Item]) -> Iterator[str]:
    """Every item with the papers' tables and figures that it makes, the data it needs, and what it costs; or what is wrong
    with its file."""
    paper = ""
    for name, item in there.items():
        if item.path.parent.name != paper:
            paper = item.path.parent.name
            yield f"\n{TITLES.get(paper, paper)}"
        yield f"\n  {name}"
        try:
            yield from [f"    {line}" for line in _described(item)]
        except ConfigError as error:
            yield from (f"    {fault}" for fault in error.faults)


def _described(item: Item) -> Iterator[str]:
    table = item.table
    width = max(map(len, table.items))
    yield from (f"{place:<{width}}  {what}" for place, what in table.items.items())
    for name, scale in table.scales.items():
        planned = item.plan(name, (), ())
        seeds = len({*scale.seeds})
        size = f"{len(planned) // seeds} run{'s' * (len(planned) > seeds)} × {seeds} seed{'s' * (seeds > 1)}"
        took = f"; took {scale.minutes:g} minutes of one core" if scale.minutes else ""
        yield f"{name}: {size}; {_data(item, planned.values())}{took}"


def _data(item: Item, planned: Collection[Sequence[Choice]]) -> str:
    """Names of the data that these runs read, and which are absent."""
    found: dict[str, bool] = {}
    wanted = dict.fromkeys(
        next((text for _, texts in reversed(chosen) for text in reversed(texts) if text.startswith("data.name=")), "")
        for chosen in planned
    )
    for change in wanted:
        if change:
            raw = parse_yaml(change.partition("=")[2])
        else:
            try:
                raw = read_yaml(item.path)["data"]["name"]
            except (KeyError, TypeError):
                raise ConfigError(f"{item.path}: data.name: must say which data the runs read.") from None
        missing = ""
        try:
            load(item.path, [change] if change else [])
        except ConfigError as error:
            missing = " (absent)" * any("data.name" in fault for fault in error.faults)
        found[_named(raw) + missing] = True
    return ", ".join(found)


def _named(raw: Any) -> str:
    """A data set as people call it: `cifar10`, or the folder that a source reads."""
    if not isinstance(raw, Mapping) or len(raw) != 1:
        return str(raw)
    ((source, settings),) = raw.items()
    if isinstance(settings, Mapping):
        settings = settings.get("path", "")
    return str(settings) or source
