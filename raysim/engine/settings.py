"""The settings of each engine, which make it. The string below a field is its description."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from raysim.core.bounds import NonNegative, NonNegativeInt, PositiveInt
from raysim.lazy import torch
from raysim.registry import REGISTRY, Table

if TYPE_CHECKING:
    from raysim.config import Config
    from raysim.data import Dataset, Partition
    from raysim.engine.base import Engine
    from raysim.host.messages import HostSpec


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine. An engine from outside raysim is a subclass with `make`, registered as an `engine`."""

    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """Threads of one PyTorch operation. Part of the result's bits, so never measured, always set."""
    gather_bytes: NonNegativeInt = 2 << 30
    """Bytes of client models that one process may hold at once. Where they are more, FedLAW learns its weights with the
    models left where they were trained, which is slower and gives the same result to rounding."""
    batch_clients: PositiveInt = 1
    """Clients of a round that train together on one device: consecutive ones of the sorted cohort, one pass over all their
    models a step. For small models on GPUs, which wait for launches; on CPUs 1 is as fast or faster. Part of the result's
    bits, which differ from those of 1 by rounding. Methods that cannot do it, and models with dropout, train one by one: the
    run says so."""
    tape: Literal["auto", "always", "never"] = "auto"
    """Whether a training step is recorded once and then repeated without autograd. Its bits are the same, and small models take a
    quarter less time. `auto`: where model, loss and penalties are code of PyTorch, torchvision and raysim. `always`: yours too,
    which must run the same operators in every step: what depends on values is found, and trains as before; a counter or a
    number of Python's `random` is not found."""
    fast_math: bool = False
    """Let recorded steps round otherwise than the optimiser as written: where a step on a CPU does nothing with the gradient but to
    subtract it (no momentum, decay, clipping or correction), it is subtracted as it is computed. Part of the result's bits.
    Methods of your own cannot ask for `run.model` then."""

    cuda_graphs: bool = False
    """Capture recorded steps on a GPU as CUDA graphs: one launch runs the whole pass. For small models, which wait for launches;
    the bits stay the same. It takes memory for each form of a batch. Steps that are not recorded train as without, and `events`
    says so; one that cannot be captured ends the run. Not tried on a GPU yet."""

    def make(self, config: Config, spec: HostSpec, data: Dataset, partition: Partition, cohort: int) -> Engine:
        """The engine that trains up to `cohort` clients a round, each host made from `spec`."""
        raise NotImplementedError

    @property
    def ray(self) -> RayEngineConfig | None:
        """The settings of an engine whose hosts are actors of a Ray cluster."""
        return None

    def only_cpus(self) -> bool:
        """Whether the settings or, in this process, the machine says so. A cluster knows when its actors are placed."""
        return getattr(self, "device", "auto") == "cpu" or not torch.cuda.is_available()


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig(EngineConfig):
    """All clients one after another in this process: nothing is started, handy for debugging."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the first visible GPU, or the CPU where there is none."""
    state_bytes: NonNegativeInt = 4 << 30
    """Bytes of client states and peers' models held in memory between rounds. The rest lies in the last checkpoint, or,
    where it is newer than that, in temporary files."""

    def make(self, config: Config, spec: HostSpec, data: Dataset, partition: Partition, cohort: int) -> Engine:
        from raysim.engine.local import LocalEngine

        return LocalEngine(
            replace(spec, device=self.device), data, partition,
            gather_bytes=self.gather_bytes, state_bytes=self.state_bytes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RayEngineConfig(EngineConfig):
    """Clients as Ray actors, on this machine or a cluster. Client states and peers' models lie in Ray's object store, of
    which they fill half at most; the rest lies in the last checkpoint. What is newer than that, Ray spills to disk."""

    clients_per_actor: Literal["auto"] | PositiveInt = "auto"
    """Clients of a round that share an actor. 1: each has its own; `auto`: as many as the cluster carries."""
    gpu_per_client: Literal["auto"] | NonNegative = "auto"
    """Fraction of one GPU that an actor reserves for a client; 0 trains on CPUs."""
    client_timeout: Literal["auto"] | Annotated[float, Field(gt=0, le=1e9)] = "auto"
    """Seconds for a client's training, or for a batch of other work, after which an actor is taken to hang and is replaced;
    `auto`: 20 times the median client, at least 300."""
    elastic: bool = False
    """Ask a cluster that can grow for what every actor needs, and start actors on what becomes free during the run."""
    dashboard: bool = False
    """Show Ray's dashboard of a cluster that raysim starts, where every actor and what it does is listed."""
    fan_in: Annotated[int, Field(ge=2)] = 4
    """Partial sums that one node of the aggregation tree adds. Never changes the result."""
    state_bytes: Annotated[int, Field(ge=75 << 20)] | None = None
    """Memory of the object store of a cluster that raysim starts, for client states, peers' models and messages; null:
    30 % of the machine's. A cluster that raysim joins has its own."""

    @property
    def ray(self) -> RayEngineConfig:
        return self

    def only_cpus(self) -> bool:
        return self.gpu_per_client == 0

    def make(self, config: Config, spec: HostSpec, data: Dataset, partition: Partition, cohort: int) -> Engine:
        from raysim.engine.ray.engine import ray_engine

        return ray_engine(config, spec, data, partition, cohort)


ENGINES: Table[type[EngineConfig]] = REGISTRY.table("engine").fill({"local": LocalEngineConfig, "ray": RayEngineConfig})
