"""The papers' tables: a configuration, the grid of its cells, and the numbers that the paper has there.

    table:
      items: {Table 1: accuracy with and without FedLWS, Figure 10: "curves of these runs: raysim plot accuracy"}
      score: last10                              # what is compared; or {heading: score}, a column for each
      columns: {alpha 100: {data.partition.dirichlet_counts.alpha: 100}, alpha 0.1: {}}
      rows: {FedAvg: {server: []}, FedAvg + LWS: {}, FedLAW: {server: [], weighting: [fedlaw]}}
      cells:                                     # settings that hold where all these choices meet
        - {of: [FedLAW, alpha 0.1], set: {weighting.0.fedlaw.lr: 0.01}}
      paper: {FedAvg: [76.01, 61.04], FedLAW: [null, 64.76]}  # its numbers, row by row; null: there is no such cell
      small: {only: [alpha 0.1], set: {rounds.total: 20}, seeds: [8, 9, 10], minutes: 12}

`rows` and `columns` are a mapping of names to settings, or a list of such mappings, of which every combination is a row
or a column. Settings are those of the column, then of the row, of `cells` and of `small`; later ones win. `small` makes
of it what takes minutes: only some choices (an axis of which none is named stays whole), with these settings and seeds,
and with `cells` and a `score` of its own where it has them; `minutes` is what it took on one core.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from raysim.config import ConfigError, load
from raysim.report import summary
from raysim.report.runs import Run
from raysim.report.summary import GLOBAL, OverSeeds, judged_by
from raysim.sweep.sweep import Choice, Point, choice, runs, seeded

PAPERS = {
    "ccn": "Client contribution normalization (CCN, 2024)",
    "fedala": "FedALA (Zhang et al., 2023)",
    "fedlaw": "FedLAW (Li et al., 2023)",
    "fedldf": "FedLDF (2024)",
    "fedlws": "FedLWS (Shi et al., 2025)",
}

Settings = dict[str, Any]  # path -> value
Axis = dict[str, Settings]  # name of a choice -> its settings
Label = tuple[str, ...]  # of a row or a column: a choice of each of its axes


# ------------------------------------------------------------------------------------------------- what is compared


def _accuracy(of: Callable[[Run, str], float | None]) -> Callable[[Run], float | None]:
    def percent(run: Run) -> float | None:
        value = of(run, judged_by([run]))
        return None if value is None else 100 * value

    return percent


def _error(run: Run) -> float | None:
    value = summary.final(run, judged_by([run]))
    return None if value is None else 100 * (1 - value)


def _error_at(run: Run, megabytes: float) -> float | None:
    """Test error in % at the last evaluation before the clients had sent more MB; None where they never sent as many."""
    rounds = run.columns("rounds")
    spent, accuracy = summary.COSTS["MB up"](rounds), rounds[GLOBAL]
    known = accuracy[(spent <= megabytes) & ~np.isnan(accuracy)]
    return 100 * (1 - float(known[-1])) if len(known) and spent[-1] >= megabytes else None


def _to_error(run: Run, error: float) -> float | None:
    """MB that the clients had sent when the test error was first down to so many %."""
    return summary.cost_to(run, GLOBAL, 1 - error / 100, "MB up")


def _seconds(run: Run) -> float:
    """Of a round: median over the rounds."""
    return float(np.median(run.columns("rounds")["seconds"]))


def _aggregation(run: Run) -> float:
    """Seconds from the clients' models to the server's: median over the rounds."""
    rounds = run.columns("rounds")
    return float(np.median(rounds["seconds_plan"] + rounds["seconds_reduce"] + rounds["seconds_server"]))


def _note(run: Run, name: str) -> float | None:
    """Mean of what a method reports as METHOD.NAME in the last round; of a learned value, at its last epoch."""
    notes, (method, what) = run.columns("notes"), name.split(".")
    its = (notes["method"] == method) & (notes["name"] == what)
    if not its.any():
        return None
    its &= notes["round"] == notes["round"][its].max()
    index = notes["index"].astype(float)
    if not np.isnan(index[its]).any():
        its &= index == index[its].max()
    return float(notes["value"][its].mean())


SCORES: dict[str, tuple[Callable[..., float | None], str]] = {  # and what a heading says of them
    "final": (_accuracy(summary.final), "final accuracy, %"),
    "best": (_accuracy(summary.best), "accuracy of the best round, %"),
    "last10": (_accuracy(summary.last10), "accuracy, mean of the last 10 evaluations, %"),
    "error": (_error, "final test error, %"),
    "MB up": (lambda run: summary.total(run, "MB up"), "MB sent by the clients"),
    "MB": (lambda run: summary.total(run, "MB"), "MB sent"),
    "seconds": (_seconds, "seconds a round"),
    "minutes": (lambda run: _seconds(run) / 60, "minutes a round"),
    "aggregation": (_aggregation, "seconds to aggregate"),
    "error at MB": (_error_at, ""),
    "MB to error": (_to_error, ""),
    "note": (_note, ""),
}
PERCENT = ("final", "best", "last10", "error", "error at MB")

Measure = str | dict[str, float | str]  # a key of SCORES, or {key: argument} where it has no words for a heading
Score = str | dict[str, Measure]  # one, or several under headings


def _wrong(score: Score) -> Iterator[str]:
    for measure in [score] if isinstance(score, str) else score.values():
        name, argument = _key(measure)
        if name not in SCORES:
            yield f"score: there is no {name!r}. There are {', '.join(SCORES)}."
        elif bool(argument) == bool(SCORES[name][1]):
            yield f"score: write {name!r} {'alone' if argument else f'as {{HEADING: {{{name}: VALUE}}}}'}."


def _key(measure: Measure) -> tuple[str, tuple[float | str, ...]]:
    return (measure, ()) if isinstance(measure, str) else next((k, (v,)) for k, v in measure.items())


# -------------------------------------------------------------------------------------------------------- the table

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Cells:
    """Settings that hold where all the choices `of` meet."""

    of: tuple[str, ...]
    set: Settings
    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Small:
    """A scaled-down run."""

    only: tuple[str, ...] = ()
    set: Settings = field(default_factory=dict)
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
    seeds: tuple[int, ...] = (8, 9, 10)
    small: Small
    __pydantic_config__ = _STRICT

    @property
    def axes(self) -> tuple[list[Axis], list[Axis]]:
        """Those of the columns and those of the rows."""
        columns, rows = ([side] if isinstance(side, dict) else list(side) for side in (self.columns, self.rows))
        return columns, rows

    @property
    def choices(self) -> list[str]:
        return [name for axis in itertools.chain(*self.axes) for name in axis]

    def headings(self, small: bool) -> dict[str, Measure]:
        """The scores, each under what a column says of it."""
        score = self.small.score if small and self.small.score else self.score
        return {SCORES[score][1]: score} if isinstance(score, str) else score

    def faults(self) -> Iterator[str]:
        """What cannot be told from the types."""
        for name in dict.fromkeys(self.choices):
            if self.choices.count(name) > 1:
                yield f"{name!r} names two choices."
        special = [*self.cells, *self.small.cells]
        for where, names in (("small.only", self.small.only), *(("cells", cells.of) for cells in special)):
            for name in names:
                if name not in self.choices:
                    yield f"{where}: there is no choice {name!r}. There are {', '.join(self.choices)}."
        wrong = [fault for score in (self.score, self.small.score) if score for fault in _wrong(score)]
        if wrong:
            yield from wrong
            return
        columns, rows = (labels(axes) for axes in self.axes)
        width = len(columns) * len(self.headings(False))
        for name, numbers in self.paper.items():
            if name not in map(shown, rows):
                yield f"paper: there is no row {name!r}. There are {'; '.join(map(shown, rows))}."
            if len(numbers) != width:
                yield f"paper.{name}: has {len(numbers)} numbers for {width} columns."

    def theirs(self, row: Label, column: Label) -> list[tuple[Measure, float | None]]:
        """The paper's numbers in a cell, one a score; none where it has none for the whole row."""
        if (numbers := self.paper.get(shown(row))) is None:
            return []
        measures = list(self.headings(False).values())
        at = len(measures) * labels(self.axes[0]).index(column)
        return list(zip(measures, numbers[at:], strict=False))


