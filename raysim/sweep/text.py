"""A reproduced table as Markdown, beside the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from raysim.report.paper_table import Column, Entry, PaperTable
from raysim.report.runs import Run
from raysim.report.summary import OverSeeds, judged_by
from raysim.store.documents import read_result
from raysim.sweep.grid import Point, overrides
from raysim.sweep.items import Cell, Item
from raysim.sweep.scores import BETTER, BETWEEN, PERCENT, Measure, key_of, scored
from raysim.sweep.table import Label, shown


def table_text(item: Item, points: Mapping[Cell, Point], scale: str, changes: Sequence[str]) -> str:
    """The paper's table in Markdown: what the finished runs came to, beside the paper's numbers. `changes` are the
    overrides, `path=value`, with which they ran."""
    scaled = item.table.scales[scale]
    settings = {text.partition("=")[0]: text for text in overrides(scaled.set)}
    for cells in scaled.cells:
        for text in overrides(cells.set):
            settings[f"{text.partition('=')[0]} {cells.of}"] = f"{text} ({', '.join(cells.of)})"
    for text in changes:  # later ones win
        path = text.partition("=")[0]
        settings = {key: said for key, said in settings.items() if key.partition(" ")[0] != path} | {path: text}
    seeds = sorted({cell.seed for cell in points})
    lines = [item.title, ""]
    if scale == "small":
        lines += ["A smoke run: it shows that all of it works, and no difference between methods."]
    if scale != "full":
        lines += ["Scaled down; the paper's numbers are those of its own, full-size runs."] if item.table.paper else []
    if settings:
        lines += [f"Settings other than at full scale: {', '.join(settings.values())}."]
    ours = (
        "one run of raysim's"
        if len(seeds) == 1
        else f"mean ± standard deviation over {len(seeds)} seeds of raysim's runs"
    )
    beside = " (the paper's number" + (", ours minus the paper's)" if scale != "small" else ")")
    lines += [f"Each cell: {ours}{beside if item.table.paper else ''}."]
    for paper_table in paper_tables(item, points, scale):
        lines += ["", *([f"{paper_table.title}:", ""] if paper_table.title else []), *_aligned(paper_table)]
    return "\n".join([*lines, *_fallen_back(points)])


def _fallen_back(points: Mapping[Cell, Point]) -> list[str]:
    """The rows in which a method could not do its work in any round, so that they show another one."""
    always: dict[str, None] = {}
    for cell, point in points.items():
        for method, count in ((read_result(point.folder) or {}).get("fell_back") or {}).items():
            if count["times"] == count["of"]:
                always[f"{shown((*cell.row, *cell.column)) or point.name} ({method})"] = None
    return ["", f"Fell back in every round: {'; '.join(always)}."] if always else []


def opened(points: Mapping[Cell, Point]) -> dict[Cell, Run | None]:
    """The run of each cell; None where it is not finished."""
    found = {folder: Run(folder) for folder in {point.folder for point in points.values() if point.finished}}
    return {cell: found.get(point.folder) for cell, point in points.items()}


def paper_tables(item: Item, points: Mapping[Cell, Point], scale: str) -> list[PaperTable]:
    """The tables of the finished runs: one for each first choice of the columns, where these have several."""
    runs = opened(points)
    by = judged_by([run for run in runs.values() if run is not None])
    groups: dict[str, list[Label]] = {}
    for column in dict.fromkeys(cell.column for cell in runs):
        groups.setdefault(column[0] if len(column) > 1 else "", []).append(column)
    return [_paper_table(item, runs, members, scale, name, by) for name, members in groups.items()]


def _paper_table(
    item: Item, runs: Mapping[Cell, Run | None], columns: Sequence[Label], scale: str, title: str, by: str
) -> PaperTable:
    """One table of finished runs; with a title, its columns' first choice stands above it. All tables of the item are judged
    by the one column `by`."""
    headings = item.table.headings(scale)
    rows = list(dict.fromkeys(cell.row for cell in runs if cell.column in columns))
    found = []
    for column in columns:
        short = shown(column[bool(title) :])
        for heading, measure in headings.items():
            entries = []
            for row in rows:
                its = {
                    cell.seed: score(item, scale, runs, cell, measure, by)
                    for cell in runs
                    if (cell.row, cell.column) == (row, column)
                }
                theirs = next((number for what, number in item.table.theirs(row, column) if what == measure), None)
                by_seed = {seed: score for seed, score in its.items() if score is not None and not math.isnan(score)}
                text = _cell([*its.values()], measure, theirs, scale)
                entries.append(Entry(text, by_seed, len(its) - len(by_seed)))
            words = short if len(headings) == 1 and short else ", ".join(filter(None, (short, heading)))
            found.append(Column(words, tuple(entries), BETTER.get(key_of(measure)[0], 0)))
    corner = next(iter(headings)) if len(headings) == 1 and [c.heading for c in found] != list(headings) else ""
    return PaperTable(corner, tuple(shown(row) or item.name for row in rows), tuple(found), title)


def _aligned(paper_table: PaperTable) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [(paper_table.corner, *(column.heading for column in paper_table.columns))]
    for i, row in enumerate(paper_table.rows):
        lines.append((row, *(column.entries[i].text for column in paper_table.columns)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = tuple("-" * width for width in widths)
    return [
        "| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |"
        for line in (lines[0], rule, *lines[1:])
    ]


def score(
    item: Item, scale: str, runs: Mapping[Cell, Run | None], cell: Cell, measure: Measure, by: str
) -> float | None:
    """What the run of a cell came to, if it is finished, and where it is compared with another's, that one too. `by` is the
    column of `rounds` that all runs are judged by."""
    name, argument, options = key_of(measure)
    if name in BETWEEN:
        argument = (runs.get(item.beside(cell, argument[0], scale)),)
    run = runs.get(cell)
    return None if run is None or None in argument else scored(run, by, name, *argument, **options)


def _cell(scores: Sequence[float | None], measure: Measure, theirs: float | None, scale: str) -> str:
    """The mean over the seeds' finished runs, beside the paper's number if it has one. A smoke run's number has no
    difference to it, which would say nothing."""
    if not scores:
        return ""
    ours, (name, *_) = OverSeeds.of(scores), key_of(measure)
    decimals = 2 if name in PERCENT else None
    text = ours.show(decimals)
    if theirs is None:
        return text
    if not ours.values or scale == "small":
        return f"{text} (paper {theirs:g})"
    difference = OverSeeds((ours.mean - theirs,)).show(decimals or 3)
    return f"{text} (paper {theirs:g}, {'' if difference.startswith('-') else '+'}{difference})".replace("-", "−")
