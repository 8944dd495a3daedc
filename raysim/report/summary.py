"""A comparison in numbers: scores, and what it took to reach an accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from raysim.report.folder import RunFolder
from raysim.report.groups import Group, runs_of
from raysim.report.paper_table import Column, Entry, PaperTable
from raysim.report.significance import LEVEL, differ
from raysim.store.tables import OPEN

SHORTFALL = 0.95  # the default target is this share of the score that all runs have reached


@dataclass(frozen=True)
class OverSeeds:
    """A number over the seeds: its mean, and its sample standard deviation where there are several seeds."""

    values: tuple[float, ...]
    missing: int = 0  # seeds without such a number

    @classmethod
    def of(cls, values: Sequence[float | None]) -> OverSeeds:
        there = tuple(value for value in values if value is not None and not math.isnan(value))
        return cls(there, len(values) - len(there))

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def std(self) -> float | None:
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def show(self, decimals: int | None = None) -> str:
        """`93.42 ± 0.21`; `-` where no run has the number, and `(2 of 3)` at the end where not all have it.

        Without `decimals`, the mean has three digits."""
        if not self.values:
            return "-"
        if decimals is None:
            first = math.floor(math.log10(abs(self.mean))) if self.mean and math.isfinite(self.mean) else 2
            decimals = max(0, 2 - first)
        deviation = "" if self.std is None else f" ± {self.std:.{decimals}f}"
        some = f" ({len(self.values)} of {len(self.values) + self.missing})" if self.missing else ""
        return f"{self.mean:.{decimals}f}{deviation}{some}"


Table = tuple[tuple[str, ...], ...]  # rows of cells, the headings first
Show = Callable[[Group], Entry]


@dataclass(frozen=True)
class Summary:
    """The comparison, as a sentence, as two tables of texts, and as one table for a paper."""

    target: float | None  # the accuracy of the columns `to ...`
    sentence: str
    scores: Table
    costs: Table
    paper_table: PaperTable


METRIC = OPEN["rounds"].prefix
GLOBAL, PERSONAL = "accuracy", "personal_accuracy_micro"  # columns of `rounds` by which runs are judged


def judged_by(runs: Sequence[RunFolder]) -> str:
    """The score that runs are compared by: the personal models' where every run has tested them, as `evaluate.personal`
    asks, or else the global model's."""
    ended = counted(runs) or runs
    return PERSONAL if all(final(run, PERSONAL) is not None for run in ended) else GLOBAL


