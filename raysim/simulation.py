"""A run from Python: played to its end or round by round, stopped, continued, extended. The command line is a client."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from raysim.config import Config, ConfigError, check_unchanged, from_dict, load, to_dict
from raysim.federation.lock import finished, how_to_continue, machine_changes, run_lock
from raysim.interrupts import Interrupts

if TYPE_CHECKING:
    from torch import nn

    from raysim.engine.ray.placement import Resources
    from raysim.report.runs import Run

Source = str | Path | Mapping[str, Any] | Config


@dataclass(frozen=True)
class PlayedRound:
    """What a round came to. Scores are fractions and losses nats; None where the round was not evaluated."""

    number: int  # from 1
    rounds: int  # of the whole run
    accuracy: float | None  # of the global model on the test set
    loss: float | None  # of the global model on the test set
    train_loss: float | None  # mean over the round's training samples
    clients_ok: int  # clients whose model was aggregated
    clients_failed: int
    seconds: float
    metrics: Mapping[str, float]  # every other score, such as `personal_accuracy_micro`
    messages: tuple[str, ...]  # what failed, and what was done about it

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> PlayedRound:
        """From what `Federation.step` returns."""
        rest = dict(summary)
        number, messages = rest.pop("round") + 1, tuple(rest.pop("failures"))
        names = ("rounds", "accuracy", "loss", "train_loss", "clients_ok", "clients_failed", "seconds")
        known = {name: rest.pop(name) for name in names}
        return cls(number, metrics=rest, messages=messages, **known)


class Simulation(Iterator[PlayedRound]):
    """One run. Every step of the iteration plays a round; a loop over it may be left and taken up again.

    After the last round the run is finished: its model and its result are on disk, and all that was started has been
    stopped. To stop earlier, call `stop`, leave a `with` block, or drop the object. Ctrl-C waits for the round in
    progress, saves a checkpoint and raises `KeyboardInterrupt`; the iteration can then go on. A second one stops at once.
    """

    def __init__(
        self, config: Config, folder: Path, *, resume: bool = False, address: str | None = None,
        resources: Resources | None = None, interrupts: Interrupts | None = None,
    ):  # fmt: skip
        """`resources` are the run's part of a cluster that it shares (default: what is free); `interrupts` are those of
        a caller who handles signals itself. Raises `ConfigError` where another process plays this run, and where it
        began with settings that make other bits."""
        self.config, self.folder = config, folder
        self.result: dict[str, Any] | None = None  # scores, bytes and hash, once the run is finished
        self.warnings: list[str] = []
        self._resume, self._address, self._resources, self._interrupts = resume, address, resources, interrupts
        self._federation: Any = None
        self._open = ExitStack()  # the lock, the cluster, the federation
        self._open.enter_context(run_lock(folder))
        self._finalizer = weakref.finalize(self, self._open.close)
        try:
            if resume:
                check_unchanged(config, folder)
                self.warnings += [
                    f"{change}; bits may differ from those of a run that was not stopped"
                    for change in machine_changes(folder)
                ]
                self.result = finished(config, folder)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __next__(self) -> PlayedRound:
        if self.result is not None:
            raise StopIteration
        self.start()
        with self._ended_on_error(), self._patience() as interrupts:
            summary = self._federation.step()
            if summary is None:
                self.result = self._federation.finish() | {"folder": str(self.folder)}
            elif interrupts.received is not None:
                self._federation.checkpoint()
        if summary is None:
            self.stop()
            raise StopIteration
        if interrupts.received is not None:
            raise KeyboardInterrupt(how_to_continue(self.folder))
        return PlayedRound.of(summary)

    def start(self) -> None:
        """Start the engine, if that has not been done: the first round does it. Raises what is wrong with data, model
        and cluster, in a sentence."""
        if self._federation is None and self.result is None:
            with self._ended_on_error():
                launch = self._open.enter_context(engine(self.config, self._address, self._resources))
                if self._interrupts is not None:
                    self._interrupts.install()  # again: Ray has put its own handler of SIGTERM in place
                self._federation = launch(self.config, self.folder, self._resume)
                self._open.callback(self._federation.close)

    def model(self) -> nn.Module:
        """The global model with the weights of the last round played, on the CPU."""
        if self._federation is None:
            from raysim.report.runs import Run

            return Run(self.folder).model()
        model: nn.Module = self._federation.model()
        return model

    def save(self) -> None:
        """Write a checkpoint now; without it a run that dies goes on from the last of `rounds.checkpoint_every`."""
        if self._federation is not None:
            self._federation.checkpoint()

    def stop(self) -> None:
        """Stop all that was started. The rounds since the last checkpoint are played again when the run is continued;
        `save` first to keep them."""
        self._federation = None
        self._finalizer()

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """A round that was broken off leaves nothing to go on with in this process; its folder does."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    @contextmanager
    def _patience(self) -> Iterator[Interrupts]:
        """Let the first Ctrl-C wait for the round in progress."""
        with nullcontext(self._interrupts) if self._interrupts else Interrupts() as interrupts:
            interrupts.patient = True
            yield interrupts


def run(
    config: Source, *, out: str | Path | None = None, address: str | None = None, progress: bool | None = None,
    **settings: Any,
) -> Run:  # fmt: skip
    """Play a whole run and return it.

    `config` is a YAML file, the name of a configuration that comes with raysim ("quickstart"), a mapping, or a
    `Config`. `settings` change it: `rounds__total=20` is `--set rounds.total=20`. `out` is the run's folder (default: a
    new one in `record.dir`), `address` a Ray cluster to join. `progress` shows a bar (default: in terminals and
    notebooks). Raises `ConfigError` with everything that is wrong, before anything is started.
    """
    return _played(stream(config, out=out, address=address, **settings), progress)


def stream(
    config: Source, *, out: str | Path | None = None, address: str | None = None, **settings: Any
) -> Simulation:  # fmt: skip
    """As `run`, round by round: `for round in raysim.stream(config): print(round.accuracy)`."""
    wanted = read_config(config, **settings)
    folder = new_folder(None if out is None else Path(out), Path(wanted.record.dir), wanted.name)
    return Simulation(wanted, folder, address=address)


def resume(
    run: str | Path | Run, *, address: str | None = None, progress: bool | None = None, **settings: Any
) -> Run:  # fmt: skip
    """Continue a run that was stopped, or, with `rounds__total` raised, one that is finished: to the same bits as if it
    had never stopped. Raises `ConfigError` where `settings` would make other bits."""
    return _played(restream(run, address=address, **settings), progress)
