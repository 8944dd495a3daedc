"""The loop over rounds: played, written down, saved, and played again where client states are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raysim.config import Config
from raysim.data import Dataset, Partition
from raysim.engine.base import StateLost
from raysim.federation.builder import MakeEngine, build, local_engine, prepare
from raysim.federation.resume import RunCheckpoints, check_device, check_samples, sha256
from raysim.federation.round import PlayRound, Round, RoundFailed, play_round
from raysim.federation.scores import round_summary
from raysim.federation.writer import Finished, Tracer, Writer, describe


class Federation:
    """A run. `step` plays a round; the same configuration gives the same bits on any engine."""

    def __init__(
        self, config: Config, out: Path, resume: bool = False, make_engine: MakeEngine = local_engine,
        partitioned: tuple[Dataset, Partition] | None = None, play: PlayRound = play_round,
    ):  # fmt: skip
        """Build the model and the engine, and write what is known before the first round. `partitioned` is what `prepare`
        returned, if it was called before; `play` plays a round.

        With `resume`, go on from the last checkpoint in `out`. Raises what `prepare` raises, and `PlacementError` for
        what only the cluster can tell.
        """
        torch.set_num_threads(config.engine.threads)
        self.config, self.folder, self.play = config, Path(out), play
        self.data, self.partition = partitioned or prepare(config)
        if resume:
            check_samples(self.folder, self.data, self.partition)
        self.run = build(config, make_engine, self.data, self.partition)
        if resume:
            check_device(self.folder, self.run.engine)
        self.spec, self.aggregator, self.cohort_size = self.run.spec, self.run.aggregator, self.run.cohort_size
        self.server, self.engine = self.run.server, self.run.engine
        self.tracer = Tracer(self.run, self.folder)
        self.saved = RunCheckpoints(self.run, self.folder)
        self.t, wall = self.saved.restore() if resume else (0, 0.0)  # the next round, and the seconds played before it
        if not resume or not (self.folder / "manifest.json").exists():  # stopped while it was being described
            describe(self.run, self.folder)
        self.writer = Writer(self.run, self.folder, self.t)
        self._began = time.time() - wall
        self._unwritten: Callable[[], None] | None = None  # records of the last round
        self.engine.publish(self.server.value, self.server.shared)

    def step(self) -> dict[str, Any] | None:
        """Play one round and return its summary, or None where the run is complete."""
        if self.t >= self.server.rounds:
            return None
        try:
            return self._step()
        except StateLost:
            self._go_back()
            return self.step()

    def evaluates(self, t: int) -> bool:
        """Whether models are tested in round t."""
        return self.run.evaluates(t)

    def write_down(self) -> None:
        """Record the last round, if that has not been done. Called while the hosts train the next one."""
        write, self._unwritten = self._unwritten, None  # first: what fails is not tried again as the run closes
        if write is not None:
            write()

    def checkpoint(self) -> int:
        """Save all that the next round depends on; returns that round. Where some of it is lost, go back instead."""
        try:
            self.write_down()
            self.writer.recorder.flush()
            self.saved.save(self.t, time.time() - self._began)
        except StateLost:
            self._go_back()
        return self.t

    def finish(self) -> dict[str, Any]:
        """Write the final model and say how the run went."""
        try:
            digest = self.sha256()
        except StateLost:
            self._go_back()  # to the end: a complete run has a checkpoint there
            digest = self.sha256()
        return self.writer.finish(digest, self._began)

    def sha256(self) -> str:
        """Hash of the model's tensors under their names, of the clients' states, and of their last models."""
        return sha256(self.run)

    def model(self) -> nn.Module:
        """A copy of the global model as the last round left it, on the CPU and in eval mode."""
        model, layers = self.spec.network()
        model.load_state_dict(layers.state_dict(self.server.value))
        return model.eval()

    def close(self) -> None:
        """Stop the engine; what was recorded is written."""
        try:
            self.write_down()
            self.writer.close()
        finally:
            self.engine.close()

    def _step(self) -> dict[str, Any]:
        t, started = self.t, time.perf_counter()
        traced = self.tracer.wants(t)
        if traced:
            self.tracer.begin(t)
        done = self.play(self.run, t, trace=traced, while_training=self.write_down)
        shown = round_summary(done, self.server.rounds, self.engine.nodes, self.spec.task)
        results = done.cohort.trained.results.values()
        if results and all(result.raised for result in results):
            raise RoundFailed(f"every client of round {t + 1} failed:\n{shown['failures'][0]}")
        self.saved.change(done.changed)
        if traced:
            self.tracer.write(done)
        shown["failures"] += [
            f"round {t + 1}: a client actor on node {node} died; its clients were trained again, to the same bits"
            for node in self.engine.lost
        ]
        self.engine.lost.clear()
        shown["failures"] += self.writer.sinks.complaints()
        shown["seconds"] = time.perf_counter() - started
        self._write_later(done, shown)
        self.t += 1
        if self.t % self.config.rounds.checkpoint_every == 0 or self.t == self.server.rounds:
            self.checkpoint()
        return shown

    def _write_later(self, done: Round, shown: dict[str, Any]) -> None:
        self.write_down()  # the round before, where nothing was trained meanwhile
        finished = Finished(done, replace(self.server), shown, time.time() - self._began)
        collect_logs = done.scheduler.close()

        def write() -> None:
            collect_logs()
            self.writer.write(finished, self._began)

        self._unwritten = write

    def _go_back(self) -> None:
        """Client states died with a node: the rounds since the last checkpoint are played again, to the same bits."""
        self._unwritten = None
        self.t, _ = self.saved.restore()
        self.writer.go_back(self.t)
        self.engine.publish(self.server.value, self.server.shared)
