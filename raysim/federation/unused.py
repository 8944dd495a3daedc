"""What the tables say of clients whose work is not used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raysim.core.selection import ABANDONED, Asked
from raysim.federation.builder import RunParts
from raysim.federation.simulated_time import expected_seconds


def add_lost(traffic: Mapping[str, np.ndarray], asked: Asked) -> None:
    """Let the last rows of `traffic`, which are of those that the round loses, have all that they were sent, and what those who are
    late have sent, though it is not used."""
    for row, (client, why) in enumerate(asked.lost.items(), -len(asked.lost)):
        sends = why in ("late", ABANDONED)
        for name, size in asked.expected[client].items():
            more = size - traffic[name][row] if name.startswith("down_") else size * sends
            traffic[name][row] += more
            traffic["bytes"][row] += more


def add_dropped(
    run: RunParts, asked: Asked, rows: Mapping[str, list[Any]], traffic: Mapping[str, np.ndarray]
) -> tuple[dict[str, list[Any]], dict[str, np.ndarray]]:  # fmt: skip
    """The `rows` of the table `clients` and the columns of `traffic`, and then one row in each for every update that came in too
    stale: its client was sent the model, has trained, and has sent."""
    clients, versions, starts = zip(*asked.dropped, strict=True)
    sent = {name: np.array([asked.expected[c][name] for c in clients]) for name in asked.expected[clients[0]]}
    took = expected_seconds(run, clients, sent, (), np.array(versions))
    sent["bytes"] = np.sum([*sent.values()], axis=0)
    columns: dict[str, list[Any]] = {
        "client": [*clients], "samples": [len(run.partition.train[c]) for c in clients], "status": ["stale"] * len(clients),
        "attack": [run.attackers.names_of(c) for c in clients], "version": [*versions], "sim_start": [*starts],
        "sim_down": (took.latency + took.down).tolist(), "sim_train": took.train.tolist(), "sim_up": took.up.tolist(),
    }  # fmt: skip
    none = [None] * len(clients)
    return (
        {name: [*column, *columns.get(name, none)] for name, column in rows.items()},
        {name: np.concatenate([column, sent[name]]) for name, column in traffic.items()},
    )
