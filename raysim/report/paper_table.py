"""Tables for a paper, in LaTeX, CSV, Markdown or HTML: the best of a column bold, the second underlined, ± over seeds."""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from raysim.printable import printable
from raysim.report import ReportError
from raysim.report.significance import LEVEL, differ
from raysim.store.atomic import replacing
from raysim.version import __version__

ENDINGS = {"latex": "tex", "csv": "csv", "markdown": "md", "html": "html"}  # of files, by format
LEGEND = (
    "±: sample standard deviation over seeds. Of a column, the best is bold and the second underlined, among the rows that have a "
    "number for every seed.",
    f"*: differs from the best by more than chance (paired t test over seeds, Holm's correction, p < {LEVEL:g}).",
)


@dataclass(frozen=True)
class Entry:
    """A cell: its text, and the numbers behind it."""

    text: str
    by_seed: Mapping[int, float] = field(default_factory=dict)
    missing: int = 0  # seeds without such a number

    @property
    def mean(self) -> float:
        return float(np.mean([*self.by_seed.values()])) if self.by_seed else math.nan

    @property
    def std(self) -> float:
        return float(np.std([*self.by_seed.values()], ddof=1)) if len(self.by_seed) > 1 else math.nan


@dataclass(frozen=True)
class Column:
    """Of a table; its entries are in the order of the rows."""

    heading: str
    entries: tuple[Entry, ...]
    better: int = 0  # 1: higher is better, -1: lower, 0: neither

    def places(self) -> list[int]:
        """1 for the best, 2 for the second, 0 for others; equals share a place. A mean without some seeds has none: those
        without a number may be the bad ones, such as a target that they never reached."""
        means = [self.better * e.mean if self.better and not e.missing else math.nan for e in self.entries]
        order = sorted({mean for mean in means if not math.isnan(mean)}, reverse=True)
        if len(order) < 2:
            return [0] * len(means)
        return [order.index(mean) + 1 if mean in order[:2] else 0 for mean in means]

    def differ(self) -> list[bool]:
        """Which entries differ from the best by more than chance."""
        places = self.places()
        if 1 not in places:
            return [False] * len(places)
        best = places.index(1)
        scores = [entry.by_seed for entry in self.entries]
        tests = differ(scores[best], [*scores[:best], *scores[best + 1 :]])
        return [p < LEVEL for p in (*tests[:best], math.nan, *tests[best:])]


@dataclass(frozen=True)
class PaperTable:
    """A table: what its rows are, and its columns."""

    corner: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    title: str = ""


def chosen(paper_table: PaperTable, headings: Sequence[str]) -> PaperTable:
    """The table with only these columns, in this order; without headings, all. Raises `ReportError` for one that is not there."""
    by_heading = {column.heading: column for column in paper_table.columns}
    if unknown := [heading for heading in headings if heading not in by_heading]:
        raise ReportError(f"there is no column {unknown[0]!r}; there are {', '.join(map(repr, by_heading))}.")
    return replace(paper_table, columns=tuple(by_heading[heading] for heading in headings)) if headings else paper_table


def render(paper_tables: Sequence[PaperTable], kind: str) -> str:
    """The tables in a format of `ENDINGS`, with a comment that says how they were made."""
    writer = {"latex": _latex, "csv": _csv, "markdown": _markdown, "html": _html}[kind]
    text = writer([*made_by(), *LEGEND], paper_tables)
    return text if kind == "csv" else printable(text, lines=True)  # a program reads the former, to the letter


def write_table(paper_tables: Sequence[PaperTable], folder: Path, kind: str) -> Path:
    """Write the tables into the folder, as `table.tex` and so on; returns where they are."""
    path = folder / f"table.{ENDINGS[kind]}"
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(render(paper_tables, kind), encoding="utf-8")
    return path


def made_by() -> list[str]:
    """The command that is running, and the state of raysim's source, or its version where it was installed without."""
    return [shlex.join(["raysim", *sys.argv[1:]]).replace("\n", " "), _source()]


def _source() -> str:
    version = f"raysim {__version__}"
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return version

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return f"{version}, commit {git('rev-parse', 'HEAD')}{changed}"
    except (OSError, subprocess.CalledProcessError):  # no git, or a checkout of another user
        return version


