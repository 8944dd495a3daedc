"""Bytes that the simulated method would send, read off the plan."""

from __future__ import annotations

import numpy as np

from raysim.core.aggregator import Aggregator
from raysim.core.mixture import Mixture
from raysim.core.server import Downlink, Server
from raysim.engine.dispatcher import TrainedCohort
from raysim.host.messages import HostSpec

FLOAT = INDEX = 4  # bytes


def ledger(
    trained: TrainedCohort, mixture: Mixture | None, downlink: Downlink, server: Server, aggregator: Aggregator,
    spec: HostSpec, others: int = 0, theirs: Downlink | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Columns of the table `traffic`, one row for each client asked; those that failed have sent nothing. Then one for each
    of `others`, who only initialised from what they were sent, `theirs`.

    `server` is as the round left it.
    """
    layers, clients = server.layers, trained.asked
    T, sizes = layers.T, layers.sizes.numpy()
    results = [trained.results[c] for c in trained.clients]
    zeros = np.zeros(len(clients) + others, np.int64)
    up = {f"up_{what}": zeros.copy() for what in ("params", "buffers", "vectors", "scalars", "masks")}
    if mixture is not None:
        came = np.flatnonzero(np.isin(clients, trained.clients))
        whole = [sizes if result.sent_counts is None else result.sent_counts for result in results]
        floats = mixture.sent.numpy() * np.stack(whole)  # [K, T + Tb]
        up["up_params"][came], up["up_buffers"][came] = FLOAT * floats[:, :T].sum(1), FLOAT * floats[:, T:].sum(1)
        up["up_vectors"][came] = [result.vector_bytes for result in results]
        # What was measured for observers and for the server's own steps is not sent in the simulated method.
        reported = {p for w in aggregator.weightings if w.reported for p in w.probes} | {*spec.stack.probes}
        stats = [[stat for p, stat in zip(spec.probes, r.stats, strict=True) if p in reported] for r in results]
        arrays = [[*own, *r.scalars.values()] for own, r in zip(stats, results, strict=True)]
        numbers = [[a.size for a in own if a.dtype != bool] for own in arrays]
        one_time = [server.scratch.one_time_scalars.get(c, 0) for c in trained.clients]
        up["up_scalars"][came] = [FLOAT * (sum(own) + more) for own, more in zip(numbers, one_time, strict=True)]
        masks = [[int(a.sum()) for a in result.scalars.values() if a.dtype == bool] for result in results]
        up["up_masks"][came] = [INDEX * sum(own) for own in masks]

    personal = (
        layers.where(aggregator.personal_layers).numpy() if aggregator.personal_layers else np.zeros(len(sizes), bool)
    )
    model = FLOAT * int(sizes[:T][~personal[:T]].sum())
    buffers = 0 if spec.settings.local_buffers else FLOAT * int(sizes[T:][~personal[T:]].sum())
    models, masks_down = zeros + 1, zeros.copy()
    if downlink.peers:
        models[: len(clients)] = [max(1, len(peers)) for peers in downlink.peers]
    if theirs is not None and theirs.peers:
        models[len(clients) :] = [max(1, len(peers)) for peers in theirs.peers]
    masks_down[: len(clients)] = sum(-(-w.mask_bits(layers) // 8) for w in aggregator.weightings)
    down = {
        "down_params": models * model,
        "down_buffers": models * buffers,
        "down_vectors": zeros + FLOAT * sum(v.numel() for v in server.shared.values()),
        "down_scalars": zeros,
        "down_masks": masks_down,
    }
    columns = up | down
    return columns | {"bytes": np.sum(list(columns.values()), axis=0)}
