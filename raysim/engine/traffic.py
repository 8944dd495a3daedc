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
    zeros = np.zeros(len(clients), np.int64)
    up = {f"up_{what}": zeros.copy() for what in ("params", "buffers", "vectors", "scalars", "masks")}
    position = {c: i for i, c in enumerate(cohort.clients)}
    came = [i for i, c in enumerate(clients) if c in position]
    if mixture is not None:
        sent = mixture.sent.numpy()
        for i in came:
            outcome, row = cohort.outcomes[clients[i]], sent[position[clients[i]]]
            kept = row * (sizes if outcome.kept is None else outcome.kept)
            up["up_params"][i], up["up_buffers"][i] = FLOAT * kept[:T].sum(), FLOAT * kept[T:].sum()
            up["up_vectors"][i] = outcome.vector_bytes
            masks = [a for a in outcome.scalars.values() if a.dtype == bool]
            numbers = [a for a in (*outcome.stats, *outcome.scalars.values()) if a.dtype != bool]
            up["up_scalars"][i] = FLOAT * (sum(a.size for a in numbers) + server.once.get(clients[i], 0))
            up["up_masks"][i] = INDEX * sum(int(a.sum()) for a in masks)

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
