"""The clients' last models, as rules for the downlink see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raysim.engine.base import Call, Engine, Span
from raysim.host.distances import blocks_of
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class HostedModels:
    """`engine.client_models` as a `raysim.core.server.ModelStore`."""

    engine: Engine

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(sorted(self.engine.client_models))

    def distances(self, clients: Sequence[int]) -> Tensor:
        engine, M = self.engine, len(clients)
        # A block of rows meets itself and those after it: every n-th block to a host makes shares of like cost.
        blocks = blocks_of(M, engine.layers.P)
        shares = [blocks[i :: len(engine.hosts)] for i in range(len(engine.hosts))]

        def measure() -> Tensor:
            models = [engine.client_models[c] for c in clients]
            asked = [Call(i, "distances", (share, *models)) for i, share in enumerate(shares) if share]
            squared = torch.zeros(M, M, dtype=torch.float64)
            for share, rows in zip((s for s in shares if s), engine.ask(asked), strict=True):
                for block, row in zip(share, rows, strict=True):
                    squared[block.start : block.stop, block.start :] = torch.from_numpy(row)
            return squared.triu(1) + squared.triu(1).T

        started = engine.spec.clock.wall()
        squared = engine.retry_after_loss(measure)
        engine.spans += [
            Span(i, "distances", started, engine.spec.clock.wall()) for i, share in enumerate(shares) if share
        ]
        return squared
