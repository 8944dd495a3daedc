"""Models on test samples: the global one, and each client's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raysim.core.flat import FlatModel
from raysim.core.outputs import Outputs, leaves, mapped
from raysim.core.rng import SERVER, stream_seed
from raysim.core.samples import batch_slices
from raysim.core.score import Score, scores_of
from raysim.host.messages import HostSpec
from raysim.host.samples import SampleSource
from raysim.lazy import Tensor, no_grad, torch


class Evaluator:
    """Tests what is loaded into the model of `flat`, in batches of `spec.eval_batch` samples."""

    def __init__(self, spec: HostSpec, flat: FlatModel, samples: SampleSource):
        self.spec, self.flat, self.samples, self.task = spec, flat, samples, spec.task

    def score(self, rows: np.ndarray, seed: int) -> list[Score]:
        """The loaded model on each batch of `rows` [n] of the data set. What a batch draws from global generators belongs to
        `seed` and the batch, on any host."""
        tallies = []
        for part in self._parts(rows):
            x, y = self.samples.rows(part)
            self.spec.seed_generators(stream_seed(seed, 0, SERVER, f"rows {part[0]}"), y.device)
            tallies.append(self.task.tally(self.outputs(x), y))
        return scores_of(tallies)

    def personal(self, client: int) -> Score:
        """The loaded model on the client's test samples, with its AUC."""
        rows = self.samples.partition.test[client]
        if not len(rows):
            return Score(0, 0.0)
        batches = [self.samples.rows(part, client) for part in self._parts(rows)]
        made = [self.outputs(x) for x, _ in batches]
        if any(not tensor.ndim for tensor in leaves(made[0])):  # a number of a whole batch, such as a further loss
            return Score.total(
                scores_of([self.task.tally(each, y) for each, (_, y) in zip(made, batches, strict=True)])
            )
        outputs = mapped(lambda *parts: torch.cat(parts), *made)
        y = torch.cat([y for _, y in batches])
        return replace(self.task.score(outputs, y), auc=self.task.auc(outputs, y))

    def loss(self, x: Tensor, y: Tensor) -> Score:
        """The loaded model on samples [n, ...] and their labels; no metric."""
        parts = batch_slices(len(y), self.spec.eval_batch, drop_last=False)
        sums = torch.stack([self.task.total_loss(self.outputs(x[part]), y[part]) for part in parts])
        return Score(len(y), sum(sums.tolist()))

    def _parts(self, rows: np.ndarray) -> list[np.ndarray]:
        batch = self.spec.eval_batch
        return [rows[i : i + batch] for i in range(0, len(rows), batch)]

    @no_grad
    def outputs(self, x: Tensor) -> Outputs:
        """Outputs [n, ...] of the loaded model in eval mode, on model inputs [n, ...]."""
        self.flat.model.eval()
        try:
            return self.flat.model(x)
        finally:
            self.flat.model.train()  # also for those who train after one that could not be tested
