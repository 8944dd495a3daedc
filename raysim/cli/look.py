"""`raysim report`, `raysim watch`, `raysim plot` and `raysim measure`: what saved runs show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysim.api.errors import reported
from raysim.cli import complete
from raysim.cli.options import Format, RunPaths, Target
from raysim.printable import printable


def report(
    runs: RunPaths,
    out: Annotated[Path, typer.Option(metavar="HTML", help="The page; it needs no other file.")] = Path("report.html"),
    target: Target = None,
    format: Annotated[Format | None, typer.Option(help="Print the table for a paper, and write no page.")] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="HEADING", help="With --format: only these columns, in this order."),
    ] = None,
) -> None:
    """Compare runs in one page: tables and figures; runs that differ only in the seed are averaged."""
    from raysim.report import ReportError
    from raysim.report.groups import compare
    from raysim.report.page import write
    from raysim.report.paper_table import chosen, render
    from raysim.report.runs import find
    from raysim.report.summary import summarise

    with reported():
        if columns and not format:
            raise ReportError("--column chooses columns of the table that --format prints; name a format as well.")
        if format:
            print(render([chosen(summarise(compare(find(runs)), target).paper_table, columns or ())], format), end="")
            return
        summary = write(find(runs), out, target)
        print(printable(f"{summary.sentence}\n{out}", lines=True))


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, or folders that contain runs; default: runs."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 0,
    every: Annotated[float, typer.Option(min=1, help="Seconds after which the browser asks again.")] = 10,
) -> None:
    """Serve the report of runs while they train, to a browser on this machine; Ctrl-C ends it."""
    import threading
    from contextlib import suppress

    with reported():
        from raysim.report.watch import Watch, serving

        with serving(Watch(runs or [Path("runs")], every), port) as address, suppress(KeyboardInterrupt):
            print(f"{address}\nCtrl-C ends it; the runs go on.", flush=True)
            threading.Event().wait()


def plot(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="accuracy, loss:uplink, ...: raysim list figures.", autocompletion=complete.figures
        ),
    ],
    runs: RunPaths,
    out: Annotated[Path, typer.Option(metavar="FIG", help="Image: .pdf, .svg or .png.")],
) -> None:
    """Draw one figure of one or several runs, for a paper."""
    from raysim.report import need
    from raysim.report.runs import find

    with reported():
        need("matplotlib.figure")
        from raysim.report.figures import draw

        draw(name, find(runs)).save(out)
        print(out)


def measure(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="rescaling, hessian, ...: raysim list instruments.", autocompletion=complete.measures
        ),
    ],
    runs: RunPaths,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="Set an option: samples=2000.")
    ] = None,
) -> None:
    """Measure saved runs with one of the papers' instruments; `raysim plot` and `report` show what it found."""
    from raysim.analysis import MEASURES
    from raysim.analysis.measure import need, write
    from raysim.config import read_entry
    from raysim.registry import Catalogue
    from raysim.report.runs import find

    with reported():
        chosen = read_entry(Catalogue("measure", MEASURES), name, overrides or ())
        need(chosen)
        from raysim.federation.saved import SavedRun

        for one in find(runs):
            taken = write(name, chosen, SavedRun(one.folder))
            print(printable(f"{one.folder}: {taken.sentence}"), flush=True)
