"""Federations in actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from raysim.config import Config, ConfigError
from raysim.engine.ray.cluster import cluster, cluster_address
from raysim.engine.ray.driver import RemoteFederation, stored
from raysim.engine.ray.placement import Resources
from raysim.federation.builder import checked_data
from raysim.federation.loop import Federation
from raysim.host.device import needs_gpu
from raysim.lazy import torch


@contextmanager
def session(
    config: Config, address: str | None = None, resources: Resources | None = None
) -> Iterator[Callable[[Config, Path, bool], RemoteFederation]]:
    """`cluster`, with the data of `config` prepared; yields what makes a federation on `resources` of it."""
    partitioned = checked_data(config)  # what is wrong with the data shows before anything is started
    settings, joined = config.engine.ray, address or cluster_address()
    assert settings
    if not joined and settings.gpu_per_client != "auto" and settings.gpu_per_client and not torch.cuda.device_count():
        raise ConfigError(
            f"engine.ray.gpu_per_client: {settings.gpu_per_client:g} of a GPU, but this machine has none. Set it to 0 or "
            "auto, or join a cluster with --address"
        )
    problem = needs_gpu(config.local.precision, config.engine.cuda_graphs)
    if problem and not joined and not torch.cuda.device_count():
        raise ConfigError(problem)
    metrics = any(sink.of_ray for sink in config.record.sinks)
    with cluster(
        address, None if resources else settings.state_bytes, settings.dashboard, metrics
    ):  # who shares a cluster has asked for its size
        references = stored(partitioned)
        del partitioned  # the object store has it now
        yield partial(RemoteFederation, Federation, partitioned=references, resources=resources)
