"""Models tested by all hosts together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from raysim.core.local_run import RoundInfo
from raysim.core.score import Score
from raysim.core.server import Downlink
from raysim.engine.base import Call, Engine, Span
from raysim.engine.dispatcher import ClientResults, one_by_one, shares
from raysim.engine.requests import Requests, Start


def evaluate(engine: Engine, rows: np.ndarray, t: int) -> Score:
    """The published model on `rows` of the data set, in round t; hosts share the batches."""
    batch, hosts = engine.spec.eval_batch, len(engine.hosts)
    bounds = [round(i * -(-len(rows) // batch) / hosts) * batch for i in range(hosts + 1)]
    parts = [(i, rows[a:b]) for i, (a, b) in enumerate(itertools.pairwise(bounds)) if a < b and a < len(rows)]

    def score() -> list[Score]:
        calls = [Call(i, "evaluate", (engine.published, part, t)) for i, part in parts]
        return [one for result in engine.ask(calls) for one in result]

    started = engine.spec.clock.wall()
    scores = engine.retry_after_loss(score)
    engine.spans += [Span(i, "evaluate", started, engine.spec.clock.wall()) for i, _ in parts]
    # Batches are the same ones however they are shared, and are added in their order.
    return Score.total(scores)


def evaluate_clients(
    engine: Engine, round_info: RoundInfo, clients: Sequence[int], downlink: Downlink,
    test: Literal["personal", "loss"] = "personal", starts: Mapping[int, Start] | None = None, **options: Any,
) -> ClientResults:  # fmt: skip
    """For each client the model it would now be given, tested on its own test samples; or the `loss` of what it is sent, on
    its training samples. `starts` are those of clients that have an older model, `options` further fields of the requests."""
    requests = Requests(engine, round_info, tuple(clients), downlink, starts=starts or {})

    def score() -> ClientResults:
        units = [(i, share) for i, share in enumerate(shares(engine, one_by_one(clients))) if share]
        replies = engine.ask([requests.call(i, test, share, **options) for i, share in units])
        return ClientResults(
            {client: result for results in replies for client, result in results.items()},
            {client: i for i, share in units for client in share},
        )

    return engine.retry_after_loss(score)
