"""A host as an actor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from inspect import isfunction
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim import machine
from raysim.core.failures import breaks_device
from raysim.data import Dataset, Partition
from raysim.engine.ray.heartbeat import Heartbeat
from raysim.host.host import ClientHost
from raysim.host.messages import HostSpec, TrainRequest
from raysim.lazy import torch


class HostActor(ClientHost):
    """A `ClientHost` in a process of its own; with `setup` for `__init__`, because a process can serve many runs."""

    def __init__(self) -> None:
        self.t = -1
        self._heartbeat = Heartbeat(str(ray.get_runtime_context().get_actor_id()))

    def __repr__(self) -> str:
        """What Ray's dashboard and logs call it."""
        return f"Host[{ray.get_runtime_context().get_node_id()[:8]}]"

    def setup(self, spec: HostSpec, data: Dataset, partition: Partition, sign_every: float, here: Path) -> str:
        """Be a host of this run, whatever the process was before, with a sign of life at least `sign_every` seconds, and
        with relative paths beginning `here`, where there is such a folder; returns the node it is on."""
        with suppress(OSError):
            os.chdir(here)
        super().__init__(spec, data, partition)
        self._heartbeat.send_every(sign_every)
        self.trainer.before_client = self._heartbeat.beat
        self.flat.model.register_forward_pre_hook(self._heartbeat.batch)
        self._held = 0 if self.device.type == "cuda" else machine.private_memory()
        self._peak_before = self._peak()  # of the process, which may have served another run
        return ray.get_runtime_context().get_node_id()

    def gpu(self) -> tuple[str, float]:
        """Which GPU of its node it has a share of, and how many bytes that one has free; no limit where it computes on its
        CPU nevertheless, because its PyTorch knows no GPUs."""
        [gpu] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return gpu, torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else math.inf

    def most_memory(self) -> int:
        """Bytes of its GPU's memory that this run has taken at most, or of the machine's, with what the process had before."""
        return self._held + self._peak() - self._peak_before

    def _peak(self) -> int:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_reserved(self.device) if on_gpu else machine.most_resident()

    def train_detached(self, request: TrainRequest, *args: Any) -> list[Any]:
        """`train`, with the reply as objects that travel one by one: states, models and traces stay in Ray's store."""
        with self._heartbeat.by_client():
            return self.train(request, *args).detach(request)

    def initialize_detached(self, request: TrainRequest, *args: Any) -> list[Any]:
        """`initialize`, with the reply as objects that travel one by one."""
        with self._heartbeat.by_client():
            return self.initialize(request, *args).detach(request)

    def reset(self) -> None:
        """Free all that the last run has left here."""
        heartbeat = self._heartbeat
        self.__dict__.clear()
        self._heartbeat = heartbeat


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which shows that it is at work, and ends the process when its device breaks: nothing can be done here
    any more, in a new one it may."""

    @wraps(method)
    def call(self: HostActor, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._heartbeat.at_work():
                return method(self, *args, **kwargs)
        except Exception as error:
            if breaks_device(error):
                ray.actor.exit_actor()
            raise

    return call


for _name, _method in vars(ClientHost).items():
    if isfunction(_method) and not _name.startswith("_"):
        setattr(HostActor, _name, _watched(_method))


def new_actor(node: str, cpus: float, gpus: float) -> Any:
    """A `HostActor` that reserves this share of a node, as soon as that has room for it."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(HostActor).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=there).remote()
