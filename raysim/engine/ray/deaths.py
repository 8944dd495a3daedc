"""What each of Ray's exceptions means for a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from ray.exceptions import (
    ActorAlreadyExistsError,
    ActorDiedError,
    ActorHandleNotFoundError,
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    AsyncioActorExit,
    AuthenticationError,
    CrossLanguageError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectFetchTimedOutError,
    ObjectFreedError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    ObjectRefStreamEndOfStreamError,
    ObjectStoreFullError,
    OufOfBandObjectRefSerializationException,
    OutOfDiskError,
    OutOfMemoryError,
    OwnerDiedError,
    PendingCallsLimitExceeded,
    PlasmaObjectNotAvailable,
    RayActorError,
    RayCgraphCapacityExceeded,
    RayChannelError,
    RayChannelTimeoutError,
    RayDirectTransportError,
    RayError,
    RaySystemError,
    RayTaskError,
    ReferenceCountingAssertionError,
    RpcError,
    RuntimeEnvSetupError,
    StreamingGeneratorReplayInconsistentError,
    TaskCancelledError,
    TaskPlacementGroupRemoved,
    TaskUnschedulableError,
    UnserializableException,
    UserCodeException,
    WorkerCrashedError,
)

from raysim.engine.base import MachineFailure

# An actor, its node or what it held is gone: another does its work again.
DEATHS = (
    RayActorError, ActorDiedError, ActorUnavailableError, ActorUnschedulableError, WorkerCrashedError, NodeDiedError,
    OutOfMemoryError, ObjectLostError, ObjectFetchTimedOutError, OwnerDiedError, ObjectReconstructionFailedError,
    ObjectFreedError, ReferenceCountingAssertionError,
)  # fmt: skip
# No machine holds what has to be stored: the run stops, and says what is full.
FULL = (ObjectStoreFullError, OutOfDiskError)
# Ray itself has failed, mostly because one of its processes is gone: the run stops.
BROKEN = (
    RaySystemError, LocalRayletDiedError, RpcError, RayChannelError, RayChannelTimeoutError, RayCgraphCapacityExceeded,
    RayDirectTransportError, StreamingGeneratorReplayInconsistentError,
)  # fmt: skip
# The cluster, as it is set up, takes no run: the run stops.
REFUSALS = (AuthenticationError, RuntimeEnvSetupError)
# An error of code that an actor ran. It is raised as what it was there.
CODE = (RayTaskError, UserCodeException, UnserializableException)
# Not there yet: raysim asks again.
PENDING = (GetTimeoutError,)
# Nothing that raysim does raises them: a bug, which keeps its traceback.
UNEXPECTED = (
    RayError, ActorAlreadyExistsError, ActorHandleNotFoundError, ActorPlacementGroupRemoved, AsyncioActorExit,
    CrossLanguageError, ObjectRefStreamEndOfStreamError, OufOfBandObjectRefSerializationException,
    PendingCallsLimitExceeded, PlasmaObjectNotAvailable, TaskCancelledError, TaskPlacementGroupRemoved,
    TaskUnschedulableError,
)  # fmt: skip
KINDS = (DEATHS, FULL, BROKEN, REFUSALS, CODE, PENDING, UNEXPECTED)


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


@contextmanager
def explained() -> Iterator[None]:
    """Raises `MachineFailure` where Ray raises an error of `FULL`, `BROKEN` or `REFUSALS`."""
    try:
        yield
    except (*FULL, *BROKEN, *REFUSALS) as error:
        raise MachineFailure(_sentence(error)) from None


def _sentence(error: RayError) -> str:
    """What is wrong, and the way out."""
    if isinstance(error, ObjectStoreFullError):
        return (
            "Ray's object store is full, and what it holds is in use. Raise engine.ray.state_bytes (on a cluster that is "
            "joined: the object store of its nodes), or lower rounds.participation"
        )
    if isinstance(error, OutOfDiskError):
        return (
            "Ray's object store is full, and so is the disk of a node to which it spills (Ray uses 95 % of one). Free some "
            "space there, set RAY_TMPDIR to a folder on another disk, or raise engine.ray.state_bytes"
        )
    said = " ".join(str(error).splitlines()[0].split()) if str(error) else type(error).__name__
    if isinstance(error, REFUSALS):
        return f"the Ray cluster refuses the run: {said}"
    return f"Ray has failed: {said}. If it does so again, end the cluster, and start another"
