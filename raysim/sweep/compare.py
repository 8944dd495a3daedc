"""The comparison of a sweep's runs, printed and as a report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raysim.api.lines import aligned
from raysim.store.manifest import FAILED
from raysim.sweep.grid import Point


def compare(points: Sequence[Point], folder: Path, target: float | None = None, kind: str | None = None) -> None:
    """Print the comparison of the finished runs, if there are any, in which those that failed count as missing, and write
    their report into the folder; with `kind`, a format of `paper_table.ENDINGS`, also the table."""
    from raysim.report import MissingExtra
    from raysim.report.groups import compare as grouped
    from raysim.report.page import write
    from raysim.report.paper_table import write_table
    from raysim.report.runs import Run
    from raysim.report.summary import summarise

    if not any(point.finished for point in points):
        return
    runs = [Run(point.folder) for point in points if point.finished or (point.folder / FAILED).exists()]
    summary = summarise(grouped(runs), target)
    for table in (summary.scores, summary.costs):
        print("\n" + "\n".join(aligned(table, ">")))
    if kind:
        print(f"\ntable   {write_table([summary.paper_table], folder, kind)}")
    page = folder / "report.html"
    try:
        write(runs, page, target)
    except MissingExtra as error:  # the table is worth having without the page
        print(f"raysim: no report: {error}", file=sys.stderr)
    else:
        print(f"\nreport  {page}")