def counted(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Those whose numbers count. A run that failed has not come to its end, and what it has reached and spent until then is
    no number of its configuration: it is missing."""
    return [run for run in runs if run.state != "failed"]


def metric_names(run: RunFolder) -> list[str]:
    """The task's metrics besides accuracy, such as rmse, in the order of the task."""
    return [name.removeprefix(METRIC) for name in run["rounds"].column_names if name.startswith(METRIC)]


def scores(run: RunFolder, column: str) -> np.ndarray:
    """The values of a column of `rounds` without its nulls, such as the score of each evaluation. A score that is NaN is
    there: a run whose model is none any longer does not end with an earlier score."""
    return np.asarray(run["rounds"][column].drop_null())


def planned_scores(run: RunFolder, column: str) -> np.ndarray:
    """Those of the evaluations that the configuration asks for. A run that was extended has tested the model that was its
    last before; its means over evaluations are those of a run with its present settings from the start."""
    t = run["rounds"]["round"].to_numpy() + 1
    asked = (t % run.evaluate_every == 0) | (t == run.rounds)
    return np.asarray(run["rounds"][column].filter(pa.array(asked)).drop_null())


def final(run: RunFolder, column: str) -> float | None:
    """Of the last evaluation; of a run that has ended None where that was not of its last model."""
    values = scores(run, column)
    return float(values[-1]) if len(values) and _of_the_end(run, column) else None


def _of_the_end(run: RunFolder, column: str) -> bool:
    """Whether the last score is of the model that the run has come to: `resume` may end a run without testing it."""
    return run.result is None or run["rounds"][column][-1].is_valid


def best(run: RunFolder, column: str) -> float | None:
    values = scores(run, column)
    return None if np.isnan(values).all() else float(np.nanmax(values))


def last10(run: RunFolder, column: str) -> float | None:
    """Mean over the last ten evaluations, or over all where there are fewer; None where `final` is."""
    values = planned_scores(run, column)[-10:]
    return float(values.mean()) if len(values) and _of_the_end(run, column) else None


COSTS: dict[str, Callable[[dict[str, np.ndarray]], np.ndarray]] = {
    "round": lambda rounds: rounds["round"] + 1,
    "MB up": lambda rounds: np.cumsum(rounds["bytes_up"]) / 1e6,
    "MB": lambda rounds: np.cumsum(rounds["bytes_up"] + rounds["bytes_down"]) / 1e6,
    "s": lambda rounds: rounds["wall"],
    "simulated s": lambda rounds: rounds.get("sim_clock", np.full(len(rounds["round"]), np.nan)),
}
"""What a run has spent at the end of each round: rounds, uplink, both links, time since its start, and the same of
the simulated clock."""
TOTALS = {
    "MB up": "sent by clients (MB)",
    "MB": "sent up and down (MB)",
    "s": "time (s)",
    "simulated s": "simulated time (s)",
}
"""Headings of what was spent."""


def cost_to(run: RunFolder, column: str, target: float, cost: str) -> float | None:
    """What the run had spent when an evaluation first reached the target score; None if none did."""
    rounds = run.columns("rounds")
    reached = np.flatnonzero(rounds[column] >= target)
    return _number(COSTS[cost](rounds)[reached[0]]) if len(reached) else None


def total(run: RunFolder, cost: str) -> float | None:
    """What the run has spent so far."""
    return _number(COSTS[cost](run.columns("rounds"))[-1]) if run.rounds_done else None


def _number(spent: float) -> float | None:
    """None where it is not counted."""
    return None if math.isnan(spent) else float(spent)


def default_target(runs: Sequence[RunFolder], column: str) -> float | None:
    """A whole percentage that every run that counts has reached; None where one has no scores."""
    tops = [best(run, column) for run in counted(runs)]
    if not tops or any(top is None for top in tops):
        return None
    target = math.floor(100 * SHORTFALL * min(top for top in tops if top is not None)) / 100
    return target if target > 0 else None


def summarise(groups: Sequence[Group], target: float | None = None) -> Summary:
    """Scores and costs of each group, and what it took to reach `target` (default: `default_target`), a fraction."""
    runs = counted(runs_of(groups)) or runs_of(groups)
    by = judged_by(runs)
    target = default_target(runs, by) if target is None else target

    def percent(of: Callable[[RunFolder, str], float | None], column: str) -> Show:
        return lambda group: _percent(group, of, column)

    own, other = ("personal ", ("global final (%)", GLOBAL)) if by == PERSONAL else ("", ("personal (%)", PERSONAL))
    scored: dict[str, Show] = {
        "seed": lambda group: Entry(", ".join(str(run.seed) for run in group.runs)),
        "rounds": lambda group: Entry(_rounds(group)),
        f"{own}final (%)": percent(final, by),
        f"{own}best (%)": percent(best, by),
    }
    if any(len(planned_scores(run, by)) >= 10 for run in runs):
        scored[f"{own}mean of last 10 (%)"] = percent(last10, by)
    shared = [name for name in metric_names(runs[0]) if all(name in metric_names(run) for run in runs)]
    if shared and not any(len(scores(run, by)) for run in runs):
        scored = {heading: show for heading, show in scored.items() if "%" not in heading}
    for name in shared:
        scored[f"final {name.replace('_', ' ')}"] = partial(_metric, f"{METRIC}{name}")
    scored[other[0]] = percent(final, other[1])
    scored["worst tenth (%)"] = percent(final, "personal_accuracy_worst10")
    spent: dict[str, Show] = {}
    if target is not None:
        for cost in COSTS:
            spent[f"{cost} to {100 * target:g} %"] = partial(
                _cost, lambda run, cost: cost_to(run, by, target, cost), cost
            )
    for cost, heading in TOTALS.items():
        spent[heading] = partial(_cost, total, cost)
    sentence = " ".join(filter(None, (_sentence(groups, by, target), _unfinished(runs_of(groups)))))
    left, right = _columns(groups, scored, 1), _columns(groups, spent, -1)
    labels = tuple(group.label for group in groups)
    return Summary(
        target, sentence, _table(labels, left), _table(labels, right), PaperTable("", labels, (*left, *right))
    )


def _unfinished(runs: Sequence[RunFolder]) -> str:
    """Why the numbers are not the final ones, where they are not."""
    states = [run.state for run in runs]
    parts = [
        f"{states.count(state)} {words}"
        for state, words in (("running", "still going"), ("failed", "failed"), ("stopped", "stopped before the end"))
        if state in states
    ]
    single = {
        "running": "The run is still going",
        "failed": "The run failed",
        "stopped": "The run was stopped before its end",
    }
    if not parts:
        return ""
    first = single[states[0]] if len(runs) == 1 else f"Of {len(runs)} runs, {' and '.join(parts)}"
    going = {"running", "stopped"} & {*states}
    return f"{first}: {'these are not the final numbers' if going else 'a failed run has no numbers here'}."


def _columns(groups: Sequence[Group], shown: dict[str, Show], better: int) -> tuple[Column, ...]:
    """A column without any value is left out, unless it is that of the final score."""
    columns = [
        Column(heading, tuple(map(show, groups)), better if better < 0 or heading.endswith("(%)") else 0)
        for heading, show in shown.items()
    ]
    return tuple(c for c in columns if "final" in c.heading or {entry.text for entry in c.entries} != {"-"})


def _table(labels: Sequence[str], columns: Sequence[Column]) -> Table:
    """The headings, and a row for each group."""
    rows = zip(labels, *([entry.text for entry in column.entries] for column in columns), strict=True)
    return (("", *(column.heading for column in columns)), *rows)


def _entry(group: Group, of: Callable[[RunFolder], float | None], decimals: int | None, scale: float = 1.0) -> Entry:
    by_seed: dict[int, list[float]] = {run.seed: [] for run in group.runs}
    for run in counted(group.runs):
        if (value := of(run)) is not None and not math.isnan(value):
            by_seed[run.seed].append(scale * value)
    means = {
        seed: float(np.mean(values)) for seed, values in by_seed.items() if values
    }  # of a seed that ran twice, one
    missing = len(by_seed) - len(means)
    return Entry(OverSeeds(tuple(means.values()), missing).show(decimals), means, missing)


def _percent(group: Group, of: Callable[[RunFolder, str], float | None], column: str) -> Entry:
    return _entry(group, lambda run: of(run, column), 2, 100)


def _metric(column: str, group: Group) -> Entry:
    return _entry(group, lambda run: final(run, column), 4)


def _cost(spent: Callable[[RunFolder, str], float | None], cost: str, group: Group) -> Entry:
    several = len(group.runs) > 1
    return _entry(group, lambda run: spent(run, cost), int(several) if cost == "round" else None)


def _rounds(group: Group) -> str:
    """How far the runs are: `200`, or `120 of 200` while one is not finished."""
    done = sorted({run.rounds_done for run in group.runs})
    least = str(done[0]) if len(done) == 1 else f"{done[0]}–{done[-1]}"
    return least if all(run.result for run in group.runs) else f"{least} of {group.first.rounds}"


def _sentence(groups: Sequence[Group], by: str, target: float | None) -> str:
    finals = [(_percent(group, final, by), group) for group in groups]
    scored = [(score, group) for score, group in finals if score.by_seed]
    if not scored:
        if not counted(runs_of(groups)) or any(metric_names(run) for run in runs_of(groups)):
            return ""
        before = any(len(scores(run, by)) for run in runs_of(groups))
        return "The last model was not evaluated." if before else "No model has been evaluated yet."
    whole = [pair for pair in scored if not pair[0].missing] or scored  # without a seed, a mean may lack the worst one
    top, group = max(whole, key=lambda pair: pair[0].mean)
    kind = "test accuracy" if by == GLOBAL else "personal test accuracy"
    over = f" (mean ± standard deviation over {len(top.by_seed)} seeds)" if len(top.by_seed) > 1 else ""
    if len(scored) == 1:
        after = f"after {_rounds(group)} round{'s' * (group.first.rounds != 1)}"
        text = f"{group.label} has reached a {kind} of {top.text} % {after}{over}"
        if target is not None:
            spent = _cost(lambda run, cost: cost_to(run, by, target, cost), "round", group).text
            text += f"; it first had {100 * target:g} % in round {spent}" if spent != "-" else ""
        return f"{text}."
    if len({score.text for score, _ in scored}) == 1:
        return f"The {len(scored)} configurations end alike, with a {kind} of {top.text} %{over}."
    low, last = min(reversed(whole), key=lambda pair: pair[0].mean)
    others = [(other, score) for score, other in whole if other is not group]
    if not others:
        return f"Only {group.label} has a {kind} for every seed, {top.text} %{over}."
    of = f"{len(whole)} configurations" + " with a score for every seed" * (len(whole) < len(scored))
    text = f"Of {of}, {group.label} ends highest, with a {kind} of {top.text} %{over}"
    return f"{text}, and {last.label} lowest, with {low.text} %. {_doubt(top, others)}"


def _doubt(best: Entry, others: Sequence[tuple[Group, Entry]]) -> str:
    """Whether the best score is ahead of the others by more than chance."""
    tests = differ(best.by_seed, [score.by_seed for _, score in others])
    if any(map(math.isnan, tests)):
        return "Fewer than two seeds in common: the difference may be noise. Use --seeds 8,9,10."
    pairs = min(len(best.by_seed.keys() & score.by_seed.keys()) for _, score in others)
    how = f"paired t test over {pairs} seeds" + ", Holm's correction" * (len(others) > 1)
    close = {other.label: p for (other, _), p in zip(others, tests, strict=True) if not p < LEVEL}
    if not close:
        return f"It leads by more than chance ({how}, p {_p(max(tests))})."
    which = "the others" if len(close) == len(others) > 1 else ", ".join(close)
    return f"Its lead on {which} is no more than chance can make ({how}, p {_p(min(close.values()))})."


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.2g}"
