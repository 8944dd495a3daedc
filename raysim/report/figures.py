"""All figures by name. `accuracy:uplink` is the variant `uplink` of `accuracy`; a name without one is the first variant. What is a
curve over rounds takes one of `series.AGAINST` for its axis, last: `norm:clock`, `metric:mae:clock`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from raysim.report import (
    NoData,
    ReportError,
    clients,
    confusion,
    costs,
    curves,
    landscape,
    learning,
    measured,
    quantities,
    series,
    shrinking,
    simulated,
    updates,
)
from raysim.report.canvas import Canvas, styled
from raysim.report.folder import RunFolder
from raysim.report.groups import Group, compare, runs_of
from raysim.report.series import Chart
from raysim.report.summary import metric_names

Variants = Callable[[RunFolder], list[str]]
"""Names of the variants of a figure for a run, in their order."""


@dataclass(frozen=True)
class Comparison:
    """A figure of several configurations, each perhaps with several seeds."""

    of: Callable[..., Canvas | Chart]  # (groups), or (groups, variant)
    variants: Variants | None = None


@dataclass(frozen=True)
class SingleRunFigure:
    """A figure of one run."""

    of: Callable[..., Canvas | Chart]  # (run), or (run, variant)
    variants: Variants | None = None
    detailed: bool = False  # whether a detail may follow a variant, as in learning:fedala.loss:8


def always(names: Iterable[str]) -> Variants:
    """The same variants for every run."""
    return lambda run: list(names)


AGAINST: Variants = series.axes_of

STRAIGHT = {"lambda-size": clients.weigh_by_size, "tau-r": shrinking.in_proportion, "pareto": curves.equally_costly}
BYTES = {  # how two variants differ
    "uplink": "Against what the clients have sent, and not what they were sent.",
    "traffic": "Against all that was sent, by the clients and to them.",
}

FIGURES: dict[str, Comparison | SingleRunFigure] = {
    "scores": Comparison(curves.final_scores),
    "pareto": Comparison(curves.pareto),
    "accuracy": Comparison(curves.accuracy, AGAINST),
    "loss": Comparison(curves.loss, AGAINST),
    "train-loss": Comparison(curves.train_loss, AGAINST),
    "metric": Comparison(curves.metric, metric_names),
    "personal": Comparison(curves.personal, AGAINST),
    "worst": Comparison(curves.worst, AGAINST),
    "clients": Comparison(clients.client_accuracy),
    "personalization": Comparison(confusion.personalization),
    "class-accuracy": Comparison(confusion.class_accuracy),
    "lambda-size": Comparison(clients.weights_by_size),
    "norm": Comparison(shrinking.norm),
    "coherence": Comparison(updates.coherence, always(updates.COHERENCES)),
    "lambda-coherence": Comparison(updates.weights_by_coherence),
    "heterogeneity": Comparison(updates.heterogeneity, always(updates.HETEROGENEITIES)),
    "balance": Comparison(shrinking.balance, always(shrinking.BALANCES)),
    "ratios": Comparison(shrinking.ratios, always(shrinking.RATIOS)),
    "tau-r": Comparison(shrinking.tau_r),
    "similarity": Comparison(updates.similarity),
    "correlation": Comparison(measured.correlation),
    "histogram": Comparison(measured.histogram),
    "rescaling": Comparison(landscape.rescaling, always(("loss", "accuracy"))),
    "hessian": Comparison(landscape.hessian, always(("spectrum", "first", "ratio"))),
    "slice": Comparison(landscape.slice_),
    "traffic": Comparison(costs.traffic),
    "parameters": Comparison(costs.parameters),
    "seconds": Comparison(costs.seconds),
    "partition": SingleRunFigure(clients.partition),
    "sizes": SingleRunFigure(clients.sizes),
    "lambda": SingleRunFigure(clients.weights),
    "layers": SingleRunFigure(quantities.layers, quantities.layer_names),
    "notes": SingleRunFigure(quantities.notes, quantities.note_names),
    "learning": SingleRunFigure(learning.learning, learning.learned, detailed=True),
    "shrinking": SingleRunFigure(shrinking.shrinking),
    "coherence-groups": SingleRunFigure(updates.coherence_groups),
    "classes": SingleRunFigure(updates.classes),
    "objective": SingleRunFigure(updates.objective),
    "simplex": SingleRunFigure(landscape.simplex, always(("surface", "optima"))),
    "confusion": SingleRunFigure(confusion.confusion),
    "transport": SingleRunFigure(measured.transport),
    "trajectory": SingleRunFigure(landscape.trajectory),
    "timeline": SingleRunFigure(costs.timeline),
    "sim-timeline": SingleRunFigure(simulated.timeline),
    "utilisation": SingleRunFigure(costs.utilisation),
}


def draw(name: str, runs: Sequence[RunFolder], labels: Mapping[Path, str] = MappingProxyType({})) -> Canvas:
    """The figure `name` of these runs, for paper. `labels` name configurations by the folder of their first run; others are
    named by what distinguishes them. Raises as `find`."""
    with styled():
        groups = [replace(group, label=labels.get(group.first.folder, group.label)) for group in compare(runs)]
        found = find(name, groups)
        return found.canvas() if isinstance(found, Chart) else found


def find(name: str, groups: Sequence[Group]) -> Canvas | Chart:
    """The figure `name` of the runs of these groups; if it has only lines, what it shows.

    Raises `NoData` where none of them has recorded what it shows, and `ReportError` for an unknown name and for several
    runs where the figure shows one.
    """
    base, _, variant = name.partition(":")
    entry = FIGURES.get(base)
    if entry is None:
        near = difflib.get_close_matches(base, FIGURES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ReportError(f"there is no figure {name!r}.{hint} There are {', '.join(FIGURES)}.")
    runs = runs_of(groups)
    if isinstance(entry, SingleRunFigure) and len(runs) > 1:
        raise ReportError(f"{base} shows one run, but {len(runs)} were given.")
    shown = groups if isinstance(entry, Comparison) else runs[0]
    whole, _, axis = variant.rpartition(":")
    if axis in series.AGAINST and entry.variants is not AGAINST:
        chart = find(f"{base}:{whole}" if whole else base, groups)
        if not isinstance(chart, Chart):
            raise ReportError(f"{base} is no curve over rounds, so it has no other axis: leave out {axis!r}.")
        return replace(chart, against=axis)
    with styled():
        if entry.variants is None:
            if variant:
                raise ReportError(f"{base} has no variants, so none named {variant!r}.")
            return entry.of(shown)
        variants = entry.variants(runs[0])
        if not variants:
            raise NoData(f"The run has recorded nothing that {base} shows.")
        detailed = isinstance(entry, SingleRunFigure) and entry.detailed
        if variant and (variant.partition(":")[0] if detailed else variant) not in variants:
            raise ReportError(f"{base} has no variant {variant!r}; there are {', '.join(variants)}.")
        return entry.of(shown, variant or variants[0])


def names(run: RunFolder) -> Iterator[str]:
    """Every figure and variant that the run may have the data for."""
    for base, entry in FIGURES.items():
        yield from [base] if entry.variants is None else [f"{base}:{variant}" for variant in entry.variants(run)]


def available(runs: Sequence[RunFolder]) -> list[str]:
    """Names of the figures for which these runs have the data."""
    found, groups = [], compare(runs)
    for name in names(runs[0]):
        if len(runs) > 1 and isinstance(FIGURES[name.partition(":")[0]], SingleRunFigure):
            continue
        try:
            find(name, groups)
        except NoData:
            continue
        found.append(name)
    return found


def by_construction(name: str, groups: Sequence[Group]) -> bool:
    """Whether the figure is a straight line whatever the runs did, and so says nothing about them."""
    test = STRAIGHT.get(name)
    return test is not None and test(groups)


def caption(name: str) -> str:
    """What the figure shows, in words."""
    base, _, variant = name.partition(":")
    entry = FIGURES[base]
    words = " ".join((entry.of.__doc__ or "").split())
    return f"{words} {BYTES[variant]}" if entry.variants is AGAINST and variant in BYTES else words
