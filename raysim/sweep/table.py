"""The papers' tables: a configuration, the grid of its cells, and the numbers that the paper has there.

    table:
      items: {Table 1: accuracy with and without FedLWS, Figure 10: "curves of these runs: raysim plot accuracy"}
      score: last10                              # what is compared; or {heading: score}, a column for each, such as
                                                 # {gamma: {note: fedlws.gamma, rounds: [90, 110], layers: conv}}
                                                 # or {behind FedLDF: {gap: FedLDF}}, which is a choice
      columns: {alpha 100: {data.partition.dirichlet_counts.alpha: 100}, alpha 0.1: {}}
      rows: {FedAvg: {server: []}, FedAvg + LWS: {}, FedLAW: {server: [], weighting: [fedlaw]}}
      cells:                                     # settings that hold where all these choices meet
        - {of: [FedLAW, alpha 0.1], set: {weighting.0.fedlaw.lr: 0.01}}
      paper: {FedAvg: [76.01, 61.04], FedLAW: [null, 64.76]}  # its numbers, row by row; null: there is no such cell
      small: {only: [alpha 0.1], set: {rounds.total: 20}, seeds: [8, 9, 10], minutes: 12}
      medium: {only: [alpha 0.1], set: {rounds.total: 120}, minutes: 90}

`rows` and `columns` are a mapping of names to settings, or a list of such mappings: every combination is a row or a
column. Settings are those of the column, then of the row, of `cells` and of the scale; later ones win.

`against` makes a figure of the scores: {local epochs: {E = 1: 1, E = 2: 2}} is a panel in which these choices have these
places. With `over: FedAvg` it shows what an accuracy gains over the run that differs in having this choice.

The scale `small` makes of it what takes minutes, and `medium`, which not every table has, what takes a night: only some
choices (an axis without a named choice stays whole), with these settings and seeds. A scale may have `rows`, `columns` and
a `score` of its own in the place of the table's, and `cells` that come after them; `minutes` is what it took on one core.

`rounds` of a note are the first and the last, and count from 1. Accuracies and final errors are those of the personal
models where every finished run of the table has tested them, and else those of the global model, as in a report.

Of `paper`, a row has a number for each score of each column, or one for each column, which then stands beside every
accuracy of it.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from raysim.config import ConfigError
from raysim.store.documents import DamagedFile, read_yaml
from raysim.sweep.scores import ACCURACIES, BETWEEN, SCORES, Measure, Score, key_of, wrong_scores

Settings = dict[str, Any]  # path -> value
Axis = dict[str, Settings]  # name of a choice -> its settings
Label = tuple[str, ...]  # of a row or a column: a choice of each of its axes

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Cells:
    """Settings that hold where all the choices `of` meet."""

    of: tuple[str, ...]
    set: Settings
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of a table is run; what is not given is as the table has it."""

    only: tuple[str, ...] = ()
    set: Settings = field(default_factory=dict)
    columns: Axis | tuple[Axis, ...] = ()
    rows: Axis | tuple[Axis, ...] = ()
    cells: tuple[Cells, ...] = ()
    seeds: tuple[int, ...] = (8, 9, 10)
    score: Score | None = None  # None: the table's
    minutes: float | None = None
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a configuration's `table` says; the module's documentation has it as it is written."""

    items: dict[str, str]
    score: Score = "last10"
    columns: Axis | tuple[Axis, ...] = ()
    rows: Axis | tuple[Axis, ...] = ()
    cells: tuple[Cells, ...] = ()
    paper: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    against: dict[str, dict[str, float]] = field(default_factory=dict)  # setting -> choice -> its place on the axis
    over: str = ""
    seeds: tuple[int, ...] = (8, 9, 10)
    small: Scale
    medium: Scale | None = None
    __pydantic_config__ = _STRICT

    def axes(self, scale: str = "full") -> tuple[list[Axis], list[Axis]]:
        """Those of the columns and those of the rows."""
        its = self.scales[scale]
        sides = its.columns or self.columns, its.rows or self.rows
        columns, rows = ([side] if isinstance(side, dict) else list(side) for side in sides)
        return columns, rows

    def choices(self, scale: str = "full") -> list[str]:
        return [name for axis in itertools.chain(*self.axes(scale)) for name in axis]

    @property
    def scales(self) -> dict[str, Scale]:
        """By name, the paper's own first."""
        scaled = {"small": self.small} | ({"medium": self.medium} if self.medium else {})
        return {"full": Scale(seeds=self.seeds), **scaled}

    def headings(self, scale: str = "full") -> dict[str, Measure]:
        """The scores, each under what a column says of it."""
        score = self.scales[scale].score or self.score
        return {SCORES[score][1]: score} if isinstance(score, str) else score

    def faults(self) -> Iterator[str]:
        """Faults that the types do not exclude."""
        scales = self.scales
        if not self.items:
            yield "items: names no table or figure."
        of_all = list(dict.fromkeys(choice for name in scales for choice in self.choices(name)))
        for where, names in [*self.against.items(), ("over", [self.over] if self.over else [])]:
            for unknown in (name for name in names if name not in of_all):
                yield f"{where}: there is no choice {unknown!r}. There are {', '.join(of_all)}."
        for name in scales:
            if not scales[name].seeds:
                yield f"{name}.seeds: names no seed."
            choices = self.choices(name)
            yield from (f"{choice!r} names two choices." for choice, times in Counter(choices).items() if times > 1)
            special = [*scales[name].cells, *(self.cells if name == "full" else ())]
            named = [(f"{name}.only", scales[name].only), *(("cells", cells.of) for cells in special)]
            for where, names in named:
                for unknown in (one for one in names if one not in choices):
                    yield f"{where}: there is no choice {unknown!r}. There are {', '.join(choices)}."
        wrong = [
            fault
            for score in (self.score, *(scale.score for scale in scales.values()))
            if score
            for fault in wrong_scores(score)
        ]
        if wrong:
            yield from wrong
            return
        for scale in scales:
            there = self.choices(scale)
            for measure in self.headings(scale).values():
                name, argument, _ = key_of(measure)
                if name in BETWEEN and argument[0] not in there:
                    yield f"score: {name}: there is no choice {argument[0]!r}. There are {', '.join(there)}."
        columns, rows = (labels(axes) for axes in self.axes())
        width = len(columns) * len(self.headings())
        for row, numbers in self.paper.items():
            if row not in map(shown, rows):
                yield f"paper: there is no row {row!r}. There are {'; '.join(map(shown, rows))}."
            if len(numbers) not in (width, len(columns)):
                yield f"paper.{row}: has {len(numbers)} numbers for {width} columns."

    def theirs(self, row: Label, column: Label) -> list[tuple[Measure, float | None]]:
        """The paper's numbers in a cell, one a score; none where it has none for the whole row, or no such column."""
        measures, columns = list(self.headings().values()), labels(self.axes()[0])
        if (numbers := self.paper.get(shown(row))) is None or column not in columns:
            return []
        at = columns.index(column)
        if len(numbers) == len(columns) * len(measures):
            return list(zip(measures, numbers[at * len(measures) :], strict=False))
        return [(measure, numbers[at] if measure in ACCURACIES else None) for measure in measures]


def labels(axes: Sequence[Mapping[str, Any]]) -> list[Label]:
    return list(itertools.product(*axes))


def shown(label: Label) -> str:
    return ", ".join(label)


@functools.cache
def _adapter() -> TypeAdapter[Table]:
    return TypeAdapter(Table)


def read_table(path: Path) -> Table:
    """What the configuration at `path` says under `table`. Raises `ConfigError` where that is nothing, or wrong."""
    try:
        raw = read_yaml(path)["table"]
        table = _adapter().validate_json(json.dumps(raw))
    except DamagedFile as error:
        raise ConfigError(str(error)) from None
    except (KeyError, TypeError):
        raise ConfigError(f"{path}: has no key `table`, which says what to reproduce.") from None
    except ValidationError as error:
        places = {".".join(map(str, ("table", *fault["loc"]))): fault["msg"] for fault in error.errors()}
        raise ConfigError([f"{path}: {place}: {message}." for place, message in places.items()]) from None
    if faults := list(table.faults()):
        raise ConfigError([f"{path}: table.{fault}" for fault in faults])
    return table
