"""Idle host actors, for the runs that follow."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from raysim.config import Config, RayEngineConfig
from raysim.engine.ray.actors import new_actor
from raysim.engine.ray.placement import PlacementError, Resources, place


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
            self._idle = [new_actor(*self._share) for _ in range(placement.hosts)]

    def clear(self) -> None:
        """Stop the idle actors."""
        while self._idle:
            ray.kill(self._idle.pop())
