"""Numbers that sum a round or a run up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raysim.config import Config
from raysim.core.note import FELL_BACK
from raysim.core.rng import SERVER, stream_seed
from raysim.core.score import Metric, Score
from raysim.core.task import Task
from raysim.federation.round import Round
from raysim.store.tables import OPEN

Scores = dict[str, float | None]
Planned = Callable[[int], bool]  # whether the configuration asks for an evaluation after a round


def round_summary(done: Round, rounds: int, task: Task, seed: int) -> dict[str, Any]:
    """What is shown of a round of `rounds`; `seed` is that of the run. Raises `HookError`."""

    def seed_of(metric: str) -> int:
        return stream_seed(seed, done.t, SERVER, f"metric {metric}")

    values = task.values(done.score, seed_of) if done.score else {}
    trained, cohort = done.cohort.trained, done.cohort
    losses = [trained.results[c].last_loss for c in cohort.clients]
    sizes = cohort.sizes.tolist()
    train_loss = sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes) if sizes else None
    return {
        "round": done.t,
        "rounds": rounds,
        "headline": task.headline.name if task.headline else None,
        "accuracy": values.pop("accuracy", None),
        "loss": done.score.mean_loss if done.score else None,
        "train_loss": train_loss,
        "clients_ok": len(cohort.clients),
        "clients_failed": len(done.drawn) + len(done.asked.dropped) - len(cohort.clients),
        **{metric_column(name): value for name, value in values.items()},
        **personal_scores(done.personal, task, lambda metric: seed_of(f"{metric} personal")),
    }


def undefined_metrics(shown: Mapping[str, Any]) -> list[str]:
    """The columns of metrics that are NaN in the summary of a round."""
    return [name for name, value in shown.items() if name.startswith(OPEN["rounds"].prefix) and math.isnan(value)]


def metric_column(name: str) -> str:
    """The column of `rounds` that has a metric."""
    return name if name == "accuracy" else f"{OPEN['rounds'].prefix}{name}"


def personal_scores(
    personal: Mapping[int, Score], task: Task, seed_of: Callable[[str], int] = lambda metric: 0
) -> dict[str, float]:  # fmt: skip
    """The clients' own models: micro and macro accuracy, its standard deviation over clients, the mean of the worst
    tenth, the AUC where it is defined; and other metrics of the task on all their samples together (`seed_of`: see
    `Task.values`).

    Empty where no client has test samples.
    """
    tested = [score for score in personal.values() if score.samples]
    if not tested:
        return {}
    whole = Score.total(tested)
    values, auc = task.values(whole, seed_of), sum(s.auc * s.samples for s in tested) / whole.samples
    found = {}
    if "accuracy" in values:
        [accuracy] = [metric for metric in task.metrics if metric.name == "accuracy"]
        shares = np.sort([accuracy.of(score.sums["accuracy"]) for score in tested])
        found = {
            "personal_accuracy_micro": values.pop("accuracy"),
            "personal_accuracy_macro": float(shares.mean()),
            "personal_accuracy_std": float(shares.std()),
            "personal_accuracy_worst10": float(shares[: max(1, len(shares) // 10)].mean()),
        }
    if not math.isnan(auc):  # as it is where all samples are of one class
        found["personal_auc"] = auc
    return found | {metric_column(f"personal_{name}"): value for name, value in values.items()}


def judged_by(config: Config, task: Task) -> tuple[str, bool]:
    """The column of `rounds` by which the models of a run are compared, and whether more is better: the headline of the
    task, or the loss where it has none; with `evaluate.personal` that of the clients' own models."""
    if task.headline is None:
        return "loss", False
    return _headline_column(task.headline, config.evaluate.personal is not None), task.headline.higher_is_better


def _headline_column(metric: Metric, personal: bool) -> str:
    if not personal:
        return metric_column(metric.name)
    return "personal_accuracy_micro" if metric.name == "accuracy" else metric_column(f"personal_{metric.name}")


def run_summary(rounds: pa.Table, task: Task, planned: Planned) -> dict[str, Any]:
    """The headline of the task and `_summed_up` of its values in the table `rounds`."""
    return {"headline": task.headline and task.headline.name, **_summed_up(rounds, task, False, planned)}


def personal_summary(rounds: pa.Table, task: Task, planned: Planned) -> Scores | None:
    """`_summed_up` of the clients' own models, and what else was measured of them last; None if nothing was."""
    column = _headline_column(task.headline, True) if task.headline else ""
    tested = rounds.filter(pc.is_valid(rounds[column])) if column in rounds.column_names else rounds[:0]
    if not tested.num_rows:
        return None
    last = rounds.slice(rounds.num_rows - 1).to_pylist()[0]
    others = ("accuracy_macro", "accuracy_std", "accuracy_worst10", "auc")
    ends = {name.removeprefix("accuracy_"): last[f"personal_{name}"] for name in others}
    return _summed_up(rounds, task, True, planned) | ends


def _summed_up(rounds: pa.Table, task: Task, personal: bool, planned: Planned) -> Scores:
    """The last value of the headline, the best, and the mean of the last ten that were planned: a run that was extended has
    tested the model that was its last before, and has the mean of one with its present settings from the start. None where
    nothing was measured, and for what is not a finite number; only the best is known of a run whose last model was not
    tested, as after `resume` with `evaluate.global=false`."""
    metric, known = task.headline, []
    if metric and (column := _headline_column(metric, personal)) in rounds.column_names:
        pairs = zip(rounds["round"].to_pylist(), rounds[column].to_pylist(), strict=True)
        known = [(t, value) for t, value in pairs if value is not None]
    if not metric or not known:
        return {"final": None, "best": None, "last10": None, "evaluations": 0}
    of_plan = [value for t, value in known if planned(t)]
    final, last10 = math.nan, list[float]()
    if known[-1][0] == rounds["round"][-1].as_py():
        final, last10 = known[-1][1], of_plan[-10:]
    mean = sum(last10) / len(last10) if last10 else math.nan
    found = {"final": final, "best": metric.best([value for _, value in known]), "last10": mean}
    return {name: value if math.isfinite(value) else None for name, value in found.items()} | {
        "evaluations": len(of_plan)
    }


def fallen_back(notes: pa.Table) -> dict[str, dict[str, int]]:
    """For each method that fell back at all: how many times, of how many. Where each client notes it (FedFomo), one of
    its rounds is a time, elsewhere a round is."""
    its = (
        notes.filter(pc.field("name") == FELL_BACK).group_by("method").aggregate([("value", "sum"), ("value", "count")])
    )
    return {
        row["method"]: {"times": int(row["value_sum"]), "of": row["value_count"]}
        for row in its.to_pylist()
        if row["value_sum"]
    }
