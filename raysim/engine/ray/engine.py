"""The engine whose hosts are Ray actors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from raysim.config import Config, ConfigError, RayEngineConfig
from raysim.data import Dataset, Partition
from raysim.engine.base import Call, Engine, Handle, HostLost, StateLost
from raysim.engine.ray.actors import new_actor
from raysim.engine.ray.cluster import free_resources
from raysim.engine.ray.placement import Placement, PlacementError, Resources, place
from raysim.engine.ray.pool import Pool
from raysim.host.messages import HostSpec

START_SECONDS = 120  # to place a new host; a cluster that cannot by then has too little left


@dataclass
class RayEngine(Engine):
    """Hosts as actors that share the cluster's CPUs and GPUs as `placement` says; from a pool, if there is one."""

    placement: Placement = Placement(1, 1.0, 0.0)
    pool: Pool | None = None
    references: tuple[Any, Any] | None = None  # to data and partition, where they are in the object store already

    def __post_init__(self) -> None:
        super().__post_init__()
        self._data: Any
        self._partition: Any
        self._data, self._partition = self.references or (ray.put(self.data), ray.put(self.partition))
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
        actor = self.pool.take(cpus, gpus) if self.pool else None
        if actor is None:
            actor = new_actor(cpus, gpus)
        return actor, actor.become.remote(self.spec, self._data, self._partition)

    @property
    def hosts(self) -> Sequence[Any]:
        return self._actors

    def call(self, call: Call) -> Handle:
        return getattr(self._actors[call.host], call.method).remote(*call.args)

    def train(self, call: Call) -> list[Handle]:
        method = getattr(self._actors[call.host], f"{call.method}_detached")
        handles: list[Handle] = method.options(num_returns=call.args[0].objects).remote(*call.args)
        return handles

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


def ray_engine(
    config: Config, spec: HostSpec, data: Dataset, partition: Partition, cohort: int,
    resources: Resources | None = None, pool: Pool | None = None, references: tuple[Any, Any] | None = None,
) -> Engine:  # fmt: skip
    """The engine of `config` on `resources` (default: what the cluster has free), with hosts of `pool` first.
    `references` are to data and partition, where those are in the object store.

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
        spec, data, partition, settings.fan_in, settings.gather_bytes, placement=placement, pool=pool,
        references=references,
    )  # fmt: skip
