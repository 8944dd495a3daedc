"""Hosts and the driver as Ray actors. But for the search in `raysim.sweep.tune`, the only file that imports Ray."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# `uv run` would otherwise make Ray rebuild the environment for every worker, which has it already.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # an actor without a GPU share sees no GPU; no warning
os.environ.setdefault(
    "RAY_DEDUP_LOGS_SKIP_REGEX", "."
)  # what Ray prints of dead processes, whatever `log_to_driver` says

import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError

from raysim.config import Config, ConfigError, RayEngineConfig
from raysim.engine.engine import Call, Engine, Handle, HostLost, StateLost
from raysim.engine.ray.placement import Placement, PlacementError, Resources, place
from raysim.host.host import ClientHost
from raysim.host.messages import HostSpec, TrainRequest

START_SECONDS = 120  # to place a new host; a cluster that cannot by then has too little left
RELEASE_SECONDS = 10  # to wait at a run's end until the cluster has its share back
DRIVER_ATTEMPTS = 3


class HostActor(ClientHost):
    """A `ClientHost` in a process of its own; with `become` for `__init__`, because a process can serve many runs."""

    def __init__(self) -> None:
        self.t = -1

    def become(self, spec: HostSpec, data: Any, partition: Any) -> str:
        """Be a host of this run, whatever the process was before; returns the node it is on."""
        super().__init__(spec, data, partition)
        return ray.get_runtime_context().get_node_id()

    def train(self, request: TrainRequest, *args: Any) -> Any:
        """The reply in objects that travel one by one."""
        return super().train(request, *args).detach(request)

    def initialize(self, request: TrainRequest, *args: Any) -> Any:
        return super().initialize(request, *args).detach(request)

    def forget(self) -> None:
        """Free all that the last run has left here."""
        self.__dict__.clear()


class Pool:
    """Idle host actors. To start a process costs seconds, to make it a host of the next run milliseconds."""

    def __init__(self) -> None:
        self._share = (0.0, 0.0)  # CPUs and GPUs of each
        self._idle: list[Any] = []

    def free(self, resources: Resources) -> Resources:
        """What the cluster has free when it counts the pool's actors as such."""
        (cpus, gpus), idle = self._share, len(self._idle)
        return replace(resources, cpus=resources.cpus + idle * cpus, gpus=resources.gpus + idle * gpus)

    def take(self, cpus: float, gpus: float) -> Any:
        """A living actor that reserves this share, or None. Actors of another share make room."""
        if self._share != (cpus, gpus):
            self.clear()
        while self._idle:
            actor = self._idle.pop()
            with suppress(RayActorError):
                ray.get(actor.forget.remote())
                return actor
        return None

    def give(self, actor: Any, cpus: float, gpus: float) -> None:
        """Keep an actor that no run needs any more."""
        if self._share != (cpus, gpus):
            self.clear()
        self._share = (cpus, gpus)
        actor.forget.remote()
        self._idle.append(actor)

    def warm(self, config: Config, resources: Resources) -> None:
        """Start the processes that a run of `config` will most likely take; raises nothing, it is only a guess."""
        settings, cohort = config.engine, config.cohort_size or 1 << 20
        assert isinstance(settings, RayEngineConfig)
        with suppress(PlacementError):
            placement = place(
                resources, cohort, settings.clients_per_actor, settings.gpu_per_client, settings.threads, model_bytes=0
            )
            self._share = placement.cpus, placement.gpus
            options = {"num_cpus": placement.cpus, "num_gpus": placement.gpus, "scheduling_strategy": "SPREAD"}
            self._idle = [ray.remote(HostActor).options(**options).remote() for _ in range(placement.hosts)]

    def clear(self) -> None:
        """Stop the idle actors."""
        while self._idle:
            ray.kill(self._idle.pop())


