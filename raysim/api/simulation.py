"""One run, round by round. `run`, `stream` and `resume` make it, and so does the command line."""

from __future__ import annotations

import signal
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from raysim.api.interrupts import Interrupts
from raysim.api.launch import launcher
from raysim.config import Config, ConfigError, check_unchanged, recall
from raysim.core.event import Event
from raysim.core.modes import modes_of_a_run
from raysim.engine.base import MachineFailure
from raysim.engine.ray.placement import Resources
from raysim.federation.code import check_code
from raysim.federation.extend import rewrite
from raysim.federation.failures import RoundFailed
from raysim.federation.lock import finished_result, how_to_continue, run_lock, without_effect
from raysim.lazy import nn
from raysim.paths import Anchored
from raysim.store.atomic import remove, replacing
from raysim.store.manifest import FAILED
from raysim.store.tables import OPEN


class Stopped(KeyboardInterrupt):
    """A run was asked to stop: its round in progress is complete and saved. The message says how it goes on."""


@dataclass(frozen=True)
class RoundResult:
    """The result of a round. Scores are fractions and losses nats where the task is classification; None where the round
    was not evaluated."""

    number: int  # from 1
    rounds: int  # of the whole run
    headline: str | None  # the metric by which the run is judged, such as accuracy
    accuracy: float | None  # of the global model on the test set
    loss: float | None  # of the global model on the test set
    train_loss: float | None  # mean over the round's training samples
    clients_ok: int  # clients whose model was aggregated
    clients_failed: int
    seconds: float
    metrics: Mapping[str, float]  # every other score, such as `rmse` or `personal_accuracy_micro`
    messages: tuple[str, ...]  # what failed, and what was done about it

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> RoundResult:
        """From what `Federation.step` returns."""
        rest = dict(summary)
        number, messages = rest.pop("round") + 1, tuple(rest.pop("messages"))
        names = ("rounds", "headline", "accuracy", "loss", "train_loss", "clients_ok", "clients_failed", "seconds")
        known = {name: rest.pop(name) for name in names}
        metrics = {name.removeprefix(OPEN["rounds"].prefix): value for name, value in rest.items()}
        return cls(number=number, messages=messages, metrics=metrics, **known)

    @property
    def score(self) -> float | None:
        """The headline of the global model on the test set."""
        return self.accuracy if self.headline == "accuracy" else self.metrics.get(self.headline or "")


