"""How figures look: sizes, colours, legends, heat maps, files. Sizes are those of a paper's columns."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from raysim.report import ReportError
from raysim.store.atomic import replacing

COLUMN, PAGE = 3.4, 7.0  # inches: one column of a paper, and both
INK, GRID, IDLE, SHADED = "#333333", "#e6e6e6", "#d9d9d9", "#f0f0f0"
# Okabe and Ito's colours, but for the yellow, which fades on white paper, and Tol's wine and indigo. Colour-blind readers
# can distinguish them.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#882255", "#56b4e9", "#e69f00", "#332288", "#000000")
# On and off, in widths of a line: so that both of two curves that coincide show, also without colours.
DASHES: tuple[tuple[float, ...], ...] = (
    (), (3.7, 1.6), (1, 1.65), (6.4, 1.6, 1, 1.6), (4, 1.2, 1, 1.2, 1, 1.2)
)  # fmt: skip
MARKS = "os^Xv*P"  # no diamond, which marks a place of a curve
SEQUENTIAL, DIVERGING, BLANK = "viridis", "PuOr", (0.5, 0.5, 0.5, 0.16)

# What a page calls the colours that are others when it is dark.
THEME = {
    INK: "ink", GRID: "grid", IDLE: "idle", "#888888": "edge", SHADED: "shaded",
    **{shade: f"hue-{i}" for i, shade in enumerate(COLOURS)},
}  # fmt: skip

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "text.parse_math": False,  # names may hold a $, and no label here is a formula
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2,
    "legend.columnspacing": 1.4,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 3,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "svg.hashsalt": "raysim",  # the same figure is the same file
}


def styled() -> AbstractContextManager[None]:
    """The style, while figures are drawn or saved."""
    return matplotlib.rc_context(STYLE)


class Canvas(Figure):
    """A matplotlib figure that leaves room for its labels and that notebooks show; pyplot does not know of it."""

    def __init__(self, width: float, height: float):
        super().__init__(figsize=(width, height), layout="constrained", dpi=150)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        return self._bytes("png")

    def save(self, path: Path) -> None:
        """Write the figure in the format of the name's ending. Raises `ReportError` for an unknown one."""
        kind = path.suffix.removeprefix(".").lower()
        if kind not in self.canvas.get_supported_filetypes():
            raise ReportError(f"{path}: the name of a figure ends with .pdf, .svg or .png.")
        undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
        path.parent.mkdir(parents=True, exist_ok=True)
        with styled(), replacing(path) as temporary:
            self.savefig(temporary, format=kind, dpi=300, metadata=undated)

    def svg(self, prefix: str) -> str:
        """An <svg> element for a page: text stays text, colours follow the page's, and ids begin with `prefix`, so that
        figures do not mix."""
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            text = self._bytes(
                "svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
            ).decode()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r"(fill|stroke): (#[0-9a-f]{6})\b", _themed, text)
        return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)

    def _bytes(self, kind: str, **options: Any) -> bytes:
        content = io.BytesIO()
        with styled():
            self.savefig(content, format=kind, **options)
        return content.getvalue()


def panel(width: float, height: float) -> tuple[Canvas, Axes]:
    """A figure of these inches with one pair of axes."""
    figure = Canvas(width, height)
    return figure, figure.add_subplot()


def _themed(found: re.Match[str]) -> str:
    name = THEME.get(found[2])
    return f"{found[1]}: var(--{name}, {found[2]})" if name else found[0]


def hue(i: int) -> int:
    """The place in COLOURS of the colour of that number."""
    return i % len(COLOURS)


def colour(i: int) -> str:
    return COLOURS[hue(i)]


def dash(i: int) -> tuple[float, ...]:
    return DASHES[_turn(i) % len(DASHES)]


def mark(i: int) -> str:
    return MARKS[_turn(i) % len(MARKS)]


def _turn(i: int) -> int:
    """Differs between neighbours, and between numbers of one colour."""
    return hue(i) + i // len(COLOURS)


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend above the axes, in as many columns as the figure has room for; the figure grows by its lines."""
    if not labels:
        return
    room = int(figure.get_figwidth() * 15)  # letters of the legend's size in a line
    labels = [fill(label, room - 5) for label in labels]
    columns = max(1, min(len(labels), room // (max(map(len, labels)) + 5)))
    lines = max(label.count("\n") + 1 for label in labels) * -(-len(labels) // columns)
    dots = any(isinstance(handle, PathCollection) for handle in handles)  # small in a cloud, too small alone
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, markerscale=1.8 if dots else 1)
    figure.set_figheight(figure.get_figheight() + 0.15 * lines)


def named_rows(figure: Figure, axes: Axes, names: Sequence[str]) -> None:
    """Names at rows 0, 1, ... from the top; long ones in several lines, for which the figure grows."""
    names = [fill(name, 26) for name in names]
    lines = max(name.count("\n") + 1 for name in names)
    figure.set_figheight(figure.get_figheight() + 0.14 * (lines - 1) * len(names))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def whole_rounds(axes: Axes) -> None:
    """Ticks of an axis that counts rounds."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))


def decades(axis: Axis) -> None:
    """Labels of a logarithmic axis. One that spans little has them at 1, 2 and 5 too, or evenly spaced."""
    low, high = axis.get_view_interval()
    if high / low < 300:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low > 5 else MaxNLocator(4))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def every_nth(count: int, most: int) -> int:
    """The step from label to label, so that `count` places have at most `most`: 1, 2, 5, 10, 20, 50 and so on."""
    steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return int(next(step for step in steps if step * most >= count))


def name_rows(axes: Axes, names: Sequence[str], height: float) -> None:
    """Names at the rows of a heat map `height` inches high, as many as do not touch."""
    every = every_nth(len(names), max(1, int(height / 0.11)))
    axes.set_yticks(
        range(0, len(names), every), [name if len(name) <= 22 else f"…{name[-21:]}" for name in names[::every]]
    )


def heat_map(
    axes: Axes, values: np.ndarray, title: str, *, left: float = 0.0, limits: tuple[float, float] | None = None
) -> None:
    """`values` [Y, X] as colours, the first row on top, NaN blank; `left` is the x of the first column.

    `title` says what is shown, with its unit. Values of both signs have two colours, which meet in white at zero.
    """
    low, high = limits or (np.nanmin(values), np.nanmax(values))
    signed = low < 0 < high
    if signed:
        low, high = min(low, -high), max(high, -low)  # equally dark means equally far from zero
    norm = Normalize(low, high)
    shades = matplotlib.colormaps[DIVERGING if signed else SEQUENTIAL].with_extremes(bad=BLANK)
    rows, columns = values.shape
    edges = (left - 0.5, left + columns - 0.5, rows - 0.5, -0.5)
    image = axes.imshow(values, cmap=shades, norm=norm, aspect="auto", interpolation="nearest", extent=edges)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    figure = axes.figure
    assert isinstance(figure, Figure)
    long = 10 * max(0.8, figure.get_figheight() - 0.75)  # a bar is a tenth of an inch wide, and as long as the map
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.08, aspect=long)
    axes.set_title(title, loc="left")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2)
