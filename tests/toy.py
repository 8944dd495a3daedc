"""A cohort that is one float64 matrix in this process, for numbers that can be checked by hand."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe
from raysim.core.server import Population, RoundScratch, Server

ONE_LAYER = LayerMap.of(nn.Linear(2, 1, bias=False))
TWO_LAYERS = LayerMap.of(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)))  # a coordinate each

# The toy problem: one layer of two parameters, three clients.
W = [3.0, 4.0]
UPDATES = [[1.0, 0.0], [0.0, 1.0], [0.0, -2.0]]
SIZES = [1, 1, 2]


def vector(*values: Any) -> Tensor:
    return torch.as_tensor(values[0] if len(values) == 1 else values, dtype=torch.float64)


def toy_server(layers: LayerMap = ONE_LAYER, value: Any = W, labels: Any = None, t: int = 0, **fields: Any) -> Server:
    """A server with the model `value` [S]; `labels` [N, C] are its population's."""
    labels = torch.tensor(labels if labels is not None else [[n] for n in SIZES])
    fields = {"seed": 0, "rounds": 10, "population": Population(labels.sum(1), lambda: labels), **fields}
    return Server(vector(value), layers, scratch=RoundScratch(t), **fields)


class ToyCohort:
    """See `raysim.core.cohort.Cohort`. What clients measured is given as `stats`, or measured on their models."""

    def __init__(
        self, server: Server, updates: Any = UPDATES, sizes: Any = SIZES,
        stats: Mapping[Probe, Any] | None = None, scalars: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.server, self.layers, self.updates = server, server.layers, vector(updates)  # [K, S]
        self.clients = tuple(range(len(self.updates)))
        self.sizes = torch.tensor(sizes)
        self._stats, self._scalars = dict(stats or {}), dict(scalars or {})

    @property
    def models(self) -> Tensor:
        return self.server.value + self.updates

    @property
    def counters(self) -> Tensor:
        return torch.stack([self.models[:, s.start] for s in self.layers.tensors if s.kind == "counter"], dim=1)

    def stat(self, probe: Probe) -> Tensor:
        if probe in self._stats:
            return vector(self._stats[probe])
        runs = [SimpleNamespace(layers=self.layers, uploaded=m, received=self.server.value) for m in self.models]
        return torch.stack([probe.end(run) for run in runs])

    def scalars(self, name: str) -> Tensor:
        return torch.as_tensor(self._scalars[name])

    def each(self, function: Any, *payload: Any) -> Tensor:
        return torch.stack([function(update, self.layers, *payload) for update in self.updates])

    def distances(self, to: Tensor, layers: LayerMap | None = None) -> Tensor:
        return (layers or self.layers).norms(self.models[:, : len(to)] - to)

    def distances_to_mixture(self, mix: Mixture) -> Tensor:
        return self.distances(self.reduce(mix)[: self.layers.P])

    def reduce(self, mix: Mixture, of: str = "model", power: int = 1, distances_to: Any = None) -> Tensor:
        weights = torch.cat([mix.weights, mix.buffers], dim=1)
        if power == 2:
            return (self.layers.per_element(weights) * self.updates.square()).sum(0)
        own = mix.server_coefficient - weights.sum(0)  # of the server's own tensor, where clients enter with models
        result = self.layers.per_element(own) * self.server.value
        return result + (self.layers.per_element(weights) * self.models).sum(0)

    def gram(self) -> Tensor:
        return self.updates @ self.updates.T

    def columns(self, function: Any, mix: Mixture | None = None, *payload: Any) -> Tensor:
        sent = torch.ones_like(self.updates) if mix is None else self.layers.per_element(mix.sent.double())
        columns = (self.updates[rows > 0, i : i + 1] for i, rows in enumerate(sent.T))
        return torch.cat([function(column, *payload) if len(column) else column.new_zeros(1) for column in columns])

    def by_size(self) -> Mixture:
        return Mixture.of(self.sizes, self.layers)

    def uniform(self) -> Mixture:
        return Mixture.of(torch.ones(len(self.clients)), self.layers)


def planned(weighting: Any, cohort: ToyCohort) -> Tensor:
    """The aggregate [S] of one weighting."""
    return cohort.reduce(weighting.plan(cohort, cohort.server, cohort.by_size()))


def applied(step: Any, cohort: ToyCohort, mixture: Mixture | None = None) -> Tensor:
    """What a server step makes of the plain mean (or of another mixture) [S]."""
    mixture = mixture or cohort.by_size()
    return step.apply(cohort.reduce(mixture), mixture, cohort, cohort.server)


def noted(server: Server, name: str) -> Tensor:
    """The note of that name."""
    [value] = [note.value for note in server.scratch.notes if note.name == name]
    return value
