"""Numbers that sum a round or a run up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raysim.core.score import Score
from raysim.federation.round import Round

Accuracy = dict[str, float | None]


def round_summary(done: Round, rounds: int, nodes: Sequence[str]) -> dict[str, Any]:
    """What is shown of a round of `rounds`; `nodes` are the machines of the hosts."""
    trained, cohort = done.cohort.trained, done.cohort
    losses = [trained.results[c].last_loss for c in cohort.clients]
    sizes = cohort.sizes.tolist()
    train_loss = sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes) if sizes else None
    failures = [
        f"client {c}, round {done.t + 1}, node {nodes[trained.trained_by[c]]}: {result.status}"
        for c, result in sorted(trained.results.items())
        if result.status != "ok"
    ]
    return {
        "round": done.t,
        "rounds": rounds,
        "accuracy": done.accuracy,
        "loss": done.loss,
        "train_loss": train_loss,
        "clients_ok": len(cohort.clients),
        "clients_failed": len(done.drawn) - len(cohort.clients),
        "failures": failures,
    } | personal_scores(done.personal)


def personal_scores(personal: Mapping[int, Score]) -> dict[str, float]:
    """Micro and macro accuracy, its standard deviation over clients, the mean of the worst tenth, and the AUC.

    Empty where no client has test samples.
    """
    tested = [score for score in personal.values() if score.samples]
    if not tested:
        return {}
    shares, total = np.sort([score.correct / score.samples for score in tested]), sum(s.samples for s in tested)
    return {
        "personal_accuracy_micro": sum(s.correct for s in tested) / total,
        "personal_accuracy_macro": float(shares.mean()),
        "personal_accuracy_std": float(shares.std()),
        "personal_accuracy_worst10": float(shares[: max(1, len(shares) // 10)].mean()),
        "personal_auc": sum(s.auc * s.samples for s in tested) / total,
    }


def accuracy_summary(accuracies: Sequence[float | None]) -> Accuracy:
    """The last, the best, and the mean of the last ten of those that were measured."""
    known = [a for a in accuracies if a is not None]
    last10 = sum(known[-10:]) / len(known[-10:]) if known else None
    return {"final": known[-1] if known else None, "best": max(known, default=None), "last10": last10}


def personal_summary(rounds: pa.Table) -> Accuracy | None:
    """`accuracy_summary` of the clients' own accuracy (micro), and what else was measured last; None if nothing was."""
    last = next((row for row in reversed(rounds.to_pylist()) if row["personal_accuracy_micro"] is not None), None)
    if last is None:
        return None
    columns = ("personal_accuracy_macro", "personal_accuracy_std", "personal_accuracy_worst10", "personal_auc")
    ends = {name.removeprefix("personal_").removeprefix("accuracy_"): last[name] for name in columns}
    return accuracy_summary(rounds["personal_accuracy_micro"].to_pylist()) | ends
