"""`raysim sweep` and `raysim reproduce`: many runs, and what they came to."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysim.api.errors import reported
from raysim.cli import complete
from raysim.cli.options import (
    AcceptChangedCode,
    Address,
    ConfigName,
    Overrides,
    Parallel,
    Seeds,
    TableFormat,
    Target,
    Varied,
    VariedChanges,
    runs_at_once,
    seed_numbers,
)
from raysim.printable import printable

if TYPE_CHECKING:
    from raysim.sweep.grid import Point
    from raysim.sweep.items import Cell, Item


def sweep(
    config: ConfigName,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder in which each run has its own.")],
    changes: VariedChanges = None,
    overrides: Varied = None,
    seeds: Seeds = "",
    target: Target = None,
    parallel: Parallel = "1",
    accept_changed_code: AcceptChangedCode = False,
    address: Address = None,
    format: TableFormat = None,
) -> None:
    """Run a grid of configurations and compare them; the same command continues a sweep that was stopped."""
    from raysim.config.shipped import find
    from raysim.sweep.compare import compare
    from raysim.sweep.grid import grid
    from raysim.sweep.running import run_all

    with reported():
        points = grid(find(config), [*(overrides or ()), *(changes or ())], seed_numbers(seeds), out)
        status = run_all(points, address, runs_at_once(parallel), accept_changed_code)
        if status < 128:  # after Ctrl-C no report is wanted
            compare(points, out, target, format)
    raise typer.Exit(status)


class Scale(StrEnum):
    """How much of a paper's table `raysim reproduce` runs."""

    full = "full"
    small = "small"
    medium = "medium"


def reproduce(
    item: Annotated[
        str,
        typer.Argument(metavar="ITEM", help="A table or figure, such as fedlws/table1.", autocompletion=complete.items),
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="Name them all, and the data they need.")] = False,
    scale: Annotated[Scale, typer.Option(help="The paper's, a smoke run, or a night's comparison.")] = Scale.full,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the data are; default: RAYSIM_DATA.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these rows or columns.")] = None,
    seeds: Seeds = "",
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs; default: runs/reproduce/ITEM-SCALE.")
    ] = None,
    parallel: Parallel = "1",
    accept_changed_code: AcceptChangedCode = False,
    address: Address = None,
    format: TableFormat = None,
) -> None:
    """Run a table or figure of a paper and print it beside the paper's numbers; the same command continues."""
    from raysim.config import ConfigError
    from raysim.report.paper_table import write_table
    from raysim.sweep.items import find, items, listing
    from raysim.sweep.running import run_all
    from raysim.sweep.text import paper_tables, table_text

    with reported():
        if listed:
            print(printable("\n".join(listing(items())), lines=True))
            return
        if not item:
            raise ConfigError("raysim reproduce: name a table or figure; `raysim reproduce --list` shows all.")
        chosen = find(item)
        root = [f"data.root={json.dumps(str(data), ensure_ascii=False)}"] if data else []
        changes = [*root, *(overrides or ())]
        folder = out or Path("runs", "reproduce", f"{item.replace('/', '_')}-{scale}")
        points = chosen.runs(scale, seed_numbers(seeds), changes, folder, only or ())
        status = run_all(list(points.values()), address, runs_at_once(parallel), accept_changed_code)
        if any(point.finished for point in points.values()):
            print(printable(f"\n{table_text(chosen, points, scale, overrides or ())}", lines=True))
            if format:
                print(f"\ntable   {write_table(paper_tables(chosen, points, scale), folder, format)}")
            _figure(chosen, points, scale, folder)
    raise typer.Exit(status)


def _figure(item: Item, points: Mapping[Cell, Point], scale: str, folder: Path) -> None:
    """Draw the item's figure, if it has one; what is missing for it is said, and the table is there without."""
    from raysim.report import MissingExtra, NoData, need

    try:
        need("matplotlib.figure")
        from raysim.sweep.drawing import draw_item

        if path := draw_item(item, points, scale, folder):
            print(f"\nfigure  {path}")
    except (MissingExtra, NoData) as error:
        print(f"raysim: no figure: {error}", file=sys.stderr)