def _cells(paper_table: PaperTable, plain: Callable[[str], str], *marks: str) -> list[list[str]]:
    """Rows of texts, the headings first; `marks` are around the best, around the second, and behind what differs."""
    bold, underlined, differs = marks
    columns = []
    for column in paper_table.columns:
        cells = [plain(column.heading)]
        for entry, place, apart in zip(column.entries, column.places(), column.differ(), strict=True):
            around = {1: bold, 2: underlined}.get(place, "%s")
            cells.append(around.replace("%s", plain(entry.text)) + differs * apart)
        columns.append(cells)
    return [list(row) for row in zip([plain(paper_table.corner), *map(plain, paper_table.rows)], *columns, strict=True)]


_TEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"}, "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}", "±": r"$\pm$", "−": "$-$", "·": r"$\cdot$", "×": r"$\times$",
    **{letter: f"$\\{name}$" for letter, name in zip("αβγλμτε", ("alpha", "beta", "gamma", "lambda", "mu", "tau", "epsilon"),
                                                     strict=True)},
}  # fmt: skip


def _latex(about: Sequence[str], paper_tables: Sequence[PaperTable]) -> str:
    def plain(text: str) -> str:
        return re.sub(r"\s", " ", "".join(_TEX.get(letter, letter) for letter in text))

    lines = [f"% {line}" for line in about] + [r"% \usepackage{booktabs}"]
    for paper_table in paper_tables:
        head, *rows = _cells(paper_table, plain, r"\textbf{%s}", r"\underline{%s}", "$^{*}$")
        lines += [
            "",
            *([f"% {' '.join(paper_table.title.split())}"] if paper_table.title else []),
            rf"\begin{{tabular}}{{l{'c' * len(paper_table.columns)}}}",
        ]
        lines += [r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
        lines += [*(" & ".join(row) + r" \\" for row in rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _markdown(about: Sequence[str], paper_tables: Sequence[PaperTable]) -> str:
    def plain(text: str) -> str:
        return re.sub(r"\s", " ", re.sub(r"([\\|*<`])", r"\\\1", text))

    lines = _comment(about)
    for paper_table in paper_tables:
        rows = _cells(paper_table, plain, "**%s**", "<u>%s</u>", r"\*")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        lines += ["", *([f"{plain(paper_table.title)}:", ""] if paper_table.title else [])]
        lines += [f"| {' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _html(about: Sequence[str], paper_tables: Sequence[PaperTable]) -> str:
    lines = _comment(about)
    for paper_table in paper_tables:
        head, *rows = _cells(paper_table, html.escape, "<strong>%s</strong>", "<u>%s</u>", "<sup>*</sup>")
        lines += ["<table>", *([f"<caption>{html.escape(paper_table.title)}</caption>"] if paper_table.title else [])]
        lines.append(f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>")
        lines += ["<tbody>", *(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)]
        lines += ["</tbody>", "</table>"]
    return "\n".join(lines) + "\n"


def _comment(about: Sequence[str]) -> list[str]:
    return ["<!--", *(line.replace("-->", "--&gt;").replace("--!>", "--!&gt;") for line in about), "-->"]


def _csv(about: Sequence[str], paper_tables: Sequence[PaperTable]) -> str:
    """Means, and standard deviations in columns of their own, and how many seeds lack the number, where some have it and
    some do not; what has no number is there as text."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for line in about[:2]:
        stream.write(f"# {line}\n")
    for paper_table in paper_tables:
        if paper_table.title:
            stream.write(f"\n# {' '.join(paper_table.title.split())}\n")
        columns = [_csv_column(column) for column in paper_table.columns]
        first = (paper_table.corner, *paper_table.rows)
        writer.writerows([name, *itertools.chain(*row)] for name, *row in zip(first, *columns, strict=True))
    return stream.getvalue()


def _csv_column(column: Column) -> list[list[str]]:
    """The cells of a column, row by row, the headings first: one or several side by side."""
    if not any(entry.by_seed for entry in column.entries):
        return [[column.heading], *([entry.text] for entry in column.entries)]
    rows = [[column.heading, f"{column.heading}, std"], *([_number(e.mean), _number(e.std)] for e in column.entries)]
    if any(entry.missing and entry.by_seed for entry in column.entries):
        counts = [f"{column.heading}, seeds missing", *(str(entry.missing) for entry in column.entries)]
        rows = [[*row, count] for row, count in zip(rows, counts, strict=True)]
    return rows


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.10g}"
