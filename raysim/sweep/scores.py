"""What a table compares: a score of one run, under a name that a configuration's `table` can use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from raysim.report import summary
from raysim.report.runs import Run
from raysim.report.summary import COSTS, GLOBAL


def scored(run: Run, by: str, name: str, *argument: Any, **options: Any) -> float | None:
    """The score `name` of a run. `by` is the column of `rounds` that all runs beside it are judged by, since the personal
    models' accuracy of one is not to be held against the global model's of another."""
    judged = {"by": by} if name in JUDGED else {}
    return SCORES[name][0](run, *argument, **options, **judged)


def _accuracy(of: Callable[[Run, str], float | None]) -> Callable[..., float | None]:
    def percent(run: Run, by: str) -> float | None:
        value = of(run, by)
        return None if value is None else 100 * value

    return percent


def _best10(run: Run, column: str) -> float | None:
    """Mean of the ten best evaluations, or of all where there are fewer."""
    values = np.sort(summary.planned_scores(run, column))[-10:]
    return float(values.mean()) if len(values) else None


def _best10_deviation(run: Run, column: str) -> float | None:
    """Standard deviation (population) of those evaluations, as FedLWS's released code prints it."""
    values = np.sort(summary.planned_scores(run, column))[-10:]
    return float(values.std()) if len(values) else None


def _error(run: Run, by: str) -> float | None:
    value = summary.final(run, by)
    return None if value is None else 100 * (1 - value)


def _accuracy_after(run: Run, rounds: int, by: str) -> float | None:
    """In %, after so many rounds; None where nothing was tested then."""
    columns = run.columns("rounds")
    tested = columns[by][columns["round"] == rounds - 1]
    return 100 * float(tested[0]) if len(tested) and not np.isnan(tested[0]) else None


def _error_at(run: Run, megabytes: float) -> float | None:
    """Test error in % at the last evaluation before the clients had sent more MB; None where they never sent as many."""
    rounds = run.columns("rounds")
    spent, accuracy = COSTS["MB up"](rounds), rounds[GLOBAL]
    known = accuracy[(spent <= megabytes) & ~np.isnan(accuracy)]
    return 100 * (1 - float(known[-1])) if len(known) and spent[-1] >= megabytes else None


def _to_error(cost: str) -> Callable[[Run, float], float | None]:
    """What a run had spent when the test error was first down to so many %."""
    return lambda run, error: summary.cost_to(run, GLOBAL, (100 - error) / 100, cost)


def _gap(run: Run, other: Run) -> float | None:
    """By how many points the test error exceeds the other run's at most, where the clients have sent as many MB: of each
    run counts the last evaluation until then. None where one run has sent more before its first than the other at all."""
    (spent, accuracy), (spent2, accuracy2) = _curve(run), _curve(other)
    if not len(spent) or not len(spent2):
        return None
    both = np.union1d(spent, spent2)
    both = both[(both >= max(spent[0], spent2[0])) & (both <= min(spent[-1], spent2[-1]))]
    ours, theirs = (
        of[np.searchsorted(at, both, side="right") - 1] for at, of in ((spent, accuracy), (spent2, accuracy2))
    )
    return float(100 * (theirs - ours).max()) if len(both) else None


def _over(of: Callable[[Run, str], float | None]) -> Callable[..., float | None]:
    """By how many points this accuracy exceeds the other run's."""

    def points(run: Run, other: Run, by: str) -> float | None:
        ours, theirs = (_accuracy(of)(each, by) for each in (run, other))
        return None if ours is None or theirs is None else ours - theirs

    return points


