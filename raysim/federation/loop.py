"""The loop over rounds: run, written down, saved, and repeated where client states are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysim.clock import CLOCK, Clock
from raysim.config import Config
from raysim.core.event import Event
from raysim.core.hooks import HookError
from raysim.data import Dataset, Partition
from raysim.engine.base import ATTEMPTS, MachineFailure, StateLost
from raysim.federation.builder import MakeEngine, build, checked_data
from raysim.federation.failures import RoundFailed
from raysim.federation.given import check_given
from raysim.federation.machines import check_device, numerics, warn_of_changes
from raysim.federation.resume import RunCheckpoints, check_samples, sha256
from raysim.federation.round import Round, RunRound, publish, run_round
from raysim.federation.scores import round_summary, undefined_metrics
from raysim.federation.writer import Finished, Tracer, Writer, describe
from raysim.lazy import nn, torch


class Stopwatch:
    """Counts on from `before` inside its `with` blocks."""

    def __init__(self, before: float, clock: Clock):
        self._before, self._clock = before, clock
        self._began: float | None = None

    def __enter__(self) -> None:
        self._began = self._clock.now()

    def __exit__(self, *_: object) -> None:
        self._before, self._began = self.seconds, None

    @property
    def seconds(self) -> float:
        """Counted so far."""
        return self._before + (0.0 if self._began is None else self._clock.now() - self._began)


class Federation:
    """A run. `step` runs a round; the same configuration gives the same bits on any engine."""

    def __init__(
        self, config: Config, out: Path, resume: bool = False, make_engine: MakeEngine | None = None,
        partitioned: tuple[Dataset, Partition] | None = None, run_round: RunRound = run_round,
        clock: Clock = CLOCK,
    ):  # fmt: skip
        """Build the model and the engine, and write what is known before the first round. `partitioned` is what
        `checked_data` returned, if it was called before; `run_round` runs a round; `clock` measures all seconds.

        With `resume`, go on from the last checkpoint in `out`. Raises what `prepare` raises, and `PlacementError` for
        what only the cluster knows.
        """
        torch.set_num_threads(config.engine.threads)
        self.config, self.folder, self.run_round, self.clock = config, Path(out), run_round, clock
        self.data, self.partition = partitioned or checked_data(config)
        if resume:
            check_samples(self.folder, self.data, self.partition)
            check_given(self.folder, config)
        self.run = build(config, make_engine, self.data, self.partition, clock)
        alike, differing = numerics(self.run.engine)
        if resume:
            check_device(self.folder, self.run.engine, alike)
            warn_of_changes(self.folder, alike)
        self.spec, self.aggregator, self.cohort_size = self.run.spec, self.run.aggregator, self.run.cohort_size
        self.server, self.engine = self.run.server, self.run.engine
        here = self.folder.absolute()  # a script may change its working folder
        self.tracer = Tracer(self.run, here)
        self.saved = RunCheckpoints(self.run, here)
        self.t, wall = (
            self.saved.restore() if resume else (0, 0.0)
        )  # the next round, and the seconds that the run took before it
        if not resume or not (here / "manifest.json").exists():  # stopped while it was being described
            describe(self.run, here, alike)
        self.writer = Writer(self.run, here, self.t)
        if differing is not None:
            self.writer.add_events(self.t, [Event("run", differing)])
        self.scoreboard = self.writer.scoreboard(self.t)
        self._undefined: set[str] = set()  # metrics that were NaN, as was reported
        self.engine.events += self.writer.missing_best(self.t, self.scoreboard)
        self._stopwatch = Stopwatch(wall, clock)
        self._unwritten: Callable[[], None] | None = None  # records of the last round
        self._setbacks, self._furthest = 0, self.t  # losses of states since the run got further than ever
        publish(self.run)

    def step(self) -> dict[str, Any] | None:
        """Run one round and return its summary, or None where the run is complete."""
        with self._stopwatch:
            while not self.complete:
                try:
                    return self._step()
                except StateLost:
                    self._go_back()
        return None

    @property
    def complete(self) -> bool:
        """Whether the last round is done, or `rounds.until` has ended the run."""
        return self.t == self.server.rounds or self.scoreboard.ended is not None

    @property
    def wall(self) -> float:
        """Seconds of the run so far, without those between rounds, which are the caller's."""
        return self._stopwatch.seconds

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
            self.saved.save(self.t, self.wall)
        except StateLost:
            self._go_back()
        return self.t

    def finish(self) -> dict[str, Any]:
        """Write the final model and say how the run went. `complaints` are of sinks that have failed since the last round."""
        try:
            digest = self.sha256()
        except StateLost:
            self._go_back()  # to the end: a complete run has a checkpoint there
            digest = self.sha256()
        return self.writer.finish(digest, self.wall, self.t, self.scoreboard)

    def sha256(self) -> str:
        """Hash of the model's tensors under their names, and of what every client keeps."""
        return sha256(self.run, self.saved)

    def model(self) -> nn.Module:
        """A copy of the global model as the last round left it, on the CPU and in eval mode."""
        model, layers = self.spec.network()
        model.load_state_dict(layers.state_dict(self.server.value))
        return model.eval()

    def close(self) -> None:
        """Stop the engine; what was recorded is written."""
        try:
            self.write_down()
            self.writer.close(self.t)
        finally:
            self.engine.close()

    def _step(self) -> dict[str, Any]:
        t, started = self.t, self.clock.now()
        traced = self.tracer.wants(t)
        if traced:
            self.tracer.begin(t)
        try:
            done = self.run_round(self.run, t, trace=traced, while_training=self.write_down)
            shown = round_summary(done, self.server.rounds, self.spec.task, self.config.seed)
        except (RoundFailed, MachineFailure, HookError) as error:
            self.writer.add_events(t, [*self._events(), Event("run", str(error))])
            raise
        self.saved.change(done.changed)
        if traced:
            self.tracer.write(done)
        events = done.events + self._events()
        events += [Event("run", complaint) for complaint in self.writer.sinks.complaints()]
        events += [
            Event("run", f"{column} is NaN") for column in undefined_metrics(shown) if column not in self._undefined
        ]
        self._undefined.update(undefined_metrics(shown))
        shown["messages"] = [event.message for event in events]
        shown["seconds"] = self.clock.now() - started
        self._write_later(done, shown, events)
        if self.config.rounds.until.sim_seconds is not None:  # the clock is read off the bytes that are written
            self.write_down()
            shown["sim_clock"] = self.writer.sim_clock
        if self.scoreboard.add(t, shown, self.wall) and self.config.record.keep_best:
            self.writer.keep_best(t)
        self.t += 1
        if self.t % self.config.rounds.checkpoint_every == 0 or self.complete:
            self.checkpoint()
        return shown

    def report(self, event: Event) -> None:
        """Record an event between rounds: it is shown and written with the next round."""
        self.engine.events.append(event)

    def _events(self) -> list[Event]:
        """The engine's events since the last call, with the round."""
        events = [replace(e, message=f"round {self.t + 1}: {e.message}") for e in self.engine.events]
        self.engine.events.clear()
        return events

    def _write_later(self, done: Round, shown: dict[str, Any], events: list[Event]) -> None:
        self.write_down()  # the round before, where nothing was trained meanwhile
        finished = Finished(done, replace(self.server), shown, events, self.wall, self.clock.wall())
        collect_logs = done.dispatcher.close()

        def write() -> None:
            collect_logs()
            self.writer.write(finished)

        self._unwritten = write

    def _go_back(self) -> None:
        """Client states died with a node: the rounds since the last checkpoint are repeated, to the same bits."""
        self._unwritten = None
        reached = self.t
        self._setbacks = 1 if reached > self._furthest else self._setbacks + 1
        self._furthest = max(reached, self._furthest)
        if self._setbacks == ATTEMPTS:
            raise MachineFailure(
                f"client states were lost {ATTEMPTS} times before round {reached + 1} was done; do they fit into the memory "
                "in the object stores (engine.ray.state_bytes) and on their disks?"
            )
        self.t, _ = self.saved.restore()
        self.report(Event("run", f"client states were lost; rounds {self.t + 1} to {reached + 1} are repeated"))
        self.writer.go_back(self.t)
        self.scoreboard = self.writer.scoreboard(self.t)
        publish(self.run)
