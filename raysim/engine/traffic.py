"""Bytes that the simulated method would send: what the messages take, of what the plan lets be sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysim.core.aggregator import Aggregator
from raysim.core.message import FLOAT, whole
from raysim.core.mixture import Mixture
from raysim.core.selection import Selection
from raysim.core.server import Downlink, Server
from raysim.engine.dispatcher import TrainedCohort
from raysim.host.messages import HostSpec

KINDS = ("params", "buffers", "vectors", "scalars", "masks", "positions", "scales")


def ledger(
    trained: TrainedCohort, mixture: Mixture | None, downlink: Downlink, server: Server, aggregator: Aggregator,
    spec: HostSpec, others: Sequence[int] = (), theirs: Downlink | None = None, delivered: np.ndarray | None = None,
    selection: Selection | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Columns of the table `traffic`, one row for each client asked; those that failed have sent nothing. Then one for each
    of `others`, who were lost, not chosen, or only initialised from what they were sent, `theirs`. `delivered` is what the
    parameters took on their way to all of them, where they were encoded; `selection` had its probes measured.

    `server` is as the round left it.
    """
    layers, clients = server.layers, trained.asked
    T, sizes, everything = layers.T, layers.sizes.numpy(), whole(layers)
    results = [trained.results[c] for c in trained.clients]
    zeros = np.zeros(len(clients) + len(others), np.int64)
    up = {f"up_{what}": zeros.copy() for what in KINDS}
    if mixture is not None:
        came = np.flatnonzero(np.isin(clients, trained.clients))
        costs = [everything if result.model_bytes is None else result.model_bytes for result in results]
        sent = mixture.sent.numpy()[:, None] * np.stack(costs)  # [K, 3, T + Tb]
        vectors = np.array([result.vector_bytes for result in results])  # [K, 3]
        up["up_params"][came], up["up_buffers"][came] = sent[:, 0, :T].sum(1), sent[:, 0, T:].sum(1)
        up["up_vectors"][came] = vectors[:, 0]
        up["up_positions"][came], up["up_scales"][came] = (sent[:, 1:].sum(2) + vectors[:, 1:]).T
        # What was measured for observers and for the server's own steps is not sent in the simulated method.
        reported = {p for w in aggregator.weightings if w.reported for p in w.probes} | {*spec.stack.probes}
        reported |= {*selection.probes} if selection else set()
        stats = [[stat for p, stat in zip(spec.probes, r.stats, strict=True) if p in reported] for r in results]
        measured = [sum(stat.size for stat in own) for own in stats]
        one_time = [server.scratch.one_time_scalars.get(c, 0) for c in trained.clients]
        up["up_scalars"][came] = [
            r.scalar_bytes + FLOAT * (own + more) for r, own, more in zip(results, measured, one_time, strict=True)
        ]
        up["up_masks"][came] = [result.mask_bytes for result in results]

    if server.scratch.asked is not None:  # for a loss, before they trained
        up["up_scalars"] += FLOAT * np.isin([*clients, *others], [*server.scratch.asked.candidates])

    personal = (
        layers.where(aggregator.personal_layers).numpy() if aggregator.personal_layers else np.zeros(len(sizes), bool)
    )
    model = FLOAT * int(sizes[:T][~personal[:T]].sum())
    buffers = 0 if spec.settings.local_buffers else FLOAT * int(sizes[T:][~personal[T:]].sum())
    models, masks_down = zeros + 1, zeros.copy()
    if downlink.peers:
        models[: len(clients)] = [max(1, len(peers)) for peers in downlink.peers]
    if theirs is not None and theirs.peers:
        models[len(clients) : len(clients) + len(theirs.peers)] = [max(1, len(peers)) for peers in theirs.peers]
    masks_down[: len(clients)] = sum(-(-w.mask_bits(layers) // 8) for w in aggregator.weightings)
    down = {
        "down_params": models * model if delivered is None else delivered[:, 0],
        "down_buffers": models * buffers,
        "down_vectors": zeros + FLOAT * sum(v.numel() for v in server.shared.values()),
        "down_scalars": zeros,
        "down_masks": masks_down,
        "down_positions": zeros if delivered is None else delivered[:, 1],
        "down_scales": zeros if delivered is None else delivered[:, 2],
    }
    columns = up | down
    return columns | {"bytes": np.sum(list(columns.values()), axis=0)}
