"""Clients of one device that train together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from raysim.core.batched_run import BatchedRun
from raysim.core.client import overrides
from raysim.core.failures import cause_of
from raysim.core.flat import FlatModel, counters_of, finite
from raysim.core.local_run import LocalRun
from raysim.core.rng import Streams
from raysim.host.download import Download
from raysim.host.evaluator import Evaluator
from raysim.host.messages import ClientResult, HostSpec
from raysim.host.samples import SampleSource
from raysim.host.trainer import Trainer, not_finite
from raysim.lazy import Tensor, nn


@dataclass(frozen=True)
class Trained:
    """A client whose group has trained."""

    result: ClientResult
    update: Tensor  # [S]
    vectors: Mapping[str, Tensor]


class BatchedTrainer(Trainer):
    """Trains the clients of a group together, when the first of them is asked for, and keeps the others for later.

    What is before and after the steps (initialisations, probes, uploads) is done client by client, on the model of `flat`.
    Where a group cannot train together its clients train one by one, and their results say why.
    """

    def __init__(self, spec: HostSpec, flat: FlatModel, samples: SampleSource, evaluator: Evaluator):
        super().__init__(spec, flat, samples, evaluator)
        self._obstacle = obstacle(spec, flat)
        self._download: Download | None = None
        self._ready: dict[int, Trained | str] = {}  # of the download's clients; of one that is to train by itself, why

    def train(
        self, download: Download, client: int, update: Tensor, check: bool = True
    ) -> tuple[ClientResult, Mapping[str, Tensor]]:
        if download is not self._download:
            self._download, self._ready = download, {}
        if client not in self._ready:
            [group] = [group for group in download.request.groups if client in group]
            self._ready |= self._train_group(download, group)
        trained = self._ready.pop(client)
        if not self._ready:
            self._download = None  # it is large
        if isinstance(trained, str):
            result, vectors = super().train(download, client, update, check)
            if trained:
                together = f"the engine's batch_clients is {self.spec.batch_clients}"
                result.remarks += (f"{together}, but clients train one by one: {trained}",)
            return result, vectors
        update.copy_(trained.update)
        if trained.result.status == "ok" and check and not finite(update):
            return replace(not_finite(update, self.flat.layers), seconds=trained.result.seconds), {}
        return trained.result, trained.vectors

    def _train_group(self, download: Download, group: tuple[int, ...]) -> Mapping[int, Trained | str]:
        if self._obstacle or len(group) == 1:
            return dict.fromkeys(group, self._obstacle or "")
        try:
            return self._train_together(download, group)
        except Exception as error:
            if cause_of(error) != "machine":
                return dict.fromkeys(group, " ".join(f"{type(error).__name__}: {error}".split()))
            # Not one by one: the bits of a run must not depend on how much memory was free, or on a disk.
            failed = self._failed(error)
            failed.status += f" (batch_clients: {self.spec.batch_clients} clients train together)"
            return {client: Trained(replace(failed), self.flat.value, {}) for client in group}

    def _train_together(self, download: Download, group: tuple[int, ...]) -> dict[int, Trained]:
        started = self.spec.clock.now()
        sizes, flat = self.samples.partition.sizes, self.flat
        values = flat.value.new_empty(len(group), len(flat.value))
        runs: dict[LocalRun, tuple[dict[str, np.ndarray], Streams]] = {}  # what is traced, and where its streams are
        for value, client in zip(values, sorted(group, key=lambda client: -int(sizes[client])), strict=True):
            run, trace = self._begin(download, client), dict[str, np.ndarray]()
            self._start(run, trace)
            value.copy_(flat.value)
            runs[run] = trace, Streams.now(flat.value.device)
        BatchedRun([*runs], values).fit()
        trained: dict[int, Trained] = {}
        for value, (run, (trace, streams)) in zip(values, runs.items(), strict=True):
            flat.value.copy_(value)
            streams.restore(flat.value.device)  # steps draw nothing from them
            result, upload = self._measured(download, run, trace)
            self._send(download, run, upload, result, value)
            self._complete(download, run, upload, result, trace)
            trained[run.client] = Trained(result, value, upload.vectors)
        took = self.spec.clock.now() - started
        for done in trained.values():
            done.result.seconds = took / len(group)
        return trained


def obstacle(spec: HostSpec, flat: FlatModel) -> str | None:
    """What keeps the clients of a run from training together, as a clause; None where nothing is known to."""
    if spec.settings.pass_size is not None:
        return "a step takes several passes (local.accumulate)"
    if spec.settings.precision == "fp16":
        return "each scales its own loss (local.precision: fp16)"
    for method in spec.methods:
        if not method.batched or overrides(method, "step") or overrides(method, "train"):
            return f"{method.name} cannot train several at once"
    for probe in spec.probes:
        if probe.watches_batches:
            return f"{type(probe).__name__} watches the batches of one client"
    for counter in counters_of(flat.model, flat.layers):
        return f"the model counts in integers ({counter.name})"
    for name, module in flat.model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"each has its own random numbers for dropout ({name})"
    return None
