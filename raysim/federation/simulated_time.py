"""How long the simulated clients take: what is expected when they are sent a model, and what a round took in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from raysim.core.simulated import Seconds
from raysim.federation.builder import RunParts


def expected_seconds(run: RunParts, clients: Sequence[int]) -> np.ndarray:
    """[K] until the server has what each of the clients sends, if that is a model; known before it trains."""
    down, up = run.message_bytes
    return _seconds(run, clients, np.array(float(up)), np.array(float(down))).total


def taken(run: RunParts, clients: Sequence[int], traffic: Mapping[str, np.ndarray]) -> list[Seconds]:
    """Of the phases of a round, for which the server waits one after the other: what each client took, from what was sent.

    There are two where the server decides who sends what once it has seen statistics of all.
    """
    up, down = (
        np.sum(
            [column[: len(clients)] for name, column in traffic.items() if name.startswith(way)], axis=0, dtype=float
        )
        for way in ("up_", "down_")
    )
    if all(weighting.plans_early or weighting.stage != "select" for weighting in run.aggregator.weightings):
        return [_seconds(run, clients, up, down)]
    statistics, masks = traffic["up_scalars"][: len(clients)], traffic["down_masks"][: len(clients)]
    first = _seconds(run, clients, statistics, down - masks)
    return [first, _seconds(run, clients, up - statistics, masks, trains=False)]


def _seconds(
    run: RunParts, clients: Sequence[int], up: np.ndarray, down: np.ndarray, trains: bool = True
) -> Seconds:  # fmt: skip
    samples = run.config.local.epochs * run.partition.sizes[list(clients)] if trains else np.zeros(len(clients))
    return run.config.clock.seconds(run.config.seed, clients, samples, up, down)
