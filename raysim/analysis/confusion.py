"""What the models of a saved run get right: class by class, and client by client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import PositiveInt

from raysim.analysis.measure import Measure, MeasureError, Taken
from raysim.core.task import Classification
from raysim.lazy import torch
from raysim.store import tables

if TYPE_CHECKING:
    from raysim.federation.saved import SavedRun


@dataclass(frozen=True)
class Confusion(Measure):
    """Test samples by their class and by the class that the final model takes them for.

    `label` and `predicted` are indices of classes, `samples` is how many there are of each pair.
    """

    samples: PositiveInt = 100_000
    """At most so many of the server's test samples."""

    def take(self, run: SavedRun) -> Taken:
        if not isinstance(run.task, Classification):
            raise MeasureError(f"{run.folder}: its task is {run.task.name}; only one class a sample can be confused.")
        rows = run.rows("test", self.samples)
        [(_, value)] = run.models(())
        run.load(value)
        classes = run.label_counts.shape[1]
        counts = np.zeros((classes, classes), np.int64)
        with torch.no_grad():
            for start in range(0, len(rows), run.batch_size):
                x, y = run.samples(rows[start : start + run.batch_size])
                predicted = run.network(x).argmax(1)
                np.add.at(counts, (y.cpu().numpy(), predicted.cpu().numpy()), 1)
        label, predicted_as = np.indices(counts.shape).reshape(2, -1)
        right = f"{np.trace(counts)} of {counts.sum()} test samples are taken for what they are"
        return Taken({"label": label, "predicted": predicted_as, "samples": counts.ravel()}, right)


@dataclass(frozen=True)
class Personalization(Measure):
    """Accuracy of the final global model, and of each client's own one, on the client's own test samples.

    `before` is the global model's and `after` the own model's accuracy, of the clients that the last evaluation tested
    (`evaluate.personal`).
    """

    def take(self, run: SavedRun) -> Taken:
        if "accuracy" not in [metric.name for metric in run.task.metrics]:
            raise MeasureError(f"{run.folder}: its task is {run.task.name}; it has no accuracy.")
        tested = tables.read(run.folder, "personal")
        rounds, samples = tested["round"].to_numpy(), tested["samples"].to_numpy()
        correct = tested["correct"].to_numpy(zero_copy_only=False).astype(float)
        rows = np.flatnonzero((rounds == rounds.max(initial=-1)) & (samples > 0) & ~np.isnan(correct))
        if not len(rows):
            raise MeasureError(
                f"{run.folder}: has tested no clients' own models. evaluate.personal: after_init tests them."
            )
        clients = tested["client"].to_numpy()[rows]
        [(_, value)] = run.models(())
        known = [run.whole_score(run.test_rows(c), c)(value).correct for c in clients.tolist()]
        before = np.array(known) / samples[rows]  # not the task's headline, which may be another score
        after = correct[rows] / samples[rows]
        gain = f"{(after > before).sum()} of {len(rows)} clients gain by their own model, {(after < before).sum()} lose"
        return Taken({"client": clients, "samples": samples[rows], "before": before, "after": after}, gain)
