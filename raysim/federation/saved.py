"""A run that lies on disk, brought back: its models, its data, its clients. This is what a measure is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from raysim.analysis.measure import MeasureError, Part, Score
from raysim.core.rng import SERVER, generator
from raysim.core.samples import Samples
from raysim.core.score import Score as TaskScore
from raysim.core.task import Task
from raysim.federation import host_spec, partitioned
from raysim.federation.code import saved_config
from raysim.federation.initial import with_frozen
from raysim.host.host import ClientHost
from raysim.lazy import Tensor, nn, torch
from raysim.paths import command
from raysim.store.documents import read_tensors
from raysim.store.manifest import read_manifest
from raysim.store.tables import read
from raysim.store.traces import traced


class SavedRun:
    """The folder of a run, with the samples that it was trained on. One network on one device serves all its models."""

    def __init__(self, folder: Path):
        """Partition the data again as the run did. Raises `ConfigError` and `DataError`, and `MeasureError` where the
        data have changed since."""
        self.folder = Path(folder)
        self.config = saved_config(self.folder)
        self.data, self.partition = partitioned(self.config)
        if read_manifest(self.folder).get("partition_sha256") not in (None, self.partition.sha256()):
            raise MeasureError(f"{self.folder}: today its data are partitioned differently; is data.root what it was?")
        spec = with_frozen(self.config, host_spec(self.config, self.data, self.partition))
        spec = replace(spec, threads=torch.get_num_threads(), keep_freed_memory=False)
        self._host = ClientHost(spec, self.data, self.partition)
        self.flat, self.layers = self._host.flat, self._host.flat.layers
        self.device = self._host.device

    @property
    def rounds_done(self) -> int:
        """Rounds that it has run, which `rounds.until` may have ended early."""
        return int(read(self.folder, "rounds").num_rows)

    @property
    def network(self) -> nn.Module:
        """The network into which `load` puts a model."""
        return self.flat.model

    @property
    def task(self) -> Task:
        """What the models learned."""
        return self._host.task

    @property
    def batch_size(self) -> int:
        """Samples of one evaluation pass."""
        return self.config.evaluate.batch_size

    @property
    def is_text(self) -> bool:
        """Whether samples are tokens."""
        return self.data.is_text

    @property
    def sizes(self) -> np.ndarray:
        """[N] training samples of each client."""
        return self.partition.sizes

    @property
    def label_counts(self) -> np.ndarray:
        """[N, C] training samples of each client and class."""
        return self.partition.label_counts(self.data)

    def train_rows(self, client: int) -> np.ndarray:
        """The rows of a client's training samples."""
        return self.partition.train[client]

    def test_rows(self, client: int) -> np.ndarray:
        """The rows of a client's own test samples."""
        return self.partition.test[client]

    # Models.

    @property
    def traced(self) -> list[int]:
        """Rounds, from 0, whose models were written (`record.traces`)."""
        return sorted(traced(self.folder))

    def cohort(self, t: int) -> list[int]:
        """Clients of a traced round whose models were written, sorted."""
        found = self._trace(t).glob("client-*.init.safetensors")
        return sorted(int(path.name[7:].partition(".")[0]) for path in found)

    def model(self, t: int | None = None) -> Tensor:
        """[S] the global model after round t, which must have been traced; without t, the final one."""
        if t is not None:
            return self.read(t, "after")
        path = self.folder / "model.safetensors"
        if not path.exists():
            raise MeasureError(
                f"{self.folder}: has no final model yet; {command('resume', self.folder)} finishes the run."
            )
        return self.layers.flatten(read_tensors(path))

    def models(self, rounds: tuple[int, ...]) -> list[tuple[int, Tensor]]:
        """Rounds, from 0, and the global models [S] after `rounds`, from 1; of none, the last round and the final model."""
        return (
            [(number - 1, self.model(number - 1)) for number in rounds]
            if rounds
            else [(self.rounds_done - 1, self.model())]
        )

    def read(self, t: int, name: str) -> Tensor:
        """[S] a model of a traced round: before, after, client-0007 as it was sent, client-0007.init as it started."""
        path = self._trace(t) / f"{name}.safetensors"
        if not path.exists():
            who = ", ".join(map(str, self.cohort(t)))
            raise MeasureError(f"{self.folder}: round {t + 1} has no model {name}; its clients are {who}.")
        return self.layers.flatten(read_tensors(path))

    def _trace(self, t: int) -> Path:
        folders = traced(self.folder)
        if t not in folders:
            saved = (
                f"those saved are {', '.join(str(t + 1) for t in sorted(folders))}" if folders else "none were saved"
            )
            raise MeasureError(
                f"{self.folder}: the models of round {t + 1} were not saved ({saved}). record.traces: [{t + 1}] saves them."
            )
        return folders[t]

    def of_rounds(self, rounds: tuple[int, ...]) -> tuple[int, ...]:
        """`rounds`, from 1, as numbers from 0; all traced ones where none are named. Raises `MeasureError` where there are none."""
        if not (rounds or self.traced):
            raise MeasureError(
                f"{self.folder}: no round's models were saved. record.traces: [1, 2] saves those of two rounds, rounds all."
            )
        return tuple(number - 1 for number in rounds) or tuple(self.traced)

    # Samples.

    def rows(self, part: Part, samples: int) -> np.ndarray:
        """At most `samples` rows of the server's test samples or of all clients' training samples, always the same."""
        every = self.partition.server_test if part == "test" else self.partition.train.rows
        if not len(every):
            raise MeasureError(f"{self.folder}: there are no {part} samples.")
        return self.draw(every, samples)

    def draw(self, rows: np.ndarray, samples: int) -> np.ndarray:
        """At most `samples` of the rows, sorted and always the same."""
        if len(rows) <= samples:
            return np.sort(rows)
        order = torch.randperm(len(rows), generator=generator(self.config.seed, 0, SERVER, "measure"))
        return np.sort(rows[order[:samples].numpy()])

    def samples(self, rows: np.ndarray, client: int | None = None) -> Samples:
        """Model inputs and labels, on the device; labels as `client` sees them."""
        return self._host.samples.rows(rows, client)

    def score(self, rows: np.ndarray, client: int | None = None) -> Score:
        """Scores models in eval mode on these rows, which are read once."""
        whole, metric = self.whole_score(rows, client), self.task.headline

        def score(value: Tensor) -> tuple[float, float]:
            found = whole(value)
            return found.loss / found.samples, metric.of(found.sums[metric.name]) if metric else math.nan

        return score

    def whole_score(self, rows: np.ndarray, client: int | None = None) -> Callable[[Tensor], TaskScore]:
        """As `score`, with all metrics of the task."""
        x, y = self.samples(rows, client)
        size = self.config.evaluate.batch_size

        @torch.no_grad()
        def score(value: Tensor) -> TaskScore:
            self.load(value)
            parts = [self.task.score(self.flat.model(x[i : i + size]), y[i : i + size]) for i in range(0, len(x), size)]
            return TaskScore.total(parts)

        return score

    def load(self, value: Tensor) -> None:
        """Put `value` [S] into the network, in eval mode."""
        self.flat.value.copy_(value)
        self.flat.model.eval()
