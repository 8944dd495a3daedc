"""A report: one HTML file that needs no other file and no network, and that prints well."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.report import NoData, ReportError, need
from raysim.report.folder import RunFolder
from raysim.report.groups import Group, compare, differences, runs_of
from raysim.report.summary import Summary, summarise
from raysim.store.atomic import replacing

if TYPE_CHECKING:
    from raysim.report.canvas import Canvas
    from raysim.report.series import Chart, Curve

ENLARGED = 1.6  # figures are made for paper, which readers hold closer than a screen
DETAILED = 6  # up to so many configurations, one run of each is shown in detail

ROOM = 1_700_000  # bytes for figures, so that a page has at most 2 MB
WIDTH = 2  # pixels of a curve on the page, as in page.js
POINTS = 3000  # of a chart, all its curves together

SECTIONS = {
    "Scores": ("scores", "accuracy:rounds", "loss:rounds", "metric", "train-loss:rounds", "pareto", "class-accuracy"),
    "The clients' own models": ("personal:rounds", "worst:rounds", "clients", "personalization"),
    "Bytes and time": ("traffic", "seconds"),
    "Aggregation weights": ("lambda-size", "lambda-coherence", "correlation"),
    "The clients' updates": ("coherence", "heterogeneity", "similarity"),
    "Shrinking": ("balance:fedlaw_ratio", "balance:fedlws_ratio", "tau-r"),
    "The loss around the model": ("rescaling:loss", "slice", "hessian", "histogram"),
}
OF_ONE_RUN = (
    *("lambda", "layers", "notes", "shrinking", "coherence-groups", "classes", "objective", "confusion"),
    *("simplex", "transport", "trajectory", "timeline", "sim-timeline", "utilisation"),
)


@dataclass(frozen=True)
class Drawn:
    """A figure on the page: either markup, or the number of a chart that the page's script draws."""

    svg: Any
    chart: int | None
    width: int  # pixels
    caption: str
    name: str  # as `raysim plot` takes it


@dataclass(frozen=True)
class Section:
    title: str
    figures: list[Drawn]
    left_out: list[str]  # names of figures for which the page had no room


