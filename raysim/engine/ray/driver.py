"""The loop over rounds in an actor: what it holds never passes the process of the command line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from raysim.clock import CLOCK
from raysim.core.event import Event
from raysim.data import Dataset, Partition
from raysim.engine.base import ATTEMPTS, MachineFailure
from raysim.engine.ray.cluster import Watch, free_resources
from raysim.engine.ray.deaths import DEATHS, Death, explained
from raysim.engine.ray.engine import ray_engine
from raysim.engine.ray.placement import Resources
from raysim.engine.ray.pool import Pool
from raysim.errors import ConfigError
from raysim.lazy import nn
from raysim.registry import REGISTRY, OwnEntry

if TYPE_CHECKING:
    from raysim.config import Config
    from raysim.federation.loop import Federation

PACKAGE = Path(__file__).parents[2]
WATCH_SECONDS = 1  # from one look at the cluster to the next
RELEASE_SECONDS = 10  # to wait at a run's end until the cluster has its share back


Build = Callable[..., "Federation"]  # (config, out, resume, make_engine, partitioned); importable in another process


class Driver:
    """What a `RemoteFederation` calls."""

    def build(
        self, build: Build, config: Config, out: Path, resume: bool, resources: Resources, partitioned: list[Any],
        own: Sequence[OwnEntry], here: Path,
    ) -> list[str]:  # fmt: skip
        """Build the federation; `partitioned` are references to its data and partition, `own` are the entries of the
        registry that this process cannot know of, and relative paths begin `here`, where there is such a folder. Returns
        raysim's warnings, which would not be read here."""
        with suppress(OSError):
            os.chdir(here)
        REGISTRY.adopt(own)
        pool = Pool()
        if config.engine.ray:
            pool.warm(config.engine.ray, config.cohort_size, resources)  # processes start while the federation is built
        engine = partial(ray_engine, resources=resources, pool=pool, references=tuple(partitioned))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default", UserWarning)
            self.federation = build(config, out, resume, engine, tuple(ray.get(partitioned)))
        pool.clear()  # of processes that the run did not take
        return [str(one.message) for one in caught if Path(one.filename).is_relative_to(PACKAGE)]

    def __repr__(self) -> str:
        """What Ray's dashboard and logs call it."""
        return "Driver"

    def call(self, method: str, *args: Any) -> Any:
        """A method of the federation."""
        return getattr(self.federation, method)(*args)


def unsendable(own: Sequence[OwnEntry]) -> ConfigError | None:
    """Which of a user's own entries of the registry cannot be pickled, as an error; None where all can."""
    for kind, name, entry, _ in own:
        try:
            ray.cloudpickle.dumps(entry)
        except Exception as error:
            return ConfigError(
                f"the {kind} {name!r} cannot be sent to Ray's processes ({type(error).__name__}: {error}). It, or a global that "
                "its code names, holds what only this process has, such as a lock or an open file. Make that inside the "
                "code, or use engine=local."
            )
    return None


def stored(partitioned: tuple[Dataset, Partition]) -> list[Any]:
    """References to data and partition, which are in the object store from then on."""
    with explained():
        return [ray.put(part) for part in partitioned]


