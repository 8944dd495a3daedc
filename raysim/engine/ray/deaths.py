"""What each of Ray's exceptions means for a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from ray import exceptions as rays

from raysim.engine.base import MachineFailure

# An actor, its node or what it held is gone: another does its work again.
DEATHS = (
    rays.RayActorError, rays.ActorDiedError, rays.ActorUnavailableError, rays.ActorUnschedulableError,
    rays.WorkerCrashedError, rays.NodeDiedError, rays.OutOfMemoryError, rays.ObjectLostError,
    rays.ObjectFetchTimedOutError, rays.OwnerDiedError, rays.ObjectReconstructionFailedError, rays.ObjectFreedError,
    rays.ReferenceCountingAssertionError,
)  # fmt: skip
# No machine holds what has to be stored: the run stops, and says what is full.
FULL = (rays.ObjectStoreFullError, rays.OutOfDiskError)
# Ray itself has failed, mostly because one of its processes is gone: the run stops.
BROKEN = (
    rays.RaySystemError, rays.LocalRayletDiedError, rays.RpcError, rays.RayChannelError, rays.RayChannelTimeoutError,
    rays.RayCgraphCapacityExceeded, rays.RayDirectTransportError, rays.StreamingGeneratorReplayInconsistentError,
)  # fmt: skip
# The cluster, as it is set up, takes no run: the run stops.
REFUSALS = (rays.AuthenticationError, rays.RuntimeEnvSetupError)
# An error of code that an actor ran. It is raised as what it was there.
CODE = (rays.RayTaskError, rays.UserCodeException, rays.UnserializableException)
# Not there yet: raysim asks again.
PENDING = (rays.GetTimeoutError,)
# Nothing that raysim does raises them: a bug, which keeps its traceback.
UNEXPECTED = (
    rays.RayError, rays.ActorAlreadyExistsError, rays.ActorHandleNotFoundError, rays.ActorPlacementGroupRemoved,
    rays.AsyncioActorExit, rays.CrossLanguageError, rays.ObjectRefStreamEndOfStreamError,
    rays.OufOfBandObjectRefSerializationException, rays.PendingCallsLimitExceeded, rays.PlasmaObjectNotAvailable,
    rays.TaskCancelledError, rays.TaskPlacementGroupRemoved, rays.TaskUnschedulableError,
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
        memory = isinstance(error, rays.OutOfMemoryError) or "low on memory" in text or "memory pressure" in text
        if memory:
            why = "its node ran out of memory"
        elif isinstance(error, rays.NodeDiedError | rays.ActorUnschedulableError) or "its node has died" in text:
            why = "its node is gone"
        elif isinstance(error, rays.ActorUnavailableError):
            why = "it could not be reached"
        elif isinstance(error, rays.ObjectLostError):
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


def _sentence(error: rays.RayError) -> str:
    """What is wrong, and the way out."""
    if isinstance(error, rays.ObjectStoreFullError):
        return (
            "Ray's object store is full, and what it holds is in use. Raise engine.ray.state_bytes (on a cluster that is "
            "joined: the object store of its nodes), or lower rounds.participation"
        )
    if isinstance(error, rays.OutOfDiskError):
        return (
            "Ray's object store is full, and so is the disk of a node to which it spills (Ray uses 95 % of one). Free some "
            "space there, set RAY_TMPDIR to a folder on another disk, or raise engine.ray.state_bytes"
        )
    said = " ".join(str(error).splitlines()[0].split()) if str(error) else type(error).__name__
    if isinstance(error, REFUSALS):
        return f"the Ray cluster refuses the run: {said}"
    return f"Ray has failed: {said}. If it does so again, end the cluster, and start another"
