"""Clients whose loss is a quadratic: federations with an optimum that algebra knows, in float64.

Client k has F_k(w) = ½ Σ_j a_kj (w_j − b_kj)². Its "data" is the row (a_k, b_k), so that a batch is all of it;
everything but the loss is the package's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from toy import ToyCohort, toy_server, vector

from raysim.core.aggregator import Aggregator
from raysim.core.client import ClientMethod, ClientStack, LocalRun, Samples, Upload
from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.local_run import ClientState, LocalSettings, RoundInfo
from raysim.core.mixture import Mixture
from raysim.core.optim import OptimizerSpec
from raysim.core.samples import ClientData
from raysim.core.task import Task


class Quadratic(Task):
    """½ Σ_j a_j (output_j − b_j)² of each row of `y` [n, 2P]."""

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        a, b = y.chunk(2, dim=1)
        return 0.5 * (a * (outputs - b) ** 2).sum(1)


@contextmanager
def quadratics() -> Iterator[None]:
    """Where quadratic clients live: new tensors are float64. Also a decorator."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Cohort(ToyCohort):
    """With further uploads."""

    vectors: dict[str, Tensor]

    def reduce(self, mix: Mixture, of: str = "model", power: int = 1) -> Tensor:
        return super().reduce(mix) if of == "model" else mix.per_client() @ self.vectors[of]


class Quadratics:
    """A federation of quadratic clients; `sizes` are repetitions of a client's row, `server` further steps."""

    @quadratics()
    def __init__(
        self, methods: Sequence[ClientMethod], a: Any, b: Any, *, lr: float = 0.1, steps: int = 1, start: Any = None,
        sizes: Sequence[int] | None = None, weighting: Sequence[Any] = (), server: Sequence[Any] = (),
        batch_size: int = 1000, drop_last: bool = False, **optimizer: Any,
    ):  # fmt: skip
        self.rows = torch.cat([vector(a), vector(b)], dim=1)  # [N, 2P]
        self.sizes = list(sizes or [1] * len(self.rows))
        P = self.rows.shape[1] // 2
        model = nn.Sequential(OrderedDict(head=nn.Linear(1, P, bias=False)))
        self.flat = FlatModel(model, LayerMap.of(model), dtype=torch.float64)
        self.stack, self.lr = ClientStack(methods), lr
        self.settings = LocalSettings(steps, batch_size, drop_last, OptimizerSpec(**optimizer))
        companions = [step for method in methods for step in method.server_steps()]
        self.aggregator = Aggregator(self.stack.base_weights, tuple(weighting), (*companions, *server))
        labels = [[n] for n in self.sizes]
        self.server = toy_server(self.flat.layers, start if start is not None else [0.0] * P, labels)
        for step in self.aggregator.steps:
            step.prepare(self.server)
        self.states = [ClientState() for _ in self.rows]
        self.t = 0

    def run(self, k: int, received: Any = None) -> LocalRun:
        """Client k before its local initialisation, sent the global model or `received`."""
        y = self.rows[k].expand(self.sizes[k], -1)
        data = ClientData(lambda part: Samples(torch.ones_like(y[:, :1]), y))
        round_info = RoundInfo(0, self.t, 10, len(self.rows), self.lr, sum(self.sizes) / len(self.sizes))
        received = self.server.value if received is None else vector(received)
        return LocalRun(
            k, round_info, self.flat, Quadratic(), self.settings, self.stack, data, received, self.server.shared, {},
            self.states[k],
        )  # fmt: skip

    @quadratics()
    def visit(self, run: LocalRun) -> Upload:
        """Local initialisation, training and what follows it."""
        self.stack.start(run)
        for begin in self.stack.beginners:
            begin(run)
        self.stack.train(run)
        upload = Upload(run.value)
        for finish in self.stack.finishers:
            finish(run, upload)
        if self.stack.keeps_params:
            self.states[run.client].previous = run.value.clone()
        return upload

    @quadratics()
    def round(self, clients: Sequence[int] | None = None) -> Tensor:
        """Run a round and return the new global model."""
        clients = range(len(self.rows)) if clients is None else clients
        updates, vectors = [], []
        for k in clients:
            upload = self.visit(self.run(k))
            updates.append((upload.value - self.server.value).tolist())
            vectors.append({name: v.clone() for name, v in upload.vectors.items()})
        cohort = Cohort(self.server, updates, [self.sizes[k] for k in clients])
        cohort.vectors = {name: torch.stack([v[name] for v in vectors]) for name in vectors[0]}
        mixture = self.aggregator.plan(cohort, self.server)
        self.server.value = self.aggregator.transform(cohort.reduce(mixture), mixture, cohort, self.server)
        self.t += 1
        return self.server.value

    def simulate(self, rounds: int, cohorts: Sequence[Sequence[int]] = ()) -> Tensor:
        """Rounds of everybody, or of the given cohorts in turn."""
        for t in range(rounds):
            self.round(cohorts[t % len(cohorts)] if cohorts else None)
        return self.server.value
