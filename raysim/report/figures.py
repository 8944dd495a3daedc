"""All figures by name. `accuracy:uplink` is the variant `uplink` of `accuracy`; a name alone is the first variant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raysim.report import NoData, ReportError, clients, costs, curves, measured, observed, quantities
from raysim.report.canvas import Canvas, styled
from raysim.report.runs import Run, compare


@dataclass(frozen=True)
class Comparison:
    """A figure of several configurations, each perhaps with several seeds."""

    draw: Callable[..., Canvas]  # (groups), or (groups, variant)
    variants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Portrait:
    """A figure of one run."""

    draw: Callable[..., Canvas]  # (run), or (run, variant)
    variants: Callable[[Run], Sequence[str]] = lambda run: ()


AGAINST = tuple(curves.AGAINST)

FIGURES: dict[str, Comparison | Portrait] = {
    "scores": Comparison(curves.final_scores),
    "accuracy": Comparison(curves.accuracy, AGAINST),
    "loss": Comparison(curves.loss, AGAINST),
    "train-loss": Comparison(curves.train_loss, AGAINST),
    "personal": Comparison(curves.personal, AGAINST),
    "worst": Comparison(curves.worst, AGAINST),
    "clients": Comparison(clients.client_accuracy),
    "lambda-size": Comparison(clients.weights_by_size),
    "norm": Comparison(observed.norm),
    "coherence": Comparison(observed.coherence, tuple(observed.COHERENCES)),
    "lambda-coherence": Comparison(observed.weights_by_coherence),
    "heterogeneity": Comparison(observed.heterogeneity, tuple(observed.HETEROGENEITIES)),
    "balance": Comparison(observed.balance, tuple(observed.BALANCES)),
    "ratios": Comparison(observed.ratios, observed.RATIOS),
    "tau-r": Comparison(observed.tau_r),
    "similarity": Comparison(observed.similarity),
    "correlation": Comparison(measured.correlation),
    "histogram": Comparison(measured.histogram),
    "rescaling": Comparison(measured.rescaling, ("loss", "accuracy")),
    "hessian": Comparison(measured.hessian, ("spectrum", "first", "ratio")),
    "slice": Comparison(measured.slice_),
    "traffic": Comparison(costs.traffic),
    "parameters": Comparison(observed.parameters),
    "seconds": Comparison(costs.seconds),
    "partition": Portrait(clients.partition),
    "sizes": Portrait(clients.sizes),
    "lambda": Portrait(clients.weights),
    "layers": Portrait(quantities.layers, quantities.layer_names),
    "notes": Portrait(quantities.notes, quantities.note_names),
    "shrinking": Portrait(observed.shrinking),
    "coherence-groups": Portrait(observed.coherence_groups),
    "classes": Portrait(observed.classes),
    "objective": Portrait(observed.objective),
    "simplex": Portrait(measured.simplex, lambda run: ("surface", "optima")),
    "transport": Portrait(measured.transport),
    "trajectory": Portrait(measured.trajectory),
    "timeline": Portrait(costs.timeline),
    "utilisation": Portrait(costs.utilisation),
}


def draw(name: str, runs: Sequence[Run]) -> Canvas:
    """The figure `name` of these runs.

    Raises `NoData` where none of them has recorded what it shows, `ReportError` for a name that there is not, and for
    several runs where the figure shows one.
    """
    base, _, variant = name.partition(":")
    entry = FIGURES.get(base)
    if entry is None:
        near = difflib.get_close_matches(base, FIGURES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ReportError(f"there is no figure {name!r}.{hint} There are {', '.join(FIGURES)}.")
    if isinstance(entry, Portrait) and len(runs) > 1:
        raise ReportError(f"{base} shows one run, but {len(runs)} were given.")
    shown = compare(runs) if isinstance(entry, Comparison) else runs[0]
    variants = _variants(entry, runs[0])
    if variants is None:
        if variant:
            raise ReportError(f"{base} has no variants, so none named {variant!r}.")
        with styled():
            return entry.draw(shown)
    if not variants:
        raise NoData(f"The run has recorded nothing that {base} shows.")
    if variant and variant not in variants:
        raise ReportError(f"{base} has no variant {variant!r}; there are {', '.join(variants)}.")
    with styled():
        return entry.draw(shown, variant or variants[0])


def _variants(entry: Comparison | Portrait, run: Run) -> Sequence[str] | None:
    """Names of the variants; None where the figure has none ever."""
    if isinstance(entry, Comparison):
        return entry.variants or None
    return None if entry.variants is Portrait.variants else entry.variants(run)


def names(run: Run) -> Iterator[str]:
    """Every figure and variant that there could be of the run."""
    for base, entry in FIGURES.items():
        variants = _variants(entry, run)
        yield from [base] if variants is None else [f"{base}:{variant}" for variant in variants]


def available(runs: Sequence[Run]) -> list[str]:
    """Names of the figures for which these runs have the data."""
    found = []
    for name in names(runs[0]):
        if len(runs) > 1 and isinstance(FIGURES[name.partition(":")[0]], Portrait):
            continue
        try:
            draw(name, runs)
        except NoData:
            continue
        found.append(name)
    return found


def caption(name: str) -> str:
    """What the figure shows, in words."""
    entry = FIGURES[name.partition(":")[0]]
    return " ".join((entry.draw.__doc__ or "").split())