def write(runs: Sequence[RunFolder], out: Path, target: float | None = None) -> Summary:
    """Write the report on these runs to `out`; returns its numbers. `target` is the accuracy of `summarise`.

    Raises `MissingExtra` without matplotlib or jinja2, and `ReportError` where no run is given.
    """
    need("matplotlib.figure", "jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    if not runs:
        raise ReportError("a report needs at least one run.")
    groups = compare(runs)
    summary = summarise(groups, target)
    firsts = [group.first for group in groups]
    labels = [group.label for group in groups]
    pages = Environment(
        loader=PackageLoader("raysim.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    style, script = (
        "".join(_asset(name) for name in names) for names in (("uPlot.css", "page.css"), ("uPlot.js", "page.js"))
    )
    writer = _Figures()
    text = pages.get_template("page.html").render(
        title=" / ".join(labels) if len(groups) <= 3 else f"{len(groups)} configurations",
        setting=_setting(firsts),
        warnings=_warnings(groups),
        summary=summary,
        sections=[section for section in _sections(groups, writer) if section.figures or section.left_out],
        failures=list(_failures(groups)),
        labels=labels,
        varied=[(path, *(_cell(run.settings.get(path)) for run in firsts)) for path in differences(firsts)],
        hashes=[_hashes(run) for run in runs],
        machines=_machines(runs),
        configs=[{"label": group.label, "seed": group.first.seed, "yaml": _config(group.first)} for group in groups],
        charts=writer.charts(),
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(out)) as path:
        path.write_text(text, encoding="utf-8")
    return summary


def _asset(name: str) -> str:
    return Path(__file__).with_name("assets").joinpath(name).read_text(encoding="utf-8")


def _sections(groups: Sequence[Group], writer: _Figures) -> Iterable[Section]:
    runs = runs_of(groups)
    for title, names in SECTIONS.items():
        if title == "Scores" and len(runs) == 1:
            names = names[1:]  # a single number is no figure
        yield writer.section(title, names, groups, "all")
    if len(groups) > DETAILED:
        return
    partitions = {g.first.manifest.get("partition_sha256", g.label): g for g in reversed(groups)}
    for i, group in enumerate(reversed(partitions.values())):
        which = f", {group.label}" if len(partitions) > 1 else ""
        of = f", seed {group.first.seed}" if len(group.runs) > 1 else ""
        one = [replace(group, runs=group.runs[:1])]
        yield writer.section(f"Data distribution over clients{which}{of}", ("partition", "sizes"), one, f"partition{i}")
    for i, group in enumerate(groups):
        of = f", seed {group.first.seed}" if len(group.runs) > 1 else ""
        yield writer.section(f"{group.label}{of}", OF_ONE_RUN, [replace(group, runs=group.runs[:1])], f"run{i}")


class _Figures:
    """Draws the figures of a page, as long as there is room."""

    def __init__(self) -> None:
        self._room = ROOM
        self._charts: list[dict[str, Any]] = []

    def charts(self) -> dict[str, Any]:
        """What the page's script draws."""
        from raysim.report.series import LABELS

        curves = [curve for chart in self._charts for curve in chart["curves"]]
        axes = [axis for axis in LABELS if all(axis in curve["x"] for curve in curves)]
        return {"axes": axes, "labels": LABELS, "of": self._charts}

    def section(self, title: str, bases: Iterable[str], groups: Sequence[Group], place: str) -> Section:
        """The figures for which there are data: of a name without a variant, all variants, the first with the caption."""
        from raysim.report.figures import by_construction, caption, find, names

        section = Section(title, [], [])
        known = list(names(groups[0].first))
        for base in bases:
            words = caption(base)
            for name in known:
                if base not in (name, name.partition(":")[0]) or by_construction(name, groups):
                    continue
                try:
                    found = find(name, groups)
                except NoData:
                    continue
                drawn = self._drawn(found, name, words, re.sub(r"\W+", "-", f"{place}-{name}"))
                if drawn is None:
                    section.left_out.append(name)
                else:
                    section.figures.append(drawn)
                words = ""
        return section

    def _drawn(self, found: Canvas | Chart, name: str, words: str, prefix: str) -> Drawn | None:
        """None where the page has no room for it."""
        from markupsafe import Markup

        from raysim.report.canvas import COLUMN
        from raysim.report.series import Chart

        chart, svg, width = None, "", COLUMN
        if isinstance(found, Chart):
            data = _data(found)
            size = len(json.dumps(data))
        else:
            svg, width = found.svg(prefix), found.get_figwidth()
            size = len(svg.encode())
        if size > self._room:
            return None
        self._room -= size
        if isinstance(found, Chart):
            chart = len(self._charts)
            self._charts.append(data)
            words = " ".join(filter(None, (words, _marks(found), _cut(found))))
        return Drawn(Markup(svg), chart, round(ENLARGED * 96 * width), words, name)


def _marks(chart: Chart) -> str:
    """What bands are, where the caption has to say it because the chart's legend does not."""
    return f"Bands: {chart.band}." if any(curve.std is not None for curve in chart.curves) else ""


def _cut(chart: Chart) -> str:
    """That the axis of a score leaves out zero, and so makes differences look larger than they are."""
    lows = [float(np.nanmin(curve.mean)) for curve in chart.curves if not np.isnan(curve.mean).all()]
    return "The score axis is cut: it does not begin at 0." if chart.percent and lows and min(lows) > 5 else ""


def _data(chart: Chart) -> dict[str, Any]:
    """What the page's script draws, of each curve every n-th point, so that all have POINTS at most."""
    return {
        "label": " ".join(chart.label.split()), "log": chart.log, "zero": chart.zero, "mark": chart.mark,
        "curves": [_curve(chart, i) for i in range(len(chart.curves))],
    }  # fmt: skip


def _curve(chart: Chart, i: int) -> dict[str, Any]:
    from raysim.report.canvas import dash, hue
    from raysim.report.series import axes_of

    curve: Curve = chart.curves[i]
    mark = chart.marks[i] if chart.marks else None
    every = -(-len(curve.rounds) * len(chart.curves) // POINTS)
    last = len(curve.rounds) - 1
    drawn = np.unique([*range(0, last + 1, every), last, *([] if mark is None else [mark])])

    def numbers(values: np.ndarray) -> list[float | None]:
        return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values[drawn].tolist()]

    return {
        "label": curve.label, "hue": hue(curve.number), "dash": [WIDTH * part for part in dash(curve.number)],
        "x": {against: numbers(curve.spent(against)) for against in axes_of(curve.runs[0])},
        "y": numbers(curve.mean), "sd": None if curve.std is None else numbers(curve.std),
        "mark": None if mark is None else int(np.searchsorted(drawn, mark)),
    }  # fmt: skip


def _setting(runs: Sequence[RunFolder]) -> str:
    """What all of the runs share: data, clients, model, rounds."""

    def shared(path: str, words: str = "{}") -> str:
        values = {json.dumps(run.settings.get(path)) for run in runs}
        value = runs[0].settings.get(path)
        return words.format(value) if len(values) == 1 and value is not None else ""

    scheme = shared("data.partition")
    inside = f"data.partition.{scheme}."
    fields = {
        path.removeprefix(inside): value
        for path, value in runs[0].settings.items()
        if scheme and path.startswith(inside)
    }
    details = ", ".join(
        f"{name} {value}" for name, value in fields.items() if value is not None and shared(inside + name)
    )
    parts = [
        shared("data.name"), f"{scheme} ({details})" if details else scheme, shared("model.name"),
        shared("rounds.total", "{} rounds"), shared("rounds.participation", "participation {}"),
        shared("local.epochs", "local epochs {}"), shared("local.lr", "lr {}"),
    ]  # fmt: skip
    return " · ".join(part for part in parts if part)


def _warnings(groups: Sequence[Group]) -> Iterable[str]:
    from raysim.report.measured import outdated

    for group in groups:
        running = [run for run in group.runs if run.result is None]
        if running:
            which = ", ".join(f"seed {run.seed} ({run.rounds_done} of {run.rounds} rounds)" for run in running)
            yield f"Not finished: {group.label}, {which}. Its numbers are those of the rounds so far."
        if stale := sorted({name for run in group.runs for name in outdated(run)}):
            yield (
                f"{group.label}: not shown is what was measured before the run went on to round {group.first.rounds_done} "
                f"({', '.join(stale)}). `raysim measure` takes it again."
            )
        seeds = Counter(run.seed for run in group.runs)
        if twice := [str(seed) for seed, times in seeds.items() if times > 1]:
            yield f"{group.label}: seed {', '.join(twice)} appears more than once, which makes the standard deviation too small."
    if len(groups) > DETAILED:
        yield f"There are {len(groups)} configurations; a report on up to {DETAILED} shows each in detail."


def _failures(groups: Sequence[Group]) -> Iterable[tuple[str, ...]]:
    for group in groups:
        for run in group.runs:
            every = run.columns("clients")["status"].tolist()
            statuses = Counter(status for status in every if status not in ("ok", "asked"))
            for status, times in statuses.most_common(5):
                yield group.label, str(run.seed), str(times), (status.strip() or "-").splitlines()[-1]


def _hashes(run: RunFolder) -> tuple[str, ...]:
    model = run.result["sha256"] if run.result else "not finished"
    return (
        run.folder.resolve().name, str(run.seed), model,
        *(run.manifest.get(key, "-") for key in ("partition_sha256", "config_hash")),
    )  # fmt: skip


def _machines(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Versions and hardware, once for all runs that share them."""
    found: dict[str, list[RunFolder]] = {}
    for run in runs:
        machine = {key: run.manifest.get(key, {}) for key in ("versions", "hardware")}
        found.setdefault(json.dumps(machine), []).append(run)
    machines = []
    for text, shared in found.items():
        machine = json.loads(text)
        rows = [*machine["versions"].items(), *((name, _cell(value)) for name, value in machine["hardware"].items())]
        machines.append({"runs": ", ".join(run.folder.resolve().name for run in shared), "rows": rows})
    return machines


def _config(run: RunFolder) -> str:
    return (run.folder / "config.yaml").read_text(encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name}={its}" for name, its in value.items() if its is not None) or "-"
    return value if isinstance(value, str) else json.dumps(value)
