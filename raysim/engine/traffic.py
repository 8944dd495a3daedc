"""Bytes that the simulated method would send, read off the plan."""

from __future__ import annotations

import numpy as np

from raysim.core.mixture import Mixture
from raysim.core.server import Aggregator, Downlink, Server
from raysim.engine.engine import HostedCohort

FLOAT = INDEX = 4


def ledger(
    cohort: HostedCohort, mixture: Mixture | None, downlink: Downlink, server: Server, aggregator: Aggregator,
    local_buffers: bool,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Columns of the table `traffic`, one row for each client asked; those that failed have sent nothing."""
    layers, clients = server.layers, cohort.asked
    T, sizes = layers.T, layers.sizes.numpy()
    outcomes = [cohort.outcomes[c] for c in cohort.clients]
    zeros = np.zeros(len(clients), np.int64)
    up = {f"up_{what}": zeros.copy() for what in ("params", "buffers", "vectors", "scalars", "masks")}
    if mixture is not None:
        came = np.flatnonzero(np.isin(clients, cohort.clients))
        whole = [sizes if outcome.sent_counts is None else outcome.sent_counts for outcome in outcomes]
        floats = mixture.sent.numpy() * np.stack(whole)  # [K, T + Tb]
        up["up_params"][came], up["up_buffers"][came] = FLOAT * floats[:, :T].sum(1), FLOAT * floats[:, T:].sum(1)
        up["up_vectors"][came] = [outcome.vector_bytes for outcome in outcomes]
        # Of what was measured, observers and the server's own steps are told nothing over the network.
        spec = cohort.engine.spec
        reported = {p for w in aggregator.weightings if w.reported for p in w.probes} | {*spec.stack.probes}
        told = [[stat for p, stat in zip(spec.probes, o.stats, strict=True) if p in reported] for o in outcomes]
        told = [[*stats, *o.scalars.values()] for stats, o in zip(told, outcomes, strict=True)]
        numbers = [[a.size for a in own if a.dtype != bool] for own in told]
        once = [server.once.get(c, 0) for c in cohort.clients]
        up["up_scalars"][came] = [FLOAT * (sum(own) + more) for own, more in zip(numbers, once, strict=True)]
        masks = [[int(a.sum()) for a in outcome.scalars.values() if a.dtype == bool] for outcome in outcomes]
        up["up_masks"][came] = [INDEX * sum(own) for own in masks]

    personal = (
        layers.where(aggregator.personal_layers).numpy() if aggregator.personal_layers else np.zeros(len(sizes), bool)
    )
    model = FLOAT * int(sizes[:T][~personal[:T]].sum())
    buffers = 0 if local_buffers else FLOAT * int(sizes[T:][~personal[T:]].sum())
    models = np.array([max(1, len(peers)) for peers in downlink.peers]) if downlink.peers else zeros + 1
    down = {
        "down_params": models * model,
        "down_buffers": models * buffers,
        "down_vectors": zeros + FLOAT * sum(v.numel() for v in server.shared.values()),
        "down_scalars": zeros,
        "down_masks": zeros + sum(-(-w.mask_bits(layers) // 8) for w in aggregator.weightings),
    }
    columns = up | down
    return columns | {"bytes": np.sum(list(columns.values()), axis=0)}