def labels(axes: Sequence[Mapping[str, Any]]) -> list[Label]:
    return list(itertools.product(*axes))


def shown(label: Label) -> str:
    return ", ".join(label)


# ----------------------------------------------------------------------------------------------------- an item's runs


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
        try:
            raw = yaml.safe_load(self.path.read_text(encoding="utf-8"))["table"]
            table = TypeAdapter(Table).validate_json(json.dumps(raw))
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.path}: not valid YAML: {error}") from None
        except (KeyError, TypeError):
            raise ConfigError(f"{self.path}: has no key `table`, which says what to reproduce.") from None
        except ValidationError as error:
            places = {".".join(map(str, fault["loc"])): fault["msg"] for fault in error.errors()}
            raise ConfigError(
                [f"{self.path}: table.{place}: {message}." for place, message in places.items()]
            ) from None
        if faults := list(table.faults()):
            raise ConfigError([f"{self.path}: table.{fault}" for fault in faults])
        return table

    @property
    def title(self) -> str:
        paper = PAPERS.get(self.path.parent.name, self.path.parent.name)
        name, what = next(iter(self.table.items.items()))
        return f"{paper}, {name}: {what.partition(' (')[0]}"  # what follows is the command for a figure

    def axes(self, small: bool) -> tuple[list[Axis], list[Axis]]:
        """Columns' and rows', as far as they are played."""
        only = self.table.small.only if small else ()
        columns, rows = (
            [{name: axis[name] for name in axis if name in only} or axis for axis in axes] for axes in self.table.axes
        )
        return columns, rows

    def plan(self, small: bool, seeds: Sequence[int], changes: Sequence[str]) -> dict[Cell, list[Choice]]:
        """The choices that make each run, all cells of a seed before those of the next. `changes` are `path=value`."""
        table, (columns, rows) = self.table, self.axes(small)
        settings, changed = choice("", table.small.set if small else {}), ("", list(changes))
        planned = {}
        for seed, row, column in itertools.product(
            seeds or (table.small.seeds if small else table.seeds), labels(rows), labels(columns)
        ):
            theirs = table.theirs(row, column)
            if theirs and all(number is None for _, number in theirs):
                continue
            taken = zip((*columns, *rows), (*column, *row), strict=True)
            chosen = [choice(name, axis[name]) for axis, name in taken]
            ours, scaled = (
                [choice("", cells.set) for cells in special if {*cells.of} <= {*row, *column}]
                for special in (table.cells, table.small.cells if small else ())
            )
            planned[Cell(row, column, seed)] = [*chosen, *ours, settings, *scaled, changed, seeded(seed)]
        return planned

    def runs(self, small: bool, seeds: Sequence[int], changes: Sequence[str], out: Path) -> dict[Cell, Point]:
        """Raises `ConfigError` where a cell cannot be run, such as for want of its data."""
        planned = self.plan(small, seeds, changes)
        return dict(zip(planned, runs(self.path, planned.values(), out), strict=True))

    def text(self, points: Mapping[Cell, Point], small: bool, changes: Sequence[str]) -> str:
        """The paper's table in Markdown: what the finished runs came to, beside the paper's numbers."""
        scaled = self.table.small
        settings = [*choice("", scaled.set)[1]] if small else []
        for cells in scaled.cells if small else ():
            settings += [f"{text} ({', '.join(cells.of)})" for text in choice("", cells.set)[1]]
        settings += changes
        seeds = sorted({cell.seed for cell in points})
        lines = [self.title, ""]
        if small:
            lines += ["Scaled down; the paper's numbers are those of its own, full-size runs."]
        if settings:
            lines += [f"Settings other than the paper's: {', '.join(settings)}."]
        lines += [
            f"Each cell: mean ± standard deviation over {len(seeds)} seed{'s' * (len(seeds) > 1)} of raysim's runs (the "
            "paper's number, ours minus the paper's)."
        ]
        columns = list(dict.fromkeys(cell.column for cell in points))
        groups: dict[str, list[Label]] = {}
        for column in columns:
            groups.setdefault(column[0] if len(column) > 1 else "", []).append(column)
        for name, members in groups.items():
            lines += ["", *([f"{name}:", ""] if name else []), *self._grid(points, members, small, bool(name))]
        return "\n".join(lines)

    def _grid(self, points: Mapping[Cell, Point], columns: Sequence[Label], small: bool, named: bool) -> list[str]:
        headings = self.table.headings(small)
        top = [
            shown(column[named:]) if len(headings) == 1 and shown(column[named:]) else
            ", ".join(filter(None, (shown(column[named:]), heading)))
            for column in columns for heading in headings
        ]  # fmt: skip
        corner = next(iter(headings)) if len(headings) == 1 and top != list(headings) else ""
        lines = [(corner, *top)]
        for row in dict.fromkeys(cell.row for cell in points if cell.column in columns):
            cells = []
            for column in columns:
                its = [point for cell, point in points.items() if (cell.row, cell.column) == (row, column)]
                theirs = self.table.theirs(row, column)
                cells += [
                    _cell(its, measure, next((number for what, number in theirs if what == measure), None))
                    for measure in headings.values()
                ]
            lines.append((shown(row) or self.name, *cells))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = tuple("-" * width for width in widths)
        return [
            "| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |"
            for line in (lines[0], rule, *lines[1:])
        ]


