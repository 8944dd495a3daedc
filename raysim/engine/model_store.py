"""The clients' last models, as rules for the downlink see them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.engine.base import Call, Engine, Span


@dataclass(frozen=True)
class HostedModels:
    """`engine.client_models` as a `raysim.core.server.ModelStore`."""

    engine: Engine

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(sorted(self.engine.client_models))

    def distances(self, clients: Sequence[int]) -> Tensor:
        engine, M = self.engine, len(clients)
        # Row i meets the models after it only: every n-th row to a host makes shares of like cost.
        shares = [range(i, M - 1, len(engine.hosts)) for i in range(len(engine.hosts))]

        def measure() -> Tensor:
            models = [engine.client_models[c] for c in clients]
            rows = engine.ask([Call(i, "distances", (share, *models)) for i, share in enumerate(shares) if share])
            squared = torch.zeros(M, M, dtype=torch.float64)
            for share, row in zip((s for s in shares if s), rows, strict=True):
                squared[list(share)] = torch.from_numpy(row)
            return squared + squared.T

        started = time.time()
        squared = engine.retry_after_loss(measure)
        engine.spans += [Span(i, "distances", started, time.time()) for i, share in enumerate(shares) if share]
        return squared