class RemoteFederation:
    """A federation that lives in an actor. If the actor dies, another goes on from the last checkpoint; `ATTEMPTS` deaths
    without progress end the run with a `MachineFailure`."""

    def __init__(
        self, build: Build, config: Config, out: Path, resume: bool, partitioned: Sequence[Any],
        resources: Resources | None = None,
    ):  # fmt: skip
        """`build` makes the federation of data and partition, to which `partitioned` are references; `resources` are the
        run's part of the cluster (default: all that is free)."""
        self._build, self._config, self._out = build, config, Path(out).absolute()
        self._partitioned = list(partitioned)
        # Counted once: when another driver takes over, the hosts of the one that died may still be on their way out.
        self._resources = resources or free_resources()
        self._resume = resume
        self._deaths, self._furthest = 0, -1  # since the run got further than ever, and how far that was
        self._driver: Any = None
        self._watch, self._watched = Watch(), CLOCK.now()
        self._interrupted = False  # while the driver was at work, as it may still be
        self._unreported: list[Event] = []  # deaths of drivers, not reported to the living one yet
        self._with_driver(lambda: None)

    def _start(self) -> None:
        # The driver is on the machine of the command line: it writes the run's folder, and waits more than it works.
        here = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        driver: Any = ray.remote(Driver)
        self._driver = driver.options(num_cpus=0, scheduling_strategy=strategy).remote()
        arguments = (
            self._build, self._config, self._out, self._resume, self._resources, self._partitioned, REGISTRY.own(),
            Path.cwd(),
        )  # fmt: skip
        try:
            built = self._driver.build.remote(*arguments)
        except Exception as error:
            raise unsendable(REGISTRY.own()) or error from None
        for warning in self._get(built):
            warnings.warn(warning, stacklevel=2)
        self._resume = True
        while self._unreported:
            self._get(self._driver.call.remote("report", self._unreported[0]))
            del self._unreported[0]

    def _get(self, reference: Any) -> Any:
        """The value, or the driver's error. Raises `MachineFailure` where the cluster is gone: Ray would wait for it."""
        with explained():
            while not ray.wait([reference], timeout=WATCH_SECONDS)[0]:
                self._check_cluster()
            try:
                return ray.get(reference)
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, Exception):
                    cause.__cause__ = None
                    raise cause from None
                raise

    def _check_cluster(self) -> None:
        if CLOCK.now() - self._watched < WATCH_SECONDS:
            return
        if why := self._watch.gone():
            raise MachineFailure(f"the Ray cluster is gone: {why}. Was it stopped, or killed for want of memory?")
        self._watched = CLOCK.now()

    def _call(self, method: str) -> Any:
        return self._with_driver(lambda: self._get(self._driver.call.remote(method)))

    def _with_driver(self, action: Callable[[], Any]) -> Any:
        """`action`, with a driver that lives; again with another where it dies."""
        while True:
            try:
                self._check_cluster()
                if self._driver is None:
                    self._start()
                answer = action()
                self._interrupted = False
                return answer
            except DEATHS as error:
                self._bury(Death.of(error))
            except KeyboardInterrupt:
                self._interrupted = True
                raise

    def _bury(self, death: Death) -> None:
        """Make way for another driver. Raises `MachineFailure` where three died without progress."""
        self._kill()
        self._deaths += 1
        # A driver that died before it could describe its run has left nothing to resume.
        self._resume = self._resume or (self._out / "manifest.json").exists()
        if self._deaths == ATTEMPTS:
            when = f"after round {self._furthest + 1}" if self._furthest >= 0 else "before the first round"
            way_out = ". Free memory there, or take a smaller model or cohort" if death.out_of_memory else ""
            raise MachineFailure(f"the driver died {ATTEMPTS} times {when}: {death.why}{way_out}")
        message = f"the driver died: {death.why}; another goes on from the last checkpoint"
        self._unreported.append(Event("driver", message))

    def _kill(self) -> None:
        if self._driver is not None:
            ray.kill(self._driver)
        self._driver = None

    def step(self) -> dict[str, Any] | None:
        answer: dict[str, Any] | None = self._call("step")
        if answer is not None and answer["round"] > self._furthest:
            self._deaths, self._furthest = 0, answer["round"]
        return answer

    def report(self, event: Event) -> None:
        self._with_driver(lambda: self._get(self._driver.call.remote("report", event)))

    def checkpoint(self) -> int:
        answer: int = self._call("checkpoint")
        return answer

    def finish(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._call("finish")
        return answer

    def model(self) -> nn.Module:
        answer: nn.Module = self._call("model")
        return answer

    def close(self) -> None:
        if self._watch.gone():
            return  # and so are driver and hosts
        try:
            if (
                self._driver is not None and not self._interrupted
            ):  # or it would be waited for until its round has ended
                with suppress(*DEATHS):
                    self._get(self._driver.call.remote("close"))
        finally:
            self._kill()
        # The hosts die with their driver, a moment later. A run that follows must not count their share as taken.
        deadline = CLOCK.now() + RELEASE_SECONDS
        while free_resources().cpus < self._resources.cpus and CLOCK.now() < deadline:
            CLOCK.sleep(0.05)