def _cell(points: Sequence[Point], measure: Measure, theirs: float | None) -> str:
    if not points:
        return ""
    name, argument = _key(measure)
    of = SCORES[name][0]
    ours = OverSeeds.of([of(Run(point.folder), *argument) if point.finished else None for point in points])
    decimals = 2 if name in PERCENT else None
    text = ours.show(decimals)
    if theirs is None:
        return text
    if not ours.values:
        return f"{text} (paper {theirs:g})"
    difference = OverSeeds((ours.mean - theirs,)).show(decimals or 3)
    return f"{text} (paper {theirs:g}, {'' if difference.startswith('-') else '+'}{difference})".replace("-", "−")


# ------------------------------------------------------------------------------------------------------ what there is


def folder() -> Path:
    """`configs` in the working directory, or else in the checkout that raysim is imported from."""
    places = [Path("configs"), Path(__file__).parents[2] / "configs"]
    for place in places:
        if any(place.glob("*/*.yaml")):
            return place
    raise ConfigError(
        f"neither {places[0].resolve()} nor {places[1]} holds the papers' tables: run in raysim's checkout."
    )


def items() -> dict[str, Item]:
    """Every table and figure that has a file, by name."""
    root = folder()
    paths = sorted(root.glob("*/*.yaml"), key=lambda path: (path.parent, _natural(path.stem)))
    return {name: Item(name, path) for path in paths for name in [f"{path.parent.name}/{path.stem}"]}


