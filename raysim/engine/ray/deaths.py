"""The ways in which Ray reports that an actor, a worker or a node is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

DEATHS = (
    RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, ActorUnschedulableError, ObjectLostError
)  # fmt: skip


@dataclass(frozen=True)
class Death:
    """What an error of `DEATHS` says."""

    why: str  # a clause
    actor_id: str | None  # hexadecimal; None where the error does not say
    out_of_memory: bool

    @classmethod
    def of(cls, error: BaseException) -> Self:
        text = str(error)
        # Ray's memory monitor shows as an error of its own, or inside that of a dead actor.
        memory = isinstance(error, OutOfMemoryError) or "low on memory" in text or "memory pressure" in text
        if memory:
            why = "its node ran out of memory"
        elif isinstance(error, NodeDiedError | ActorUnschedulableError) or "its node has died" in text:
            why = "its node is gone"
        elif isinstance(error, ActorUnavailableError):
            why = "it could not be reached"
        elif isinstance(error, ObjectLostError):
            why = "what it held is lost"
        else:
            why = "its process ended"
        return cls(why, getattr(error, "actor_id", None), memory)
