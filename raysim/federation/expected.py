"""What clients are expected to be sent and to send, in bytes, before they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raysim.core.aggregator import Aggregator
from raysim.core.cohort import AskedCohort
from raysim.core.selection import Asked
from raysim.core.server import Downlink, Server
from raysim.engine.dispatcher import TrainedCohort
from raysim.engine.model_store import HostedModels
from raysim.engine.traffic import KINDS, ledger
from raysim.federation.builder import RunParts
from raysim.federation.versions import round_info

Columns = dict[str, np.ndarray]  # of the table `traffic`


def of_round(run: RunParts, asked: Asked, clients: Sequence[int]) -> Columns:
    """One row for each of the `clients`, those with samples of who are `asked`, if all of them train: by the plan as far as it is
    known then, and with the message of the trial. What is sent before, to ask candidates, is not in it."""
    server = run.server.fork()
    server.scratch.asked = replace(asked, candidates={})
    peers = any(method.needs.peers == "whole" for method in run.spec.methods)
    sent = run.aggregator.downlink(clients, HostedModels(run.engine), server) if peers else Downlink()
    return _traffic(run, server, clients, run.aggregator, sent)


def by_client(traffic: Columns, clients: Sequence[int]) -> dict[int, dict[str, int]]:
    """The rows of the `clients`."""
    return {c: {name: int(column[i]) for name, column in traffic.items()} for i, c in enumerate(clients)}


def of_dropped(run: RunParts, asked: Asked) -> dict[int, dict[str, int]]:
    """By client, of the updates that are too stale."""
    clients, versions, _ = zip(*sorted(asked.dropped), strict=True)
    return by_client(of_round(run, Asked(clients, versions), clients), clients)


def of_any(run: RunParts) -> Columns:
    """The one row of a client that is sent the global model and sends its own, whatever the round's plan."""
    client = int(run.partition.sizes.argmax())
    return _traffic(run, run.server, [client], replace(run.aggregator, weightings=()), Downlink())


def models_down(run: RunParts, clients: Sequence[int], usual: Columns | None = None) -> np.ndarray:
    """[K] bytes of the global model, and of what travels with it, on their way to each of the clients."""
    usual = of_any(run) if usual is None else usual
    whole = sum(float(usual[f"down_{kind}"][0]) for kind in KINDS if kind != "masks")
    delivered = run.broadcast.costs(run.server, clients)
    if delivered is None:
        return np.full(len(clients), whole)
    encoded = sum(float(usual[f"down_{kind}"][0]) for kind in ("params", "positions", "scales"))
    down: np.ndarray = whole - encoded + delivered.sum(1)
    return down


def _traffic(
    run: RunParts, server: Server, clients: Sequence[int], planner: Aggregator, sent: Downlink
) -> Columns:  # fmt: skip
    asked = tuple(clients)
    early = planner.plan_early(AskedCohort(asked, server.population.sizes[list(asked)], server.layers), server)
    trained = TrainedCohort(dict.fromkeys(asked, run.message), {}, round_info(server), asked, None)
    columns = ledger(
        trained, early.mixture, sent, early.fork, run.aggregator, run.spec,
        delivered=run.broadcast.costs(server, asked), selection=run.config.rounds.selection,
    )  # fmt: skip
    return {name: column for name, column in columns.items() if name != "bytes"}