def find(name: str) -> Item:
    """The item of that name. Raises `ConfigError` where there is none."""
    there = items()
    if name not in there:
        near = difflib.get_close_matches(name, there, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"there is no table or figure {name!r}.{hint} `raysim reproduce --list` shows all.")
    return there[name]


def listing(there: Mapping[str, Item]) -> Iterator[str]:
    """Every item with the papers' tables and figures that it makes, the data it needs, and what it costs."""
    paper = ""
    for name, item in there.items():
        if item.path.parent.name != paper:
            paper = item.path.parent.name
            yield f"\n{PAPERS.get(paper, paper)}"
        yield f"\n  {name}"
        table = item.table
        width = max(map(len, table.items))
        yield from (f"    {place:<{width}}  {what}" for place, what in table.items.items())
        for scale, small in (("full", False), ("small", True)):
            planned = item.plan(small, (), ())
            seeds = len({cell.seed for cell in planned})
            size = f"{len(planned) // seeds} run{'s' * (len(planned) > seeds)} × {seeds} seed{'s' * (seeds > 1)}"
            took = f"; took {table.small.minutes:g} minutes of one core" if small and table.small.minutes else ""
            yield f"    {scale}: {size}; {_data(item, planned.values())}{took}"


def _data(item: Item, planned: Collection[Sequence[Choice]]) -> str:
    """Names of the data that these runs read, and which are absent."""
    found: dict[str, bool] = {}
    wanted = dict.fromkeys(
        next((text for _, texts in reversed(chosen) for text in reversed(texts) if text.startswith("data.name=")), "")
        for chosen in planned
    )
    for change in wanted:
        if change:
            raw = yaml.safe_load(change.partition("=")[2])
        else:
            raw = yaml.safe_load(item.path.read_text(encoding="utf-8"))["data"]["name"]
        missing = ""
        try:
            load(item.path, [change] if change else [])
        except ConfigError as error:
            missing = " (absent)" * any(": data.name: " in fault for fault in error.faults)
        found[_named(raw) + missing] = True
    return ", ".join(found)


def _named(raw: Any) -> str:
    """A data set as people call it: `cifar10`, or the folder that a source reads."""
    if not isinstance(raw, Mapping):
        return str(raw)
    ((source, settings),) = raw.items()
    if isinstance(settings, Mapping):
        settings = settings.get("path", "")
    return str(settings) or source


def _natural(stem: str) -> tuple[str | int, ...]:
    """figure2 before figure10."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", stem))
