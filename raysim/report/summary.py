"""What a comparison comes to in numbers: scores, and what it took to reach an accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from raysim.report.runs import Group, Run

SHORTFALL = 0.95  # without a wish, the target is this share of the score that all runs have reached


@dataclass(frozen=True)
class Spread:
    """A number over the seeds: mean, and sample standard deviation where there are several."""

    values: tuple[float, ...]
    missing: int = 0  # runs that have no such number

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        there = tuple(value for value in values if value is not None and not math.isnan(value))
        return cls(there, len(values) - len(there))

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def sd(self) -> float | None:
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def show(self, number: Callable[[float], str] = "{:.2f}".format) -> str:
        """`93.42 ± 0.21`; `-` where no run has it, `(2 of 3)` after it where not all have."""
        if not self.values:
            return "-"
        spread = "" if self.sd is None else f" ± {number(self.sd)}"
        some = f" ({len(self.values)} of {len(self.values) + self.missing})" if self.missing else ""
        return f"{number(self.mean)}{spread}{some}"


@dataclass(frozen=True)
class Summary:
    """The comparison as a table, and as a sentence."""

    target: float | None  # the accuracy of the columns `to ...`
    sentence: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def scores(run: Run) -> np.ndarray:
    """What the run scored at each of its evaluations."""
    column = run.columns("rounds")[run.score]
    return column[~np.isnan(column)]


def final(run: Run) -> float | None:
    return float(scores(run)[-1]) if len(scores(run)) else None


def best(run: Run) -> float | None:
    return float(scores(run).max()) if len(scores(run)) else None


def last10(run: Run) -> float | None:
    """Mean over the last ten evaluations, or over all where they are fewer."""
    return float(scores(run)[-10:].mean()) if len(scores(run)) else None


def latest(run: Run, column: str) -> float | None:
    """The last value of a column of `rounds` that is not null."""
    values = run.columns("rounds")[column]
    values = values[~np.isnan(values)]
    return float(values[-1]) if len(values) else None


COSTS: dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]] = {
    "round": lambda rounds: rounds["round"] + 1,
    "MB up": lambda rounds: np.cumsum(rounds["bytes_up"]) / 1e6,
    "MB": lambda rounds: np.cumsum(rounds["bytes_up"] + rounds["bytes_down"]) / 1e6,
    "s": lambda rounds: rounds["wall"],
}
"""What a run has spent at the end of each round: rounds, uplink, both links, time since its start."""


def cost_to(run: Run, target: float, cost: str) -> float | None:
    """What the run had spent when an evaluation first showed the target accuracy; None if none did."""
    rounds = run.columns("rounds")
    reached = np.flatnonzero(rounds[run.score] >= target)
    return float(COSTS[cost](rounds)[reached[0]]) if len(reached) else None


def default_target(runs: Sequence[Run]) -> float | None:
    """A whole percentage that every run has reached; None where a run has no scores."""
    tops = [best(run) for run in runs]
    if not tops or any(top is None for top in tops):
        return None
    target = math.floor(100 * SHORTFALL * min(top for top in tops if top is not None)) / 100
    return target if target > 0 else None


def summarise(groups: Sequence[Group], target: float | None = None) -> Summary:
    """Scores and costs of each group, and what it took to reach `target` (default: `default_target`), a fraction."""
    runs = [run for group in groups for run in group.runs]
    target = default_target(runs) if target is None else target

    def spread(group: Group, of: Callable[[Run], float | None], scale: float = 1.0) -> Spread:
        return Spread.of([None if (value := of(run)) is None else scale * value for run in group.runs])

    def percent(of: Callable[[Run], float | None]) -> Callable[[Group], str]:
        return lambda group: spread(group, of, 100).show()

    def total(cost: str) -> Callable[[Run], float | None]:
        return lambda run: float(COSTS[cost](run.columns("rounds"))[-1]) if run.played else None

    columns: dict[str, Callable[[Group], str]] = {
        "": lambda group: group.label,
        "seed": lambda group: ", ".join(str(run.seed) for run in group.runs),
        "rounds": _rounds,
        "final %": percent(final),
        "best %": percent(best),
        "last 10 %": percent(last10),
    }
    if any(run.score == "accuracy" for run in runs):  # else these are the scores themselves
        columns["personal %"] = percent(lambda run: latest(run, "personal_accuracy_micro"))
    columns["worst tenth %"] = percent(lambda run: latest(run, "personal_accuracy_worst10"))
    if target is not None:
        goal = target
        for cost, number in (("round", _whole), ("MB up", _three), ("MB", _three), ("s", _three)):
            columns[f"{cost} to {100 * goal:g} %"] = lambda group, cost=cost, number=number: spread(  # type: ignore[misc]
                group, lambda run: cost_to(run, goal, cost)
            ).show(number)
    for cost in ("MB up", "MB", "s"):
        columns[cost] = lambda group, cost=cost: spread(group, total(cost)).show(_three)  # type: ignore[misc]
    cells = {heading: [show(group) for group in groups] for heading, show in columns.items()}
    cells = {heading: column for heading, column in cells.items() if heading in ("", "final %") or set(column) != {"-"}}
    rows = tuple(zip(*cells.values(), strict=True))
    return Summary(target, _sentence(groups, target, spread), tuple(cells), rows)


def _rounds(group: Group) -> str:
    """How far the runs are: `200`, or `120 of 200` while one is not finished."""
    played = sorted({run.played for run in group.runs})
    least = str(played[0]) if len(played) == 1 else f"{played[0]}–{played[-1]}"
    return least if all(run.result for run in group.runs) else f"{least} of {group.first.rounds}"


def _whole(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _three(value: float) -> str:
    """Three digits that count, and never an exponent: 0.0123, 4.56, 1235."""
    if value == 0 or not math.isfinite(value):
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def _sentence(groups: Sequence[Group], target: float | None, spread: Callable[..., Spread]) -> str:
    scored = [(spread(group, final, 100), group) for group in groups if any(final(run) is not None for run in group.runs)]
    if not scored:
        return "No model has been evaluated yet."
    top, group = max(scored, key=lambda pair: pair[0].mean)
    kind = {"accuracy": "test accuracy"}.get(group.first.score, "personal test accuracy")
    over = f" (mean ± standard deviation over {len(group.runs)} runs)" if len(group.runs) > 1 else ""
    after = f"after {_rounds(group)} round{'s' * (group.first.rounds != 1)}"
    if len(scored) == 1:
        text = f"{group.label} has reached a {kind} of {top.show()} % {after}{over}"
        if target is not None and (cost := spread(group, lambda run: cost_to(run, target, "round"))).values:
            text += f"; it first had {100 * target:g} % in round {cost.show(_whole)}"
        return f"{text}."
    low, last = min(scored, key=lambda pair: pair[0].mean)
    text = f"Of {len(scored)} configurations, {group.label} ends highest, with a {kind} of {top.show()} %{over}"
    return f"{text}, and {last.label} lowest, with {low.show()} %."
