"""Idle host actors, for the runs that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from raysim.engine.ray.actors import new_actor
from raysim.engine.ray.deaths import DEATHS
from raysim.engine.ray.placement import PlacementError, Resources, place

if TYPE_CHECKING:
    from raysim.engine.settings import RayEngineConfig

PING_SECONDS = 10  # a living actor that does not answer by then is at work, or starts


class Pool:
    """Idle host actors. To start a process costs seconds, to make it a host of the next run milliseconds."""

    def __init__(self) -> None:
        self._share = (0.0, 0.0)  # CPUs and GPUs of each
        self._idle: list[tuple[str, Any]] = []  # node and actor

    def free(self, resources: Resources) -> Resources:
        """What the cluster has free when it counts the pool's actors as such."""
        (cpus, gpus), idle = self._share, Counter(node for node, _ in self._idle)
        nodes = (replace(n, cpus=n.cpus + idle[n.id] * cpus, gpus=n.gpus + idle[n.id] * gpus) for n in resources.nodes)
        return Resources(tuple(nodes))

    def take(self, nodes: Sequence[str], cpus: float, gpus: float) -> list[Any]:
        """For each node an actor that reserves this share of it and is not known to be dead, or None. Actors of another
        share make room."""
        if self._share != (cpus, gpus):
            self.clear()
        taken = [self._pop(node) for node in nodes]
        asked = {actor.reset.remote(): i for i, actor in enumerate(taken) if actor}
        for reference in ray.wait(list(asked), num_returns=len(asked), timeout=PING_SECONDS)[0]:
            try:
                ray.get(reference)
            except DEATHS:
                ray.kill(taken[asked[reference]])
                taken[asked[reference]] = None
        return taken

    def _pop(self, node: str) -> Any:
        """An idle actor on the node, or None."""
        entry = next((entry for entry in self._idle if entry[0] == node), None)
        if entry is None:
            return None
        self._idle.remove(entry)
        return entry[1]

    def give(self, node: str, actor: Any, cpus: float, gpus: float) -> None:
        """Keep an actor that no run needs any more."""
        if self._share != (cpus, gpus):
            self.clear()
        self._share = (cpus, gpus)
        actor.reset.remote()
        self._idle.append((node, actor))

    def warm(self, settings: RayEngineConfig, cohort: int | None, resources: Resources) -> None:
        """Start the processes that a run will most likely take; raises nothing, it is only a guess. `cohort` are the clients
        of a round, where they are known."""
        with suppress(PlacementError):
            placement = place(
                resources, cohort or 1 << 20, settings.clients_per_actor, settings.gpu_per_client, settings.threads, 0,
                together=settings.batch_clients,
            )  # fmt: skip
            self._share = placement.cpus, placement.gpus
            self._idle = [(node, new_actor(node, *self._share)) for node in placement.nodes]

    def clear(self) -> None:
        """Stop the idle actors."""
        while self._idle:
            ray.kill(self._idle.pop()[1])
