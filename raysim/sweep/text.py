"""A reproduced table as Markdown, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raysim.report.runs import Run
from raysim.report.summary import OverSeeds
from raysim.sweep.grid import Point, choice
from raysim.sweep.items import Cell, Item
from raysim.sweep.scores import BETWEEN, PERCENT, SCORES, Measure, key_of
from raysim.sweep.table import Label, shown


def table_text(item: Item, points: Mapping[Cell, Point], small: bool, changes: Sequence[str]) -> str:
    """The paper's table in Markdown: what the finished runs came to, beside the paper's numbers. `changes` are the
    overrides, `path=value`, with which they were played."""
    scaled = item.table.small
    settings = [*choice("", scaled.set)[1]] if small else []
    for cells in scaled.cells if small else ():
        settings += [f"{text} ({', '.join(cells.of)})" for text in choice("", cells.set)[1]]
    settings += changes
    seeds = sorted({cell.seed for cell in points})
    lines = [item.title, ""]
    if small:
        lines += ["Scaled down; the paper's numbers are those of its own, full-size runs."]
    if settings:
        lines += [f"Settings other than the paper's: {', '.join(settings)}."]
    lines += [
        f"Each cell: mean ± standard deviation over {len(seeds)} seed{'s' * (len(seeds) > 1)} of raysim's runs (the "
        "paper's number, ours minus the paper's)."
    ]
    opened = {point.folder: Run(point.folder) for point in points.values() if point.finished}
    runs = {cell: opened.get(point.folder) for cell, point in points.items()}
    columns = list(dict.fromkeys(cell.column for cell in runs))
    groups: dict[str, list[Label]] = {}
    for column in columns:
        groups.setdefault(column[0] if len(column) > 1 else "", []).append(column)
    for name, members in groups.items():
        lines += ["", *([f"{name}:", ""] if name else []), *_grid(item, runs, members, small, bool(name))]
    return "\n".join(lines)


def _grid(item: Item, runs: Mapping[Cell, Run | None], columns: Sequence[Label], small: bool, named: bool) -> list[str]:
    """The lines of one grid of finished runs; `named`: its columns' first choice stands above it."""
    headings = item.table.headings(small)
    top = [
        shown(column[named:]) if len(headings) == 1 and shown(column[named:]) else
        ", ".join(filter(None, (shown(column[named:]), heading)))
        for column in columns for heading in headings
    ]  # fmt: skip
    corner = next(iter(headings)) if len(headings) == 1 and top != list(headings) else ""
    lines = [(corner, *top)]
    for row in dict.fromkeys(cell.row for cell in runs if cell.column in columns):
        cells = []
        for column in columns:
            its = [cell for cell in runs if (cell.row, cell.column) == (row, column)]
            theirs = item.table.theirs(row, column)
            for measure in headings.values():
                ours = [_score(runs, cell, measure) for cell in its]
                cells.append(_cell(ours, measure, next((number for what, number in theirs if what == measure), None)))
        lines.append((shown(row) or item.name, *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = tuple("-" * width for width in widths)
    return [
        "| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |"
        for line in (lines[0], rule, *lines[1:])
    ]


def _score(runs: Mapping[Cell, Run | None], cell: Cell, measure: Measure) -> float | None:
    """What the run of a cell came to, if it is finished, and where it is compared with another row's, that one too."""
    name, argument, options = key_of(measure)
    if name in BETWEEN:
        where = (argument[0], cell.column, cell.seed)
        argument = (next((run for at, run in runs.items() if (shown(at.row), at.column, at.seed) == where), None),)
    run = runs[cell]
    return None if run is None or None in argument else SCORES[name][0](run, *argument, **options)


def _cell(scores: Sequence[float | None], measure: Measure, theirs: float | None) -> str:
    """The mean over the seeds' finished runs, beside the paper's number if it has one."""
    if not scores:
        return ""
    ours, (name, *_) = OverSeeds.of(scores), key_of(measure)
    decimals = 2 if name in PERCENT else None
    text = ours.show(decimals)
    if theirs is None:
        return text
    if not ours.values:
        return f"{text} (paper {theirs:g})"
    difference = OverSeeds((ours.mean - theirs,)).show(decimals or 3)
    return f"{text} (paper {theirs:g}, {'' if difference.startswith('-') else '+'}{difference})".replace("-", "−")