class Simulation(Iterator[RoundResult]):
    """Every step of the iteration runs a round; a loop over it may be left and taken up again.

    After the last round the run is finished: its model and its result are on disk, and all that was started has been
    stopped. To stop earlier call `stop`, leave a `with` block, or drop the object. After a Ctrl-C the round in progress is
    returned and saved, and the next step raises `Stopped`; the iteration can then go on. A second one stops at once.

    Where the driver's process dies, rounds after the last checkpoint run again, and are returned again: `number` says which.
    """

    folder = Anchored()

    def __init__(
        self, config: Config, folder: Path, *, resume: bool = False, address: str | None = None,
        resources: Resources | None = None, interrupts: Interrupts | None = None, accept_changed_code: bool = False,
    ):  # fmt: skip
        """`resources` are the run's part of a cluster that it shares (default: what is free); `interrupts` those of a
        caller who handles signals itself. Raises `ConfigError` where another process uses the run in `folder`, or,
        with `resume`, where it began with settings that make other bits or, unless that is accepted, with other code of
        the user's."""
        self.config, self.folder = config, folder
        self.result: Mapping[str, Any] | None = None  # scores, bytes and hash, once the run is finished
        self.warnings: list[str] = []
        self._resume, self._address, self._resources, self._interrupts = resume, address, resources, interrupts
        self._federation: Any = None
        self._accepted: list[str] = []  # changes of the user's code
        self._asked_to_stop = False  # in the round that was returned last
        self._open = ExitStack()  # the lock, the cluster, the federation
        self._finalizer = weakref.finalize(self, self._open.close)
        with self._stopped_on_error():
            self._open.enter_context(run_lock(folder))
            if not resume and any((folder / "checkpoints").glob("*.json")):
                raise ConfigError(f"{folder}: another process has begun this run meanwhile. {how_to_continue(folder)}")
            if resume:
                check_unchanged(config, folder)
                self.result = finished_result(config, folder)
                if self.result is not None:
                    self.warnings += without_effect(config, folder)
                else:
                    self._accepted, unknown = check_code(config, folder, accept_changed_code)
                    self.warnings += unknown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __next__(self) -> RoundResult:
        if self.result is not None:
            raise StopIteration
        if self._asked_to_stop:
            self._asked_to_stop = False
            raise Stopped(how_to_continue(self.folder))
        self.start()
        complaints: list[str] = []
        signals = nullcontext(self._interrupts) if self._interrupts else Interrupts(signal.SIGINT, patient=True)
        with self._stopped_on_error(), signals as interrupts, self._modes():
            summary = self._federation.step()
            if summary is None:
                result = self._federation.finish()
                complaints = result.pop("complaints")
                self.result = result | {"folder": self.folder}
            elif interrupts.received is not None:
                self._federation.checkpoint()
        if summary is None:
            self.stop()
            for complaint in complaints:
                warnings.warn(complaint, stacklevel=2)
            raise StopIteration
        self._asked_to_stop = interrupts.received is not None
        return RoundResult.of(summary)

    def start(self) -> None:
        """Start the engine, where the first round has not done it. Raises what is wrong with data, model or cluster."""
        if self._federation is not None or self.result is not None:
            return
        if not self._finalizer.alive:
            raise RuntimeError(f"this simulation was stopped. {how_to_continue(self.folder)}")
        recall(self.config)
        with self._stopped_on_error(), self._modes():
            launch = self._open.enter_context(launcher(self.config, self._address, self._resources))
            if self._interrupts is not None:
                self._interrupts.install()  # again: Ray has put its own handler of SIGTERM in place
            self._federation = launch(self.config, self.folder, self._resume)
            remove(self.folder / FAILED)
            self._open.callback(self._federation.close)
            if self._resume:
                rewrite(self.config, self.folder)
            while self._accepted:
                self._federation.report(Event("run", f"accepted: {self._accepted.pop(0).partition(chr(10))[0]}"))
            if self._interrupts is not None:
                self._interrupts.patient = True  # before the terminal says that rounds begin

    def model(self) -> nn.Module:
        """A copy of the global model as the last round left it, on the CPU and in eval mode."""
        if self._federation is None:
            from raysim.report.runs import Run

            return Run(self.folder).model()
        model: nn.Module = self._federation.model()
        return model

    def save(self) -> None:
        """Write a checkpoint now, beside those of every `rounds.checkpoint_every` rounds."""
        if self._federation is not None:
            with self._modes():
                self._federation.checkpoint()

    def stop(self) -> None:
        """Stop all that was started. The run can be resumed from its last checkpoint; `save` first to lose no round."""
        self._federation = None
        self._finalizer()

    def _modes(self) -> AbstractContextManager[None]:
        """PyTorch as a run needs it in this process, if it computes here: on Ray nothing of it is imported."""
        return nullcontext() if self.config.engine.ray else modes_of_a_run(self.config.engine.threads)

    @contextmanager
    def _stopped_on_error(self) -> Iterator[None]:
        """Stop everything on an error. The run can be resumed from its folder."""
        try:
            yield
        except BaseException as error:
            self.stop()
            if isinstance(error, MachineFailure | RoundFailed):
                error.add_note(how_to_continue(self.folder))
            refused = isinstance(error, ConfigError)  # what was asked for, and not what is there
            if isinstance(error, Exception) and not refused and (self.folder / "config.yaml").exists():
                with suppress(OSError), replacing(self.folder / FAILED) as path:  # the disk may be what it failed of
                    path.write_text(f"{error}\n", encoding="utf-8")
            raise
