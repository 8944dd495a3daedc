"""The figure of a reproduced item: a score against a setting, or what `raysim plot` draws of the runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.report import NoData
from raysim.report.runs import Run
from raysim.report.summary import judged_by
from raysim.sweep.grid import Point
from raysim.sweep.items import Cell, Item
from raysim.sweep.scores import ACCURACIES, Measure, key_of
from raysim.sweep.table import Label, shown
from raysim.sweep.text import opened, score

if TYPE_CHECKING:
    from raysim.report.canvas import Canvas


def draw_item(item: Item, points: Mapping[Cell, Point], scale: str, folder: Path) -> Path | None:
    """Write the figure of the finished runs, as `figure.png`; None where the item is a table, or is drawn by no command. Raises as
    `canvas_of`."""
    runs = {cell: run for cell, run in opened(points).items() if run is not None}
    canvas = canvas_of(item, runs, scale)
    if canvas is None:
        return None
    path = folder / "figure.png"
    canvas.save(path)
    return path


def canvas_of(item: Item, runs: Mapping[Cell, Run], scale: str) -> Canvas | None:
    """The figure of these runs, which are called as in the table. Of a figure of one run, that of the last row and the first seed.
    Raises `NoData` where the runs have not recorded what it shows, such as a measure that is to be taken first."""
    from raysim.report.figures import FIGURES, SingleRunFigure, draw

    if item.table.against:
        return against_settings(item, runs, scale)
    found = re.search(r"raysim plot (\S+) RUN", " ".join(item.table.items.values()))
    if not runs or found is None:
        return None
    rows, columns = {cell.row for cell in runs}, {cell.column for cell in runs}
    labels = {
        run.folder: shown((*cell.row * (len(rows) > 1), *cell.column * (len(columns) > 1)))
        for cell, run in runs.items()
    }
    single = isinstance(FIGURES[found[1].partition(":")[0]], SingleRunFigure)
    last = next(run for cell, run in runs.items() if cell.row == [*runs][-1].row)
    return draw(found[1], [last] if single else [*runs.values()], labels)


def against_settings(item: Item, runs: Mapping[Cell, Run], scale: str) -> Canvas:
    """Each score against each of the table's `against`, a panel each: the mean over seeds, with a standard deviation.
    With `over`, what an accuracy gains over the run with this choice, seed by seed."""
    from raysim.report.settings import Panel, panels_of

    panels, by = [], judged_by([*runs.values()])
    for heading, measure in item.table.headings(scale).items():
        gain = bool(item.table.over) and key_of(measure)[0] in ACCURACIES
        for setting, places in item.table.against.items():
            if lines := _lines(item, runs, scale, measure, places, by):
                words = f"gain over {item.table.over} (points)" if gain else heading
                panels.append(Panel(words, setting, lines, gain))
    if not panels:
        raise NoData("No finished runs differ in what the figure shows.")
    return panels_of(panels)


def _lines(
    item: Item, runs: Mapping[Cell, Run], scale: str, measure: Measure, places: Mapping[str, float], by: str
) -> dict[str, list[tuple[float, float, float]]]:
    """Of each of the other choices: the setting, and the mean and standard deviation of the score over seeds, where `by` is
    the column that all runs are judged by."""
    over, found = item.table.over, dict[str, dict[float, list[float]]]()
    for cell in runs:
        names: Label = (*cell.row, *cell.column)
        if len(at := [name for name in names if name in places]) != 1 or over in names:
            continue
        ours = score(item, scale, runs, cell, measure, by)
        if over and key_of(measure)[0] in ACCURACIES:
            theirs = score(item, scale, runs, item.beside(cell, over, scale), measure, by)
            ours = None if ours is None or theirs is None else ours - theirs
        if ours is not None:
            name = shown(tuple(one for one in names if one not in places))
            found.setdefault(name, {}).setdefault(places[at[0]], []).append(ours)
    return {
        name: [
            (x, float(np.mean(its)), float(np.std(its, ddof=1)) if len(its) > 1 else 0.0)
            for x, its in sorted(by.items())
        ]
        for name, by in found.items()
    }
