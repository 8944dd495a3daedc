"""Numbers that sum a round or a run up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raysim.config import Config
from raysim.core.note import FELL_BACK
from raysim.core.score import Score
from raysim.core.task import Task
from raysim.federation.round import Round
from raysim.store.tables import OPEN

Scores = dict[str, float | None]


def round_summary(done: Round, rounds: int, task: Task) -> dict[str, Any]:
    """What is shown of a round of `rounds`."""
    values = task.values(done.score) if done.score else {}
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
        "clients_failed": len(done.drawn) - len(cohort.clients),
        **{metric_column(name): value for name, value in values.items()},
        **personal_scores(done.personal, task),
    }


def metric_column(name: str) -> str:
    """The column of `rounds` that has a metric."""
    return name if name == "accuracy" else f"{OPEN['rounds'].prefix}{name}"


def personal_scores(personal: Mapping[int, Score], task: Task) -> dict[str, float]:
    """The clients' own models: micro and macro accuracy, its standard deviation over clients, the mean of the worst
    tenth, the AUC where it is defined; and other metrics of the task on all their samples together.

    Empty where no client has test samples.
    """
    tested = [score for score in personal.values() if score.samples]
    if not tested:
        return {}
    whole = Score.total(tested)
    values, auc = task.values(whole), sum(s.auc * s.samples for s in tested) / whole.samples
    found = {}
    if "accuracy" in values:
        shares = np.sort([task.values(score)["accuracy"] for score in tested])
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
    name = task.headline.name
    if not config.evaluate.personal:
        column = metric_column(name)
    else:
        column = "personal_accuracy_micro" if name == "accuracy" else metric_column(f"personal_{name}")
    return column, task.headline.higher_is_better


def run_summary(rounds: pa.Table, task: Task) -> dict[str, Any]:
    """The headline of the task and, of its values in the table `rounds`, the last, the best, and the mean of the last
    ten."""
    metric = task.headline
    if metric is None:
        return {"headline": None, **score_summary([], max)}
    column = metric_column(metric.name)
    values = rounds[column].to_pylist() if column in rounds.column_names else []
    return {"headline": metric.name, **score_summary(values, metric.best)}


def score_summary(values: Sequence[float | None], best: Callable[[Sequence[float]], float]) -> Scores:
    """The last, the best, and the mean of the last ten of those that were measured."""
    known = [value for value in values if value is not None]
    last10 = sum(known[-10:]) / len(known[-10:]) if known else None
    return {"final": known[-1] if known else None, "best": best(known) if known else None, "last10": last10}


def personal_summary(rounds: pa.Table) -> Scores | None:
    """`score_summary` of the clients' own accuracy (micro), and what else was measured last; None if nothing was."""
    last = next((row for row in reversed(rounds.to_pylist()) if row["personal_accuracy_micro"] is not None), None)
    if last is None:
        return None
    columns = ("personal_accuracy_macro", "personal_accuracy_std", "personal_accuracy_worst10", "personal_auc")
    ends = {name.removeprefix("personal_").removeprefix("accuracy_"): last[name] for name in columns}
    return score_summary(rounds["personal_accuracy_micro"].to_pylist(), max) | ends


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
