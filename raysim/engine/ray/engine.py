"""The engine whose hosts are Ray actors."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError

from raysim.core.event import Event
from raysim.core.hooks import HookError
from raysim.data import Dataset, Partition
from raysim.engine.base import Call, Engine, Handle, HostLost, MachineFailure, StateLost, machine_failure
from raysim.engine.ray.actors import new_actor
from raysim.engine.ray.cluster import free_resources
from raysim.engine.ray.deaths import DEATHS, Death, explained
from raysim.engine.ray.heartbeat import HeartbeatMonitor
from raysim.engine.ray.placement import (
    GPU_BYTES,
    MEMORY_SHARE,
    Placement,
    PlacementError,
    Resources,
    actors,
    place,
    room,
)
from raysim.engine.ray.pool import PING_SECONDS, Pool
from raysim.host.device import needs_gpu
from raysim.host.footprint import training_bytes
from raysim.host.messages import HostSpec, TrainRequest

if TYPE_CHECKING:
    from raysim.config import Config

ROOM_SECONDS = 10  # to wait until a dead process's share is free again
START_SECONDS = 120  # to start the processes of actors on a busy machine
TIMEOUT = 300.0  # least seconds for a client or another piece of work, where the configuration leaves that open
SIGNS = 4  # of life within a time-out
MEDIANS = 20  # ... and how many times the median client


@dataclass
class RayEngine(Engine):
    """Hosts as actors that share the cluster's CPUs and GPUs as `placement` says; from a pool, if there is one."""

    placement: Placement = Placement((), 1.0, 0.0)
    pool: Pool | None = None
    references: tuple[Any, Any] | None = None  # to data and partition, where they are in the object store already
    client_timeout: float | None = None  # seconds; None: a multiple of the median client
    most: int = 0  # hosts; where it is more than there are, the engine grows
    training_bytes: int = 0  # that an actor needs to train a client
    update_bytes: int = 0  # that all actors need together for a cohort's updates

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.placement.gpus:
            self.spec = replace(self.spec, device="cpu")  # Ray shows an actor without a share every GPU there is
        self._data: Any
        self._partition: Any
        self._data, self._partition = self.references or (ray.put(self.data), ray.put(self.partition))
        self.nodes = sorted(
            self.placement.nodes
        )  # neighbours in the cohort share a machine: sums merge before they travel
        self._monitor = HeartbeatMonitor(self.spec.clock)
        self._measured = False
        self._coming: dict[Any, tuple[Any, str]] = {}  # by the reference that is ready when it is: actor and node
        self._full: set[str] = set()  # nodes whose GPUs had no memory for another actor
        self._actors, ready = map(list, zip(*self._new_hosts(self.nodes), strict=True))
        _, late = ray.wait(ready, num_returns=len(ready), timeout=START_SECONDS)
        if late:
            nodes = sorted({self.nodes[ready.index(reference)][:12] for reference in late})
            self.close()
            raise PlacementError(
                f"engine.ray: {len(late)} of {len(ready)} actors of {self.placement.cpus:g} CPUs and "
                f"{self.placement.gpus:g} GPUs did not start within {START_SECONDS} s, on node {', '.join(nodes)}. Free "
                f"now: {free_resources()}. Is the cluster busy with other work?"
            )
        self._replace_unstarted(ready)
        if self.placement.gpus:
            self._spare_gpus()
        if self.most > len(self._actors):
            share = {"CPU": self.placement.cpus} | ({"GPU": self.placement.gpus} if self.placement.gpus else {})
            request_resources(bundles=[share] * self.most)
        if self.placement.note:
            self.events.append(Event("run", self.placement.note))

    def _replace_unstarted(self, ready: list[Any]) -> None:
        """Replace hosts that died as they started: a node may be gone, and the cluster not know it yet."""
        errors: dict[int, Exception] = {}
        for i, reference in enumerate(ready):
            try:
                ray.get(reference)
            except DEATHS as error:
                errors[i] = error
        if not errors:
            return
        deaths, first = [Death.of(error) for error in errors.values()], next(iter(errors.values()))
        gone, why = [self.nodes[i] for i in errors], deaths[0].why
        try:
            then = self.replace(HostLost({*errors}, out_of_memory=any(death.out_of_memory for death in deaths)))
        except MachineFailure:
            self.close()
            raise MachineFailure(f"a client actor could not start: {why}. Ray says: {first}") from None
        message = "a client actor on node {} could not start: {}; {}"
        self.events += [Event("actor", message.format(node, why, then), node=node) for node in gone]

    def _spare_gpus(self) -> None:
        """Where a GPU has too little memory for all of its actors to train at a time, let some do the others' work."""
        found = self.retry_after_loss(lambda: self.fetch([(i, a.gpu.remote()) for i, a in enumerate(self._actors)]))
        sharing = defaultdict[tuple[str, str], list[int]](list)
        for i, (gpu, _) in enumerate(found):
            sharing[self.nodes[i], gpu].append(i)
        for (node, gpu), hosts in sharing.items():
            free = min(found[i][1] for i in hosts) * MEMORY_SHARE - self.update_bytes * len(hosts) / len(found)
            there = list(dict.fromkeys(self._actors[i] for i in hosts))  # after a loss, one actor can be several hosts
            most = max(1, int(min(free / (GPU_BYTES + self.training_bytes), len(there))))
            if most == len(there):
                continue
            for n, actor in enumerate(there[most:]):
                ray.kill(actor)
                self._actors = [there[n % most] if other == actor else other for other in self._actors]
            message = (
                f"GPU {gpu} of node {node} has memory for {most} of its {len(there)} actors: a client takes about "
                f"{self.training_bytes / 2**30:.1f} GiB. The remaining actors take over"
            )
            self.events.append(Event("actor", message, node=node))

    def _new_hosts(self, nodes: Sequence[str]) -> list[tuple[Any, Any]]:
        """An actor on each node, and a reference that is there once it is ready."""
        share = self.placement.cpus, self.placement.gpus
        idle = self.pool.take(nodes, *share) if self.pool else [None] * len(nodes)
        actors = [actor or new_actor(node, *share) for node, actor in zip(nodes, idle, strict=True)]
        become = self.spec, self._data, self._partition, self._least_timeout / SIGNS, Path.cwd()
        return [(actor, actor.setup.remote(*become)) for actor in actors]

    @property
    def hosts(self) -> Sequence[Any]:
        return self._actors

    def call(self, call: Call) -> Handle:
        return self._actors[call.host].call.options(name=call.method).remote(call.method, *call.args)

    def train(self, call: Call) -> list[Handle]:
        request: TrainRequest = call.args[0]
        detached = self._actors[call.host].call_detached
        handles: list[Handle] = detached.options(
            num_returns=request.objects, name=_shown(call.method, request)
        ).remote(call.method, *call.args)  # fmt: skip
        return handles

    def fetch(self, calls: Sequence[tuple[int, Handle]]) -> list[Any]:
        values = []
        for host, handle in calls:
            try:
                with explained():
                    values.append(self._patiently(host, handle))
            except DEATHS as error:
                raise self._lost(host, error) from None
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, HookError):  # which says it in a sentence
                    raise cause from None
                raise machine_failure(cause, self.nodes[host]) or error.as_instanceof_cause() from None
        return values

    def _patiently(self, host: int, handle: Handle) -> Any:
        """The value, unless the host hangs, or one that it waits for. Raises `HostLost`."""
        while True:
            try:
                return ray.get(handle, timeout=self._least_timeout / SIGNS)
            except GetTimeoutError:
                if hanging := self._hanging(host):
                    why = f"it did not get on for {self._timeout():g} s (engine.ray.client_timeout)"
                    raise HostLost(hanging, why) from None

    def _hanging(self, host: int) -> set[int]:
        """The host, if it hangs; where it waits for others, those that hang."""
        limit, hanging = self._timeout(), set()
        for i in dict.fromkeys((host, *range(len(self._actors)))):
            at_work, hangs = self._monitor.listen(_id(self._actors[i]), limit)
            if hangs:
                hanging.add(i)
            if i == host and (at_work or hangs):
                break
        return hanging

    @property
    def _least_timeout(self) -> float:
        return self.client_timeout or TIMEOUT

    def _timeout(self) -> float:
        """Seconds for a client, or for another piece of work."""
        median = statistics.median(self.pace.seconds.values()) if self.pace.seconds else 0.0
        # Of clients that train together nothing is seen until all have ended.
        return self.spec.batch_clients * (self.client_timeout or max(TIMEOUT, MEDIANS * median))

    def _lost(self, host: int, error: Exception) -> Exception:
        """What an error of a call to `host` means: hosts that died, or client states that went with them."""
        death = Death.of(error)
        dead = {i for i, actor in enumerate(self._actors) if _id(actor) == death.actor_id}
        dead = dead or self._dead(range(len(self._actors)))
        if not dead and isinstance(error, ObjectLostError):
            return StateLost(str(error))
        return HostLost(dead or {host}, death.why, out_of_memory=death.out_of_memory)

    def _dead(self, hosts: Iterable[int]) -> set[int]:
        """Those of the hosts that are known to be dead."""
        pings = {self._actors[i].ping.remote(): i for i in hosts}
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=PING_SECONDS)
        dead = set()
        for reference in answered:
            try:
                ray.get(reference)
            except DEATHS:
                dead.add(pings[reference])
        return dead

    def put(self, value: Any) -> Handle:
        with explained():
            return ray.put(value)

    def value_of(self, handle: Handle) -> Any:
        try:
            with explained():
                return ray.get(handle)
        except DEATHS as error:
            raise StateLost(str(error)) from None

    def replace(self, lost: HostLost) -> str:
        gone = defaultdict[Any, list[int]](list)  # by the actor, the hosts that it was
        for i in sorted(lost.hosts):
            gone[self._actors[i]].append(i)
        for actor in gone:
            ray.kill(actor)  # one that could not be reached may be alive
            self._monitor.drop(_id(actor))
        others = [i for i, actor in enumerate(self._actors) if actor not in gone]
        # Those that died with them, for instance with their node, are reported later, one by one.
        dead = self._dead(others)
        living = {self._actors[i]: self.nodes[i] for i in others if i not in dead}
        then = "another was started"
        for hosts in gone.values():
            node = self.nodes[hosts[0]]
            neighbours = {actor: there for actor, there in living.items() if there == node}
            if lost.out_of_memory and neighbours:  # one process fewer: fewer clients at a time
                instead = neighbours
                then = "the other actors of its node do its work"
            elif started := self._started(node, sure=not living):
                instead = dict([started])
                living |= instead
            elif living:
                instead = living
                then = "no capacity for a replacement; the remaining actors take over"
            else:
                raise MachineFailure("all client actors died, and the cluster has no capacity for new ones")
            for i in hosts:
                self._actors[i] = min(instead, key=self._actors.count)  # who does the work of fewest
                self.nodes[i] = instead[self._actors[i]]
        return then

    def _started(self, first: str, sure: bool) -> tuple[Any, str] | None:
        """A new actor that is ready, and its node: this one, or another that has room for it. One that is `sure` is taken
        though its GPU seems too full: there is no other."""
        node = self._node_with_room(first)
        if node is None:
            return None
        [(actor, ready)] = self._new_hosts([node])
        if ray.wait([ready], timeout=START_SECONDS)[0]:
            with suppress(*DEATHS):
                ray.get(ready)
                if sure or self._gpu_of(actor)[1]:
                    return actor, node
        ray.kill(actor)
        return None

    def _gpu_of(self, actor: Any) -> tuple[str, bool]:
        """The GPU of an actor that has just started, and whether that has the memory for it; the others there hold theirs
        already."""
        if not self.placement.gpus:
            return "", True  # `room` has looked at the machine's
        gpu, free = ray.get(actor.gpu.remote())
        needed = GPU_BYTES + self.training_bytes + self.update_bytes / len(set(self._actors))
        return gpu, free * MEMORY_SHARE >= needed

    def grow(self) -> None:
        if self.pace.seconds and not self._measured:
            self._measure()
        joined = set[tuple[str, str]]()  # nodes and GPUs
        for ready in ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)[0] if self._coming else ():
            actor, node = self._coming.pop(ready)
            with suppress(*DEATHS):
                ray.get(ready)
                gpu, has_memory = self._gpu_of(actor)
                if gpu and (node, gpu) in joined:  # whose memory is taken when it trains: it is looked at after that
                    self._coming[ready] = actor, node
                    continue
                if has_memory:
                    joined.add((node, gpu))
                    self._actors.append(actor)
                    self.nodes.append(node)
                    message = f"an actor has joined on node {node}"
                else:
                    ray.kill(actor)
                    self._full.add(node)
                    message = f"an actor could not join on node {node}: its GPU has too little memory free"
                self.events.append(Event("actor", message, node=node))
        missing = self.most - len(self._actors) - len(self._coming)
        found = (
            [node for node in room(free_resources(), self.placement) if node not in self._full] if missing > 0 else []
        )
        for node, (actor, ready) in zip(found[:missing], self._new_hosts(found[:missing]), strict=True):
            self._coming[ready] = actor, node

    def _measure(self) -> None:
        """What the first clients took of memory counts for later actors, where it is clearly more than was worked out."""
        self._measured = True
        calls = [Call(i, "most_memory", ()) for i in range(len(self._actors))]
        most = max(self.retry_after_loss(lambda: self.ask(calls))) - self.update_bytes / len(set(self._actors))
        planned = GPU_BYTES + self.training_bytes if self.placement.gpus else self.placement.memory
        if most > 1.1 * planned:
            self.training_bytes += int(most - planned)
            if not self.placement.gpus:
                self.placement = replace(self.placement, memory=most)
            message = f"an actor took {most / 2**30:.1f} GiB of memory, and {planned / 2**30:.1f} were planned"
            self.events.append(Event("actor", f"{message}: new actors will reserve that much"))

    def _node_with_room(self, first: str) -> str | None:
        clock = self.spec.clock
        deadline = clock.now() + ROOM_SECONDS
        while clock.now() < deadline:
            fitting = room(self.pool.free(free_resources()) if self.pool else free_resources(), self.placement)
            if fitting:
                return first if first in fitting else fitting[0]
            clock.sleep(0.1)
        return None

    def close(self) -> None:
        for actor, _ in self._coming.values():
            ray.kill(actor)
        if self.most:
            request_resources(bundles=[])  # this run needs none any more
        for actor, node in dict(zip(self._actors, self.nodes, strict=True)).items():
            self._monitor.drop(_id(actor))
            if self.pool:
                self.pool.give(node, actor, self.placement.cpus, self.placement.gpus)
            else:
                ray.kill(actor)


