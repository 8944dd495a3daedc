"""A toy cohort whose server has a model and samples to learn on, all in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from toy import ToyCohort, toy_server

from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.samples import Samples
from raysim.core.server import ProxyData
from raysim.core.server_model import ServerModel
from raysim.core.task import Classification

SAMPLES, FEATURES, CLASSES = 12, 5, 3


def perceptron(norm: bool = False) -> nn.Sequential:
    middle = [nn.BatchNorm1d(6), nn.Tanh()] if norm else [nn.Tanh()]
    return nn.Sequential(nn.Linear(FEATURES, 6), *middle, nn.Linear(6, CLASSES))


class ProxyCohort(ToyCohort):
    """Clients around a perceptron that are apart by `spread`, and twelve proxy samples."""

    gathers = True

    def __init__(self, clients: int = 3, spread: float = 0.5, norm: bool = False, sizes: Any = None, seed: int = 0):
        torch.manual_seed(seed)
        model = perceptron(norm)
        layers = LayerMap.of(model)
        updates = torch.randn(clients, layers.S, dtype=torch.float64) * spread
        updates[:, layers.P :] = 0
        self.x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64)
        self.y = torch.arange(SAMPLES) % CLASSES
        value = layers.flatten(model.state_dict()).double()
        server = toy_server(layers, value, proxy=ProxyData(np.arange(SAMPLES), self.y.numpy()))
        super().__init__(server, updates, sizes or list(range(1, clients + 1)))
        self.flat = FlatModel(model, layers, dtype=torch.float64)

    def server_model(self) -> ServerModel:
        return ServerModel(
            self.flat, self.server.value, self.updates, lambda rows: Samples(self.x[rows], self.y[rows]),
            Classification(),
        )  # fmt: skip

    def compute(self, function: Callable[..., Any], *payload: Any, models: bool = False) -> Any:
        result = function(self.server_model(), *payload)
        return result.clone() if isinstance(result, Tensor) else tuple(r.detach().clone() for r in result)

    def dots(self, with_: Tensor, layers: LayerMap) -> Tensor:
        return layers.dots(self.updates[:, : len(with_)], with_)

    def predict(self, rows: np.ndarray) -> Tensor:
        server_model = self.server_model()

        def logits(value: Tensor) -> Tensor:
            server_model.load(value)
            return server_model.logits(rows)

        return torch.stack([logits(m) for m in self.models])
