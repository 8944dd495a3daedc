"""A host as an actor."""

from __future__ import annotations

from typing import Any

import ray

from raysim.data import Dataset, Partition
from raysim.host.host import ClientHost
from raysim.host.messages import HostSpec, TrainRequest


class HostActor(ClientHost):
    """A `ClientHost` in a process of its own; with `become` for `__init__`, because a process can serve many runs."""

    def __init__(self) -> None:
        self.t = -1

    def become(self, spec: HostSpec, data: Dataset, partition: Partition) -> str:
        """Be a host of this run, whatever the process was before; returns the node it is on."""
        super().__init__(spec, data, partition)
        return ray.get_runtime_context().get_node_id()

    def train_detached(self, request: TrainRequest, *args: Any) -> list[Any]:
        """`train`, with the reply as objects that travel one by one: states, models and traces stay in Ray's store."""
        return self.train(request, *args).detach(request)

    def initialize_detached(self, request: TrainRequest, *args: Any) -> list[Any]:
        """`initialize`, with the reply as objects that travel one by one."""
        return self.initialize(request, *args).detach(request)

    def forget(self) -> None:
        """Free all that the last run has left here."""
        self.__dict__.clear()


def new_actor(cpus: float, gpus: float) -> Any:
    """A `HostActor` that reserves this share, as soon as the cluster has room for it."""
    return ray.remote(HostActor).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy="SPREAD").remote()
