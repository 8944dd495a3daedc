"""What a run would be, found out without starting anything: its clients, its model, its traffic, its hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from raysim.api.launch import check_form
from raysim.api.lines import aligned, bytes_, header, lasting, unused
from raysim.config import Config
from raysim.core.cohort import AskedCohort
from raysim.core.message import FLOAT
from raysim.core.modes import modes_of_a_run
from raysim.core.server import Downlink, RoundScratch
from raysim.data import Partition
from raysim.engine.dispatcher import TrainedCohort
from raysim.engine.ray.placement import HOST_BYTES, Node, Resources, place
from raysim.engine.traffic import ledger
from raysim.federation.builder import RunParts, build, checked_data, learning_rate
from raysim.federation.candidates import RunClients
from raysim.federation.round import select
from raysim.federation.simulated_time import usual_seconds
from raysim.federation.trial import first_message
from raysim.federation.versions import round_info
from raysim.host.footprint import training_bytes
from raysim.host.host import ClientHost
from raysim.host.messages import ClientResult
from raysim.lazy import torch
from raysim.machine import free_memory


def preview(config: Config, address: str | None = None) -> str:
    """A few lines. The data are read and the model is built, but no client trains. Raises what `build` raises, and
    `PlacementError` where this machine has no room for an actor."""
    with modes_of_a_run(config.engine.threads):
        return _preview(config, address)


def _preview(config: Config, address: str | None) -> str:
    data, partition = checked_data(config)
    run = build(config, _no_engine, data, partition)
    sizes, layers = partition.sizes, run.server.layers
    training = training_bytes(run.spec, run.spec.network()[0], int(sizes.max()))
    hosts, where = _hosts(run, training, address)
    # Processes of their own are the command line, the federation and the hosts; in-process, there is one.
    processes = hosts + 2 if config.engine.ray else 1
    streamed = processes * config.data.stream_bytes if config.data.storage == "stream" else 0
    held = data.x.nbytes if isinstance(data.x, np.ndarray) else streamed
    memory = processes * HOST_BYTES + hosts * training + held + run.cohort_size * FLOAT * layers.S
    rows = [
        ("clients", f"{partition.clients}, {run.cohort_size} a round"),
        ("samples", f"{sizes.sum():,} to train on, {sizes.min():,} to {sizes.max():,} a client; "
                    f"{len(partition.server_test):,} to test on"
                    + (f"; {unused(left_out, len(data.y))}" if (left_out := len(partition.unused(data))) else "")),
        ("model", f"{config.model.name}, {layers.P:,} parameters in {layers.L} layers"
                  + (f"; {layers.frozen:,} numbers frozen" if layers.frozen else "")),
        *([("malicious", str(run.attackers))] if config.attack else []),
        ("traffic", _traffic(run)),
        ("hosts", where),
        ("time", _time(run, max(hosts, 1), partition)),
        *([("on the clock", _simulated(run))] if config.clock.runs else []),
        ("memory", f"about {bytes_(memory)}" if hosts else "what the cluster has"),
    ]  # fmt: skip
    return "\n".join([header(config), "", *aligned(rows), "", "Nothing was started. All settings:"])


def _time(run: RunParts, hosts: int, partition: Partition) -> str:
    """How long a round's steps would take here: those of a client are timed, on one of its batches."""
    local = run.config.local
    steps = local.epochs * np.maximum(1, np.ceil(partition.sizes / local.batch_size))
    host = ClientHost(replace(run.spec, keep_freed_memory=False), run.data, partition)
    x, y = host.samples.rows(partition.train[int(partition.sizes.argmax())][: local.batch_size])
    if host.device.type == "cuda":
        return "not estimated on a GPU"
    took = []
    for _ in range(3):  # the first one also gets memory
        began = time.perf_counter()
        host.flat.backward(host.task.loss(host.flat.model(x), y))
        took.append(time.perf_counter() - began)
    of_round = min(took) * float(steps.mean()) * run.cohort_size / hosts
    whole = of_round * run.server.rounds
    return f"about {lasting(of_round)} a round, {lasting(whole)} in all, for plain training on this machine's cores"


def _simulated(run: RunParts) -> str:
    """How long a client takes on the simulated clock."""
    took = usual_seconds(run, run.partition.sizes.nonzero()[0].tolist())
    return f"a client takes {lasting(float(np.median(took)))} in the median, {lasting(float(took.max()))} at most"


class _NoEngine:
    """Takes the place of the engine of a run that does not start."""

    client_models: ClassVar[Mapping[int, Any]] = {}

    def begin(self, value: torch.Tensor) -> None:
        pass


def _no_engine(*_: Any) -> Any:
    return _NoEngine()


def _traffic(run: RunParts) -> str:
    """What the byte ledger says of a first round in which all clients come back."""
    server = run.server
    server.scratch = RoundScratch(0, learning_rate(run.config, 0))
    chosen = server.scratch.asked = select(run, RunClients(run, None))
    clients = tuple(c for c in chosen.clients if run.partition.sizes[c])
    if not clients:
        return "none in the first round, which draws no client with samples"
    asked = AskedCohort(clients, server.population.sizes[list(clients)], server.layers)
    early = run.aggregator.plan_early(asked, server)
    result = ClientResult("ok")
    if upload := run.spec.upload:
        result.model_bytes = first_message(upload, server.value.clone(), server.layers, run.broadcast.private).costs
    trained = TrainedCohort(dict.fromkeys(clients, result), {}, round_info(server), clients, None)
    delivered = run.broadcast.deliver(server, (*clients, *chosen.not_chosen))
    spec = replace(run.spec, probes=())
    counted = ledger(
        trained, early.mixture, Downlink(), server, run.aggregator, spec, chosen.not_chosen, delivered=delivered
    )
    up, down = (sum(int(counted[name].sum()) for name in counted if name.startswith(way)) for way in ("up_", "down_"))
    known = not run.config.client and len(run.config.weighting) == sum(w.plans_early for w in run.config.weighting)
    doubt = "" if known else " (excludes traffic that depends on the data)"
    return f"up {bytes_(up)}   down {bytes_(down)} in a round{doubt}"


def _hosts(run: RunParts, training: int, address: str | None) -> tuple[int, str]:
    """How many actors would be started that need so many bytes for `training`, 0 where the cluster decides, and in words."""
    engine = run.config.engine.ray
    if engine is None:
        return 1, "this process"
    from raysim.engine.ray.cluster import cluster_address

    check_form(address)
    if joined := address or cluster_address():
        return 0, f"actors of the cluster at {joined}, as many as it carries"
    memory = free_memory()
    here = Node(
        "here", len(os.sched_getaffinity(0)), torch.cuda.device_count(), float("inf") if memory is None else memory
    )
    placed = place(
        Resources((here,)), run.cohort_size, engine.clients_per_actor, engine.gpu_per_client, engine.threads,
        FLOAT * run.server.layers.S, training_bytes=training, together=engine.batch_clients,
    )  # fmt: skip
    device = (
        f"{placed.gpus:g} of a GPU each"
        if placed.gpus
        else f"{placed.cpus:g} of a CPU each"
        if placed.cpus < 1
        else f"{placed.cpus:g} CPU{'s' * (placed.cpus > 1)} each"
    )
    return placed.hosts, f"{placed.hosts} actors on this machine, {device}"