@dataclass
class RayEngine(Engine):
    """Hosts as actors that share the cluster's CPUs and GPUs as `placement` says; from a pool, if there is one."""

    placement: Placement = Placement(1, 1.0, 0.0)
    pool: Pool | None = None
    dealt: tuple[Any, Any] | None = None  # references to data and partition, where they are in the object store already

    def __post_init__(self) -> None:
        super().__post_init__()
        self._data: Any
        self._partition: Any
        self._data, self._partition = self.dealt or (ray.put(self.data), ray.put(self.partition))
        actors, ready = zip(*(self._new_host() for _ in range(self.placement.hosts)), strict=True)
        try:
            nodes = ray.get(list(ready), timeout=START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ConfigError(
                f"engine.ray: {len(actors)} actors of {self.placement.cpus:g} CPUs and {self.placement.gpus:g} GPUs "
                f"did not start within {START_SECONDS} s; the cluster is busy with other work"
            ) from None
        except RayActorError as error:
            raise RuntimeError(f"a client actor could not start:\n{error}") from None
        # Neighbours in the cohort share a machine where they can: their sums are then merged before they travel.
        order = sorted(range(len(actors)), key=lambda i: nodes[i])
        self._actors, self.nodes = [actors[i] for i in order], [nodes[i] for i in order]

    def _new_host(self) -> tuple[Any, Any]:
        """An actor, and a reference to its node that is there once it is ready."""
        cpus, gpus = self.placement.cpus, self.placement.gpus
        actor: Any = self.pool.take(cpus, gpus) if self.pool else None
        if actor is None:
            options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
            actor = ray.remote(HostActor).options(**options).remote()
        return actor, actor.become.remote(self.spec, self._data, self._partition)

    @property
    def hosts(self) -> Sequence[Any]:
        return self._actors

    def call(self, call: Call) -> list[Handle]:
        method = getattr(self._actors[call.host], call.method)
        if call.returns == 1:
            return [method.remote(*call.args)]
        return method.options(num_returns=call.returns).remote(*call.args)

    def fetch(self, calls: Sequence[tuple[int, Handle]]) -> list[Any]:
        values = []
        for _, handle in calls:
            try:
                values.append(ray.get(handle))
            except (RayActorError, ObjectLostError) as error:
                dead = self._dead(getattr(error, "actor_id", None))
                if dead:
                    raise HostLost(dead) from None
                if isinstance(error, ObjectLostError):
                    raise StateLost(str(error)) from None
                raise
            except RayTaskError as error:
                raise error.as_instanceof_cause() from None
        return values

    def _dead(self, actor_id: str | None) -> set[int]:
        known = {i for i, actor in enumerate(self._actors) if actor._actor_id.hex() == actor_id}
        if known:
            return known
        dead = set()
        for i, actor in enumerate(self._actors):
            try:
                ray.get(actor.ping.remote())
            except RayActorError:
                dead.add(i)
        return dead

    def put(self, value: Any) -> Handle:
        return ray.put(value)

    def value_of(self, handle: Handle) -> Any:
        try:
            return ray.get(handle)
        except ObjectLostError as error:
            raise StateLost(str(error)) from None

    def replace(self, hosts: set[int]) -> None:
        for i in hosts:
            actor, ready = self._new_host()
            done, _ = ray.wait([ready], timeout=START_SECONDS)
            if done:
                with suppress(RayActorError):
                    self._actors[i], self.nodes[i] = actor, ray.get(ready)
                    continue
            ray.kill(actor)
            # No room for another process, as after the loss of a node: a living host takes the work over.
            living = next((j for j in range(len(self._actors)) if j not in hosts), None)
            if living is None:
                raise PlacementError("all client actors died and the cluster has no room for new ones")
            self._actors[i], self.nodes[i] = self._actors[living], self.nodes[living]

    def close(self) -> None:
        for actor in set(self._actors):
            if self.pool:
                self.pool.give(actor, self.placement.cpus, self.placement.gpus)
            else:
                ray.kill(actor)


def free_resources() -> Resources:
    """What the cluster this process is connected to has free."""
    free = ray.available_resources()
    return Resources(free.get("CPU", 0.0), free.get("GPU", 0.0), free.get("memory", float("inf")))


def ray_engine(
    config: Config, spec: HostSpec, data: Any, partition: Any, cohort: int, resources: Resources | None = None,
    pool: Pool | None = None, dealt: tuple[Any, Any] | None = None,
) -> Engine:  # fmt: skip
    """The engine of `config` on `resources` (default: what the cluster has free), with hosts of `pool` first. `dealt`
    are references to data and partition, where those are in the object store.

    Raises `PlacementError` and `ConfigError` for what does not fit.
    """
    settings = config.engine
    assert isinstance(settings, RayEngineConfig)
    if resources is None:
        resources = pool.free(free_resources()) if pool else free_resources()
    layers = spec.network()[1]
    placement = place(
        resources, cohort, settings.clients_per_actor, settings.gpu_per_client, settings.threads, 4 * layers.S
    )
    return RayEngine(
        spec, data, partition, settings.fan_in, settings.gather_bytes, placement=placement, pool=pool, dealt=dealt
    )  # fmt: skip


class Driver:
    """The federation, in an actor: what the loop over rounds holds never passes the process of the command line."""

    def build(self, config: Config, out: Path, resume: bool, resources: Resources, dealt: list[Any]) -> None:
        from raysim.federation.federation import Federation

        pool = Pool()
        pool.warm(config, resources)  # processes start while the federation is built
        engine = partial(ray_engine, resources=resources, pool=pool, dealt=tuple(dealt))
        self.federation = Federation(config, out, resume, engine, tuple(ray.get(dealt)))

    def call(self, method: str) -> Any:
        return getattr(self.federation, method)()


class RemoteFederation:
    """A `Federation` that lives in an actor. If the actor dies, another goes on from the last checkpoint."""

    def __init__(
        self, config: Config, out: Path, resume: bool, dealt: tuple[Any, Any] | None = None,
        resources: Resources | None = None,
    ):  # fmt: skip
        """`resources` are the run's part of the cluster (default: all that is free)."""
        from raysim.federation.federation import prepare

        self._config, self._out = config, Path(out).absolute()
        self._dealt = [ray.put(part) for part in dealt or prepare(config)]
        # Counted once: when another driver takes over, the hosts of the one that died may still be on their way out.
        self._resources = resources or free_resources()
        self._start(resume)

    def _start(self, resume: bool) -> None:
        # The driver is on the machine of the command line: it writes the run's folder, and waits more than it works.
        here = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        driver: Any = ray.remote(Driver)
        self._driver = driver.options(num_cpus=0, scheduling_strategy=strategy).remote()
        self._get(self._driver.build.remote(self._config, self._out, resume, self._resources, self._dealt))

    @staticmethod
    def _get(reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception):
                cause.__cause__ = None
                raise cause from None
            raise

    def _call(self, method: str) -> Any:
        for attempt in range(DRIVER_ATTEMPTS):
            try:
                return self._get(self._driver.call.remote(method))
            except (ActorDiedError, ActorUnavailableError):
                if attempt + 1 == DRIVER_ATTEMPTS:
                    raise
                print("the driver died; another goes on from the last checkpoint", file=sys.stderr)
                self._start(resume=True)
        raise AssertionError

    def step(self) -> dict[str, Any] | None:
        return self._call("step")

    def checkpoint(self) -> int:
        return self._call("checkpoint")

    def finish(self) -> dict[str, Any]:
        return self._call("finish")

    def close(self) -> None:
        with suppress(RayActorError):
            self._get(self._driver.call.remote("close"))
        ray.kill(self._driver)
        # The hosts die with their driver, a moment later. A run that follows must not count their share as taken.
        deadline = time.monotonic() + RELEASE_SECONDS
        while free_resources().cpus < self._resources.cpus and time.monotonic() < deadline:
            time.sleep(0.05)


@contextmanager
def session(
    config: Config, address: str | None = None, resources: Resources | None = None
) -> Iterator[Callable[[Config, Path, bool], RemoteFederation]]:
    """`cluster`, with the data of `config` dealt; yields what makes a federation on `resources` of it."""
    from raysim.federation.federation import prepare

    dealt = prepare(config)  # what is wrong with the data shows before anything is started
    settings, joined = config.engine, address or cluster_address()
    assert isinstance(settings, RayEngineConfig)
    if not joined and settings.gpu_per_client != "auto" and settings.gpu_per_client and not torch.cuda.device_count():
        raise ConfigError(
            f"engine.ray.gpu_per_client: {settings.gpu_per_client:g} of a GPU, but this machine has none. Set it to 0 or "
            "auto, or join a cluster with --address"
        )
    with cluster(address, None if resources else settings.state_bytes):  # who shares a cluster has asked for its size
        yield partial(RemoteFederation, dealt=dealt, resources=resources)


@contextmanager
def cluster(address: str | None = None, object_store: int | None = None) -> Iterator[str]:
    """Join the cluster at `address` or RAY_ADDRESS, or start one on this machine, with an `object_store` of so many bytes,
    and stop it at the end. Inside another `cluster`, that one serves. Yields where other processes join it."""
    joined = address or cluster_address()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    started = not ray.is_initialized()
    if started and joined and object_store:
        raise ConfigError(f"engine.ray.state_bytes: the cluster at {joined} has its own object store; leave it out")
    if started and joined:
        try:
            ray.init(address=joined, **quiet)
        except ConnectionError as error:
            raise ConnectionError(
                f"{error}. If the cluster asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where "
                "~/.ray/auth_token is not the cluster's"
            ) from None
    elif started:
        cores = len(os.sched_getaffinity(0))
        try:
            ray.init(
                address="local", num_cpus=cores, include_dashboard=False, object_store_memory=object_store, **quiet
            )
        except Exception as error:  # Ray raises a bare one where its processes are not up in time
            ray.shutdown()
            raise ConnectionError(
                f"Ray did not start on this machine: {error}. Is it busy? Try again, or --set engine=local"
            ) from None
    try:
        yield joined or ray.get_runtime_context().gcs_address
    finally:
        if started:
            ray.shutdown()


def cluster_address() -> str | None:
    """The cluster a run would join, or None where it would start its own."""
    return os.environ.get("RAY_ADDRESS") or None
