"""How many host actors a cluster carries, where, and what each of them reserves. Says early, in a sentence, what does not fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from raysim.errors import Explained

HOST_BYTES = 600 << 20  # private memory of an actor with torch loaded, before any model
GPU_BYTES = 256 << 20  # of a GPU's memory for an actor, before any model: samples at hand, the libraries' workspaces
MEMORY_SHARE = 0.8  # of what is free is planned
# Actors a GPU that are chosen: small models leave a GPU idle between launches, but more than that never pay.
GPU_HOSTS = 8
_EPS = 1e-9


class PlacementError(Explained, RuntimeError):
    """What was asked, what the cluster has, and which setting to turn."""


@dataclass(frozen=True)
class Node:
    """A machine, and what it has free for hosts."""

    id: str
    cpus: float
    gpus: float = 0.0  # 1.5: one is free and half of another
    memory: float = float("inf")  # bytes

    def slots(self, gpus: float) -> int:
        """Actors that find `gpus`, at most 1, on one GPU of this node."""
        whole = int(self.gpus + _EPS)
        return whole * int(1 / gpus + _EPS) + int((self.gpus - whole) / gpus + _EPS)

    def gpu_share(self, hosts: int) -> float:
        """The greatest share of a GPU that each of `hosts` actors can have here."""
        whole = int(self.gpus + _EPS)
        free = [1.0] * bool(whole) + [self.gpus - whole] * (self.gpus - whole > _EPS)
        return max(part / n for part in free for n in range(1, hosts + 1) if self.slots(part / n) >= hosts)

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPUs" if self.gpus else ""
        return f"node {self.id[:12]} ({self.cpus:g} CPUs{gpus} free)"


@dataclass(frozen=True)
class Resources:
    """What a cluster has free for hosts."""

    nodes: tuple[Node, ...]

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)

    @property
    def memory(self) -> float:
        """Bytes."""
        return sum(node.memory for node in self.nodes)

    def __str__(self) -> str:
        return ", ".join(map(str, self.nodes)) or "no node"


@dataclass(frozen=True)
class Placement:
    """The node of every host actor, the share of its CPUs and of a GPU that each reserves, and the memory that it needs."""

    nodes: tuple[str, ...]
    cpus: float
    gpus: float
    memory: float = HOST_BYTES  # bytes of its node's
    note: str = ""  # what is less than was asked

    @property
    def hosts(self) -> int:
        return len(self.nodes)


def room(resources: Resources, like: Placement) -> list[str]:
    """The nodes on which further actors fit that reserve as much as those of a placement; each as often as there is room."""
    found = []
    for node in resources.nodes:
        slots = min((node.cpus + 1e-3) // like.cpus, node.memory * MEMORY_SHARE // like.memory)
        found += [node.id] * int(min(slots, node.slots(like.gpus)) if like.gpus else slots)
    return found


def actors(cohort: int, clients_per_actor: int | str, together: int) -> int:
    """How many actors a cohort can use where so many of its clients train `together`."""
    groups = -(-cohort // together)
    return groups if clients_per_actor == "auto" else min(groups, -(-cohort // int(clients_per_actor)))


def place(
    resources: Resources, cohort: int, clients_per_actor: int | str, gpu_per_client: float | str, threads: int,
    model_bytes: int, *, training_bytes: int = 0, together: int = 1,
) -> Placement:  # fmt: skip
    """Placement of a cohort of `cohort` clients. A host keeps the updates of its clients, `model_bytes` for each, and needs
    `training_bytes` more while one trains, or so many clients `together`.

    All hosts train on the same kind of device, because bits differ between kinds. Where fewer actors fit than were asked
    for, there are fewer, and the note says so. Raises `PlacementError` where none fits.
    """
    auto, share = clients_per_actor == "auto", None if gpu_per_client == "auto" else float(gpu_per_client)
    if share is not None and share > 1:
        raise PlacementError(f"engine.ray.gpu_per_client is {share:g}, but a client trains on one GPU; at most 1")
    on_gpu = resources.gpus > 0 if share is None else share > 0
    nodes = [node for node in resources.nodes if node.cpus > 0 and (node.gpus > 0 or not on_gpu)]
    memory = sum(node.memory for node in nodes)
    of_host = HOST_BYTES + (0 if on_gpu else training_bytes)
    affordable = (memory * MEMORY_SHARE - cohort * model_bytes) // HOST_BYTES
    if nodes and affordable < 1:
        raise PlacementError(
            f"{cohort} clients a round need {cohort * model_bytes / 2**30:.1f} GiB for their updates, but the cluster has "
            f"{memory / 2**30:.1f} GiB of memory; lower rounds.participation or take a smaller model"
        )

    def fits(node: Node, hosts: int) -> bool:
        needed = HOST_BYTES if hosts == 1 else hosts * of_host  # one is tried: what training takes is estimated
        if needed > node.memory * MEMORY_SHARE or (share and node.slots(share) < hosts):
            return False
        if on_gpu and auto and share is None and hosts > GPU_HOSTS * node.gpus:
            return False
        return not auto or node.cpus >= hosts * threads or not placed  # one actor may do with fewer CPUs

    def preference(node: Node) -> tuple[float, ...]:
        """The next actor goes where it gets most of what it can use; then to the node with the fewest."""
        hosts = placed[node.id]
        share = min(1.0, node.gpus / (hosts + 1)) if on_gpu else min(float(threads), node.cpus / (hosts + 1))
        return share, -hosts, node.cpus

    wanted = actors(cohort, clients_per_actor, together)
    placed: Counter[str] = Counter()
    while placed.total() < min(wanted, affordable):
        open_to_more = [node for node in nodes if fits(node, placed[node.id] + 1)]
        if not open_to_more:
            break
        placed[max(open_to_more, key=preference).id] += 1
    used = [node for node in nodes if placed[node.id]]
    if not used:
        need = f"{threads} CPUs" + (f" and {share:g} of a GPU" if share else "")
        raise PlacementError(
            f"engine.ray: no actor finds {need} and {HOST_BYTES / 2**30:.1f} GiB of memory. The cluster has {resources}. "
            "Lower engine.ray.threads or engine.ray.gpu_per_client, or wait until others have ended"
        )
    cpus = min(float(threads), min(node.cpus / placed[node.id] for node in used))
    gpus = share or 0.0 if share is not None or not on_gpu else min(n.gpu_share(placed[n.id]) for n in used)
    note = "" if auto or placed.total() == wanted else (
        f"engine.ray.clients_per_actor: {clients_per_actor} asks for {wanted} actors, but {placed.total()} fit: "
        f"{resources}. Each trains more clients"
    )  # fmt: skip
    return Placement(tuple(node.id for node in used for _ in range(placed[node.id])), cpus, gpus, of_host, note)