def _shown(method: str, request: TrainRequest) -> str:
    """What Ray's dashboard calls a work unit: train clients 3–9, round 5."""
    first, last = request.clients[0], request.clients[-1]
    who = f"client {first}" if first == last else f"clients {first}–{last}"
    return f"{method} {who}, round {request.round_info.t + 1}"


def _id(actor: Any) -> str:
    """Of an actor, as errors name it."""
    name: str = actor._actor_id.hex()
    return name


def ray_engine(
    config: Config, spec: HostSpec, data: Dataset, partition: Partition, cohort: int,
    resources: Resources | None = None, pool: Pool | None = None, references: tuple[Any, Any] | None = None,
) -> Engine:  # fmt: skip
    """The engine of `config` on `resources` (default: what the cluster has free), with hosts of `pool` first.
    `references` are to data and partition, where those are in the object store.

    Raises `PlacementError` for what does not fit, and `MachineFailure` where an actor cannot start.
    """
    settings = config.engine.ray
    assert settings
    if resources is None:
        resources = pool.free(free_resources()) if pool else free_resources()
    model, layers = spec.network()
    training = training_bytes(spec, model, int(partition.sizes.max()))
    placement = place(
        resources, cohort, settings.clients_per_actor, settings.gpu_per_client, settings.threads, 4 * layers.S,
        training_bytes=training, together=settings.batch_clients,
    )  # fmt: skip
    if not placement.gpus and (problem := needs_gpu(spec.settings.precision, spec.cuda_graphs)):
        raise PlacementError(problem)
    wanted = actors(cohort, settings.clients_per_actor, settings.batch_clients)
    timeout = None if settings.client_timeout == "auto" else settings.client_timeout
    return RayEngine(
        spec, data, partition, settings.fan_in, settings.gather_bytes, placement=placement, pool=pool,
        references=references, client_timeout=timeout, most=wanted if settings.elastic else 0,
        training_bytes=training, update_bytes=cohort * 4 * layers.S,
        # The other half of the object stores is for what travels. Between checkpoints Ray spills what is too much.
        state_bytes=int(ray.cluster_resources()["object_store_memory"]) // 2,
    )  # fmt: skip
