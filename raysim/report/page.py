"""A report: one HTML file that needs no other file, no network and no script, and that prints well."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysim.report import NoData, ReportError, need
from raysim.report.folder import RunFolder
from raysim.report.groups import Group, compare, differences, runs_of
from raysim.report.summary import Summary, summarise
from raysim.store.atomic import replacing

ENLARGED = 1.6  # figures are made for paper, which readers hold closer than a screen
PORTRAITS = 6  # up to so many configurations, one run of each is shown in detail

SECTIONS = {
    "Scores": ("scores", "accuracy", "loss", "metric", "train-loss:rounds"),
    "The clients' own models": ("personal", "worst:rounds", "clients"),
    "Bytes and time": ("traffic", "seconds"),
    "Aggregation weights": ("lambda-size", "lambda-coherence", "correlation"),
    "The clients' updates": ("coherence", "heterogeneity", "similarity"),
    "Shrinking": ("balance:fedlaw_ratio", "balance:fedlws_ratio", "tau-r"),
    "The loss around the model": ("rescaling:loss", "slice", "hessian", "histogram"),
}
PORTRAIT = (
    *("lambda", "layers", "notes", "shrinking", "coherence-groups", "classes", "objective"),
    *("simplex", "transport", "trajectory", "timeline", "utilisation"),
)


@dataclass(frozen=True)
class Drawn:
    """A figure on the page."""

    svg: Any  # markup
    width: int  # pixels
    caption: str
    name: str  # as `raysim plot` takes it


@dataclass(frozen=True)
class Section:
    title: str
    figures: list[Drawn]


def write(runs: Sequence[RunFolder], out: Path, target: float | None = None) -> Summary:
    """Write the report on these runs to `out`; returns its numbers. `target` is the accuracy of `summarise`.

    Raises `MissingExtra` without matplotlib or jinja2, and `ReportError` where no run is given.
    """
    need("matplotlib.figure", "jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if not runs:
        raise ReportError("a report needs at least one run.")
    groups = compare(runs)
    summary = summarise(groups, target)
    firsts = [group.first for group in groups]
    labels = [group.label for group in groups]
    pages = Environment(
        loader=PackageLoader("raysim.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    text = pages.get_template("page.html").render(
        title=" / ".join(labels) if len(groups) <= 3 else f"{len(groups)} configurations",
        setting=_setting(firsts),
        warnings=_warnings(groups),
        summary=summary,
        sections=[section for section in _sections(groups) if section.figures],
        failures=list(_failures(groups)),
        labels=labels,
        varied=[(path, *(_cell(run.settings.get(path)) for run in firsts)) for path in differences(firsts)],
        hashes=[_hashes(run) for run in runs],
        machines=_machines(runs),
        configs=[{"label": group.label, "seed": group.first.seed, "yaml": _config(group.first)} for group in groups],
    )
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with replacing(Path(out)) as path:
        path.write_text(text, encoding="utf-8")
    return summary


def _sections(groups: Sequence[Group]) -> Iterable[Section]:
    runs = runs_of(groups)
    for title, names in SECTIONS.items():
        if title == "Scores" and len(runs) == 1:
            names = names[1:]  # a single number is no figure
        yield Section(title, _drawn(names, runs, "all"))
    if len(groups) > PORTRAITS:
        return
    partitions = {g.first.manifest.get("partition_sha256", g.label): g for g in reversed(groups)}
    for i, group in enumerate(reversed(partitions.values())):
        which = f", {group.label}" if len(partitions) > 1 else ""
        of = f", seed {group.first.seed}" if len(group.runs) > 1 else ""
        yield Section(f"Who holds what{which}{of}", _drawn(("partition", "sizes"), [group.first], f"partition{i}"))
    for i, group in enumerate(groups):
        of = f", seed {group.first.seed}" if len(group.runs) > 1 else ""
        yield Section(f"{group.label}{of}", _drawn(PORTRAIT, [group.first], f"run{i}"))


def _drawn(bases: Iterable[str], runs: Sequence[RunFolder], place: str) -> list[Drawn]:
    """The figures for which there are data: of a name without a variant, all variants, the first with the caption."""
    from markupsafe import Markup

    from raysim.report.figures import caption, draw, names

    found = []
    for base in bases:
        words = caption(base)
        for name in names(runs[0]):
            if base not in (name, name.partition(":")[0]):
                continue
            try:
                figure = draw(name, runs)
            except NoData:
                continue
            svg = Markup(figure.svg(re.sub(r"\W+", "-", f"{place}-{name}")))
            width = round(ENLARGED * 96 * figure.get_figwidth())
            found.append(Drawn(svg, width, words, name))
            words = ""
    return found


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
    for group in groups:
        running = [run for run in group.runs if run.result is None]
        if running:
            which = ", ".join(f"seed {run.seed} ({run.played} of {run.rounds} rounds)" for run in running)
            yield f"Not finished: {group.label}, {which}. Its numbers are those of the rounds so far."
        seeds = Counter(run.seed for run in group.runs)
        if twice := [str(seed) for seed, times in seeds.items() if times > 1]:
            yield f"{group.label}: seed {', '.join(twice)} appears more than once, which makes the standard deviation too small."
    if len(groups) > PORTRAITS:
        yield f"There are {len(groups)} configurations; a report on up to {PORTRAITS} shows each in detail."


def _failures(groups: Sequence[Group]) -> Iterable[tuple[str, ...]]:
    for group in groups:
        for run in group.runs:
            statuses = Counter(status for status in run.columns("clients")["status"].tolist() if status != "ok")
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
    return value if isinstance(value, str) else json.dumps(value)