def _curve(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """MB that the clients had sent at each evaluation, and the accuracy."""
    rounds = run.columns("rounds")
    known = ~np.isnan(rounds[GLOBAL])
    return COSTS["MB up"](rounds)[known], rounds[GLOBAL][known]


def _converged(run: Run, rounds: int, by: str) -> float | None:
    """Minutes until the first evaluation that none of the next so many rounds bettered; None where there is none."""
    columns = run.columns("rounds")
    (known,) = np.nonzero(~np.isnan(columns[by]))
    score, t = columns[by][known], columns["round"][known]
    if not len(score):
        return None
    (records,) = np.nonzero(score > np.maximum.accumulate([-np.inf, *score[:-1]]))
    held = np.append(t[records[1:]] - 1, t[-1]) - t[records]  # rounds in which nothing better came
    if not (held >= rounds).any():
        return None
    return float(COSTS["s"](columns)[known[records[held >= rounds][0]]]) / 60


def _seconds(run: Run) -> float:
    """Of a round: median over the rounds."""
    return float(np.median(run.columns("rounds")["seconds"]))


def _aggregation(run: Run) -> float | None:
    """Seconds from the clients' models to the server's: median over the rounds in which a client sent one."""
    rounds = run.columns("rounds")
    seconds = rounds["seconds_plan"] + rounds["seconds_reduce"] + rounds["seconds_server"]
    known = seconds[~np.isnan(seconds)]
    return float(np.median(known)) if len(known) else None


def _note(run: Run, name: str, rounds: Sequence[int] = (), layers: str = "", client: int | None = None) -> float | None:
    """Mean of what a method reports as METHOD.NAME, in the last round or in those from one to another, from 1 and both
    included; of a learned value, at its last epoch; of layers, over those whose name the regular expression `layers` finds; of
    clients, over all, or of the one named."""
    notes, (method, what) = run.columns("notes"), name.split(".")
    its = (notes["method"] == method) & (notes["name"] == what)
    if layers:
        its &= np.array([isinstance(name, str) and bool(re.search(layers, name)) for name in notes["layer"]], bool)
    if client is not None:
        its &= notes["client"] == client
    if its.any():
        t = notes["round"] + 1
        first, last = rounds or (t[its].max(),) * 2
        its &= (t >= first) & (t <= last)
    if not its.any():
        return None
    index = notes["index"].astype(float)
    if not np.isnan(index[its]).any():
        its &= index == index[its].max()
    return float(notes["value"][its].mean())


SCORES: dict[str, tuple[Callable[..., float | None], str]] = {  # and what a heading says of those without an argument
    "final": (_accuracy(summary.final), "final accuracy, %"),
    "best": (_accuracy(summary.best), "accuracy of the best round, %"),
    "last10": (_accuracy(summary.last10), "accuracy, mean of the last 10 evaluations, %"),
    "best10": (_accuracy(_best10), "accuracy, mean of the best 10 evaluations, %"),
    "best10 deviation": (
        _accuracy(_best10_deviation),
        "accuracy, standard deviation of the best 10 evaluations, points",
    ),
    "accuracy after": (_accuracy_after, ""),
    "error": (_error, "final test error, %"),
    "MB up": (lambda run: summary.total(run, "MB up"), "MB sent by the clients"),
    "MB": (lambda run: summary.total(run, "MB"), "MB sent"),
    "seconds": (_seconds, "seconds a round"),
    "minutes": (lambda run: _seconds(run) / 60, "minutes a round"),
    "aggregation": (_aggregation, "seconds to aggregate"),
    "error at MB": (_error_at, ""),
    "MB to error": (_to_error("MB up"), ""),
    "simulated s": (lambda run: summary.total(run, "simulated s"), "simulated seconds"),
    "simulated s to error": (_to_error("simulated s"), ""),
    "gap": (_gap, ""),
    "best over": (_over(summary.best), ""),
    "final over": (_over(summary.final), ""),
    "converged": (_converged, ""),
    "note": (_note, ""),
}
ACCURACIES = ("final", "best", "last10", "best10", "accuracy after")
JUDGED = (*ACCURACIES, "best10 deviation", "error", "best over", "final over", "converged")  # of the column `by`
PERCENT = (*ACCURACIES, "best10 deviation", "error", "error at MB", "gap", "best over", "final over")
BETTER = {  # 1: higher is better, -1: lower; of others nothing says
    **dict.fromkeys((*ACCURACIES, "best over", "final over"), 1),
    **dict.fromkeys(
        (
            *("error", "error at MB", "MB to error", "MB up", "MB", "simulated s", "simulated s to error"),
            *("seconds", "minutes", "aggregation", "gap", "converged"),
        ),
        -1,
    ),
}
# The score's argument is a choice: it compares with the run that differs in having this choice.
BETWEEN = ("gap", "best over", "final over")

OPTIONS = {"note": ("rounds", "layers", "client")}  # what may stand beside a score's argument


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _whole(value: Any) -> bool:
    return _number(value) and value == int(value)


def _span(value: Any) -> bool:
    return isinstance(value, tuple) and 1 <= value[0] <= value[1]


def _note_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[^.]+\.[^.]+", value) is not None


def _expression(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return True


# What an argument or an option must be, and whether a value is that. The choices that BETWEEN names are for the table to check.
MUST_BE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "accuracy after": ("a whole number > 0", _whole),
    "converged": ("a whole number > 0", _whole),
    "error at MB": ("a number > 0", _number),
    "MB to error": ("a number > 0", _number),
    "simulated s to error": ("a number > 0", _number),
    "note": ("METHOD.NAME, such as fedlws.gamma", _note_name),
    "rounds": ("the first and the last round, from 1, such as [90, 110]", _span),
    "client": ("a client's number, from 0", lambda value: value == 0 or _whole(value)),
    "layers": ("a regular expression", _expression),
}

# A key of SCORES, or {key: argument} where it has no words for a heading; its options stand beside it:
# {note: fedlws.gamma, rounds: [90, 110], layers: attention}
Measure = str | dict[str, float | str | tuple[int, int]]
Score = str | dict[str, Measure]  # one, or several under headings


def wrong_scores(score: Score) -> Iterator[str]:
    for measure in [score] if isinstance(score, str) else score.values():
        name, argument, options = key_of(measure)
        if name not in SCORES:
            yield f"score: there is no {name!r}. There are {', '.join(SCORES)}."
        elif unknown := [option for option in options if option not in OPTIONS.get(name, ())]:
            yield f"score: {name} takes no {unknown[0]!r}."
        elif bool(argument) == bool(SCORES[name][1]):
            yield f"score: write {name!r} {'alone' if argument else f'as {{HEADING: {{{name}: VALUE}}}}'}."
        elif isinstance(measure, dict):
            for key, (words, right) in MUST_BE.items():
                if key in measure and not right(measure[key]):
                    yield f"score: {key}: must be {words}, but is {measure[key]!r}."


def key_of(measure: Measure) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The key of SCORES, its argument if it has one, and its options: the first entry of a mapping and the others."""
    if isinstance(measure, str):
        return measure, (), {}
    (name, argument), *options = measure.items()
    return name, (argument,), dict(options)
