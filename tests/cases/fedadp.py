from math import ceil

import numpy as np
from case import UNITS, Case, State, Traced, TracedClient, fedavg, minus, norm
from reference import tensors, train

KEEP, LEAST, HEAD = 0.5, 0.02, 260
STATISTICS = ("norm.running_mean", "norm.running_var")


def kept(round_: Traced, client: TracedClient) -> dict[str, np.ndarray]:
    """For the client's model before pruning, trained again: bool [channels] of each unit."""
    full = train(round_.federation, tensors(client.init), client.steps, round_.lr)
    update = minus({n: t.numpy() for n, t in full.items()}, round_.before)
    ratio, sizes, moved = {}, {}, {}
    for unit in ("conv1", "conv2"):
        names = UNITS[unit]
        ratio[unit] = norm(update, names) / norm(round_.before, names)
        sizes[unit] = sum(update[n].size for n in names)
        moved[unit] = sum((update[n] ** 2).reshape(len(update[n]), -1).sum(1) for n in names)
    low, high, budget = 0.0, 1e6, KEEP * (sum(sizes.values()) + HEAD) - HEAD
    for _ in range(200):  # shares grow with their common scale
        middle = (low + high) / 2
        spent = sum(np.clip(middle * ratio[u], LEAST, 1) * sizes[u] for u in sizes)
        low, high = (middle, high) if spent < budget else (low, middle)
    counts = {u: ceil(np.clip(low * ratio[u], LEAST, 1) * len(moved[u]) - 1e-9) for u in sizes}
    return {u: np.isin(np.arange(len(moved[u])), np.argsort(-moved[u])[: counts[u]]) for u in sizes}


def recompute(round_: Traced) -> State:
    """Each channel is averaged by size over the clients that sent it, or stays as it was."""
    after, masks = fedavg(round_), [kept(round_, c) for c in round_.clients]
    for unit in ("conv1", "conv2"):
        mask = np.stack([m[unit] for m in masks])  # [K, channels]
        weights = round_.sizes[:, None] * mask
        sent = weights.sum(0) > 0
        weights = weights / np.where(sent, weights.sum(0), 1)
        for name in [*UNITS[unit], *(f"{unit}.{s}" for s in STATISTICS)]:
            spread = [w.reshape(-1, *[1] * (after[name].ndim - 1)) for w in weights]
            mean = sum(w * c.model[name] for w, c in zip(spread, round_.clients, strict=True))
            after[name] = np.where(sent.reshape(spread[0].shape), mean, round_.before[name])
    return after


FEDADP = Case(
    "fedadp", {"client": [{"fedadp": KEEP}]}, {"client": [{"fedadp": 1}]}, {"client": [{"fedadp": 0.9}]},
    recompute=recompute,
)  # fmt: skip
