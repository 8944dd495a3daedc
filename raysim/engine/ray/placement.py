"""How many host actors a cluster carries, and what each of them reserves. Says early, in a sentence, what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

HOST_BYTES = 600 << 20  # private memory of an actor with torch loaded, before any model


class PlacementError(RuntimeError):
    """What was asked, what the cluster has, and which setting to turn."""


@dataclass(frozen=True)
class Resources:
    """What a cluster has free for hosts."""

    cpus: float
    gpus: float
    memory: float  # bytes


@dataclass(frozen=True)
class Placement:
    """`hosts` actors, each reserving a share of the CPUs and GPUs."""

    hosts: int
    cpus: float
    gpus: float


def place(
    resources: Resources, cohort: int, clients_per_actor: int | str, gpu_per_client: float | str, threads: int,
    model_bytes: int,
) -> Placement:  # fmt: skip
    """Placement of a cohort of `cohort` clients. A host keeps the updates of its clients: `model_bytes` for each.

    Raises `PlacementError`.
    """
    if clients_per_actor == "auto":
        hosts = int(max(1, min(cohort, resources.cpus // threads)))
        if isinstance(gpu_per_client, float | int) and 0 < gpu_per_client <= 1:
            hosts = min(hosts, max(1, room(resources, gpu_per_client)))
        affordable = int((resources.memory * 0.8 - cohort * model_bytes) // HOST_BYTES)
        if affordable < 1:
            raise PlacementError(
                f"{cohort} clients a round need {cohort * model_bytes / 2**30:.1f} GiB for their updates, but the cluster has "
                f"{resources.memory / 2**30:.1f} GiB of memory; lower rounds.participation or take a smaller model"
            )
        hosts = min(hosts, affordable)
    else:
        hosts = -(-cohort // int(clients_per_actor))
        needed = hosts * HOST_BYTES + cohort * model_bytes
        if needed > resources.memory:
            raise PlacementError(
                f"engine.ray.clients_per_actor: {clients_per_actor} makes {hosts} actors for {cohort} clients, about "
                f"{needed / 2**30:.1f} GiB, but the cluster has {resources.memory / 2**30:.1f} GiB of memory; raise it, or say auto"
            )
    if gpu_per_client == "auto":
        # No actor spans GPUs: the GPU with most of them sets the share.
        whole = int(resources.gpus)
        gpus = 1 / -(-hosts // whole) if whole else resources.gpus / hosts
    else:
        gpus = float(gpu_per_client)
        if gpus > 1:
            raise PlacementError(f"engine.ray.gpu_per_client is {gpus:g}, but a client trains on one GPU; at most 1")
        if gpus and hosts > room(resources, gpus):
            raise PlacementError(
                f"engine.ray.gpu_per_client: {gpus:g} for {hosts} actors asks for {hosts * gpus:g} GPUs, but the cluster has "
                f"{resources.gpus:g}; lower it, raise engine.ray.clients_per_actor, or say auto"
            )
    return Placement(hosts, min(float(threads), resources.cpus / hosts), gpus)


def room(resources: Resources, gpus: float) -> int:
    """Actors that find `gpus`, at most 1, on one GPU."""
    return int(resources.gpus) * int(1 / gpus + 1e-9)
