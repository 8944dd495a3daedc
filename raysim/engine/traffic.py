"""Bytes that the simulated method would send, read off the plan (methods.md 0.8)."""

from __future__ import annotations

import numpy as np

from raysim.core.mixture import Mixture
from raysim.core.server import Aggregator, Downlink, Server
from raysim.engine.engine import HostedCohort

FLOAT = 4


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
        up["up_params"][came] = FLOAT * sent[:, :T] @ sizes[:T]
        up["up_buffers"][came] = FLOAT * sent[:, T:] @ sizes[T:]
        for i in came:
            report, row = cohort.row(clients[i])
            up["up_vectors"][i] = sum(report.vectors.values())
            up["up_scalars"][i] = FLOAT * (
                sum(stat[row].size for stat in report.stats) + sum(s[row].size for s in report.scalars.values())
            )

    personal = layers.where(aggregator.personal_layers).numpy() if aggregator.personal_layers else np.zeros(len(sizes), bool)
    model = FLOAT * int(sizes[:T][~personal[:T]].sum())
    buffers = 0 if local_buffers else FLOAT * int(sizes[T:][~personal[T:]].sum())
    models = np.array([1 + len(peers) for peers in downlink.peers]) if downlink.peers else zeros + 1
    selects = any(w.stage == "select" for w in aggregator.weightings)
    down = {
        "down_params": models * model,
        "down_buffers": models * buffers,
        "down_vectors": zeros + FLOAT * sum(v.numel() for v in server.shared.values()),
        "down_scalars": zeros,
        "down_masks": zeros + (-(-layers.L // 8) if selects else 0),  # which layers to send, one bit each
    }
    columns = up | down
    return columns | {"bytes": np.sum(list(columns.values()), axis=0)}
