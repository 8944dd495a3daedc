"""A host as an actor."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.core.failures import breaks_device
from raysim.data import Dataset, Partition
from raysim.engine.ray.heartbeat import Heartbeat
from raysim.host.host import ClientHost
from raysim.host.messages import HostSpec, TrainReply, TrainRequest
from raysim.lazy import torch


class HostActor:
    """A process that is the host of a run; of one after the other, because to start a process takes longest."""

    host: ClientHost  # while there is a run

    def __init__(self) -> None:
        self._heartbeat = Heartbeat(str(ray.get_runtime_context().get_actor_id()))

    def __repr__(self) -> str:
        """What Ray's dashboard and logs call it."""
        return f"Host[{ray.get_runtime_context().get_node_id()[:8]}]"

    def setup(self, spec: HostSpec, data: Dataset, partition: Partition, sign_every: float, here: Path) -> str:
        """Be the host of this run, with a sign of life at least `sign_every` seconds, and with relative paths beginning
        `here`, where there is such a folder; returns the node it is on."""
        with suppress(OSError):
            os.chdir(here)
        self.host = ClientHost(spec, data, partition)
        self._heartbeat.send_every(sign_every)
        self.host.trainer.before_client = self._heartbeat.beat
        self.host.flat.model.register_forward_pre_hook(self._heartbeat.batch)
        return ray.get_runtime_context().get_node_id()

    def ping(self) -> None:
        """Answers, where the process lives."""

    def call(self, method: str, *args: Any) -> Any:
        """What this method of the host returns. Shows that it is at work; ends the process when its device breaks: nothing
        can be done here any more, in a new one it may."""
        try:
            with self._heartbeat.at_work():
                return getattr(self.host, method)(*args)
        except Exception as error:
            if breaks_device(error):
                ray.actor.exit_actor()
            raise

    def call_detached(self, method: str, request: TrainRequest, *args: Any) -> list[Any]:
        """As `call`, with the reply as objects that travel one by one: states, models and traces stay in Ray's store."""
        with self._heartbeat.by_client():
            reply: TrainReply = self.call(method, request, *args)
            return reply.detach(request)

    def gpu(self) -> tuple[str, float]:
        """Which GPU of its node it has a share of, and how many bytes that one has free; no limit where it computes on its
        CPU nevertheless, because its PyTorch knows no GPUs."""
        [gpu] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        device = self.host.device
        return gpu, torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf

    def reset(self) -> None:
        """Free all that the last run has left here."""
        vars(self).pop("host", None)


def new_actor(node: str, cpus: float, gpus: float) -> Any:
    """A `HostActor` that reserves this share of a node, as soon as that has room for it."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(HostActor).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=there).remote()
