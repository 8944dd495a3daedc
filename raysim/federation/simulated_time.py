"""How long the simulated clients take: what is expected when they are sent a model, and what a round took in the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from raysim.core.client import FORWARD
from raysim.core.message import FLOAT
from raysim.core.samples import Passes
from raysim.core.selection import Asked
from raysim.core.simulated import Seconds
from raysim.federation import expected
from raysim.federation.builder import RunParts


def usual_seconds(run: RunParts, clients: Sequence[int]) -> np.ndarray:
    """[K] until the server has the model of each of the clients, whatever the round's plan; known before it is asked."""
    usual = expected.of_any(run)
    down = expected.models_down(run, clients, usual) + usual["down_masks"]
    return _seconds(run, clients, _work(run, clients), _sum(usual, "up_"), down, run.server.t).total


def expected_seconds(
    run: RunParts, clients: Sequence[int], traffic: Mapping[str, np.ndarray], candidates: Collection[int], t: int | np.ndarray
) -> Seconds:  # fmt: skip
    """Of each of the clients, who are expected to cause this `traffic`, a row each. They were sent their models in round t, or
    each in its own [K]; the `candidates` among them before."""
    has = np.isin(clients, [*candidates])
    down = np.where(has, traffic["down_masks"], _sum(traffic, "down_"))
    return _seconds(run, clients, _work(run, clients), _sum(traffic, "up_"), down, t)


def until_lost(run: RunParts, t: int, asked: Asked, began: float) -> Seconds:
    """Seconds of each client that round t, which `began` then, loses: until it drops out or leaves. Others do all that they were
    asked for, and are late."""
    clock, seed, clients = run.config.clock, run.config.seed, [*asked.lost]
    traffic = {name: np.array([asked.expected[c][name] for c in clients]) for name in asked.expected[clients[0]]}
    whole = expected_seconds(run, clients, traffic, asked.candidates, t)
    starts = began + np.array([asked.after.get(client, 0.0) + asked.asking.get(client, 0.0) for client in clients])
    within = starts * (1 + 1e-12)  # clients may have come right then, and `began` is rounded
    leaves = clock.state(seed, np.array(clients), within)[1] - starts
    left = np.full(len(clients), np.inf)
    for i, (client, why) in enumerate(asked.lost.items()):
        if why == "dropped out":
            left[i] = clock.drops_out(seed, t, client) * whole.total[i]
        elif why == "interrupted":
            left[i] = leaves[i]
    parts = []
    for part in (whole.latency, whole.down, whole.train, whole.up):
        parts.append(np.minimum(part, left))
        left = left - parts[-1]
    return Seconds(*parts)


def expected_asking(run: RunParts, candidates: Mapping[int, int], has: Collection[int]) -> float:
    """Seconds until all `candidates` have said how well the model does on so many samples, which some have already; known before
    they are asked."""
    if not candidates:
        return 0.0
    down = np.where(np.isin([*candidates], [*has]), 0.0, expected.models_down(run, [*candidates]))
    work = FORWARD * np.array([*candidates.values()], float)
    return float(_seconds(run, [*candidates], work, np.array(float(FLOAT)), down, run.server.t).total.max())


def asked_for_losses(
    run: RunParts, t: int, clients: Sequence[int], traffic: Mapping[str, np.ndarray], candidates: Mapping[int, int]
) -> Seconds:
    """Seconds of each of the `clients` before the training of round t: to receive the model, and to say how well it does on so
    many samples. `traffic` has a row for each client. Those that are no candidates take 0."""
    has, work = np.isin(clients, [*candidates]), np.array([candidates.get(client, 0) for client in clients], float)
    down = _sum(traffic, "down_") - traffic["down_masks"]
    took = _seconds(run, clients, FORWARD * work, np.array(float(FLOAT)), down, t)
    return Seconds(*(np.where(has, part, 0.0) for part in (took.latency, took.down, took.train, took.up)))


def taken(
    run: RunParts, sent_in: np.ndarray, clients: Sequence[int], traffic: Mapping[str, np.ndarray],
    candidates: Collection[int] = (),
) -> list[Seconds]:  # fmt: skip
    """Seconds of each of the `clients` in the phases of a round's training, from what was sent: the first rows of `traffic`. The
    server waits for one phase after the other. The clients were sent their models in the rounds `sent_in` [K].

    There are two phases where the server needs statistics of all before it says who sends what. The `candidates` had the model.
    """
    first = {name: column[: len(clients)] for name, column in traffic.items()}
    has, masks = np.isin(clients, [*candidates]), first["down_masks"]
    up = _sum(first, "up_") - FLOAT * has
    down = np.where(has, masks, _sum(first, "down_"))
    work = _work(run, clients)
    if all(weighting.plans_early or weighting.stage != "select" for weighting in run.aggregator.weightings):
        return [_seconds(run, clients, work, up, down, sent_in)]
    statistics = first["up_scalars"] - FLOAT * has
    sent = _seconds(run, clients, work, statistics, down - masks, sent_in)
    return [sent, _seconds(run, clients, np.zeros(len(clients)), up - statistics, masks, sent_in)]


def _sum(traffic: Mapping[str, np.ndarray], way: str) -> np.ndarray:
    """Bytes `up_` or `down_` of each row."""
    columns = [column for name, column in traffic.items() if name.startswith(way)]
    total: np.ndarray = np.sum(columns, axis=0, dtype=float)
    return total


def _work(run: RunParts, clients: Sequence[int]) -> np.ndarray:
    """[K] samples on which the clients train, each counted in every pass."""
    settings, samples = run.spec.settings, run.partition.sizes[list(clients)]
    step = settings.batch_size * run.spec.stack.batches_per_step
    passes = Passes(settings.epochs, settings.batch_size, settings.drop_last, step)
    more = sum(method.more_work(samples, passes) for method in run.config.client)
    work: np.ndarray = passes.epochs * passes.epoch(samples) + more
    return work


def _seconds(
    run: RunParts, clients: Sequence[int], work: np.ndarray, up: np.ndarray, down: np.ndarray, t: int | np.ndarray
) -> Seconds:
    return run.config.clock.seconds(run.config.seed, clients, work, up, down, t)
