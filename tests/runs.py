"""One client's run on a small perceptron in float64, for what a hook does to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.core.client import ClientMethod, ClientStack, LocalRun, Samples
from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.local_run import ClientState, LocalSettings, RoundInfo
from raysim.core.optim import OptimizerSpec
from raysim.core.samples import ClientData
from raysim.core.task import Classification
from raysim.models import Inputs, build

STAGES = 3  # 5 features, hidden layers of 6 and 4, 3 classes


def perceptron(seed: int = 0, dtype: torch.dtype = torch.float64) -> FlatModel:
    torch.manual_seed(seed)
    model = build("mlp", Inputs((5,), 3), hidden=[6, 4])
    return FlatModel(model, LayerMap.of(model), dtype=dtype)


def local_run(
    methods: Sequence[ClientMethod], *, samples: int = 24, state: ClientState | None = None, t: int = 0,
    lr: float = 0.1, batch_size: int = 8, epochs: int = 1, drop_last: bool = False, clip: float | None = None,
    received: Tensor | None = None, pass_size: int | None = None, precision: str = "", **optimizer: Any,
) -> LocalRun:  # fmt: skip
    """A run before its local initialisation, whose batches are traced; it is sent `received` or one fixed model. In float64,
    but with a `precision`, which is that of `local.precision`, in float32."""
    dtype = torch.float32 if precision else torch.float64
    flat = perceptron(dtype=dtype)
    torch.manual_seed(1)
    data = Samples(torch.randn(samples, 5, dtype=torch.float64).to(dtype), torch.randint(3, (samples,)))
    settings = LocalSettings(
        epochs, batch_size, drop_last, OptimizerSpec(**optimizer), clip, precision=precision or "fp32", pass_size=pass_size
    )  # fmt: skip
    received = flat.value.clone() if received is None else received
    run = LocalRun(
        0, RoundInfo(0, t, 10, 1, lr, samples), flat, Classification(), settings, ClientStack(methods),
        ClientData(lambda part: data), received, {}, {}, state or ClientState(),
    )  # fmt: skip
    run.orders = []
    return run


def loss(run: LocalRun, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of the parameters [P], written out."""
    w = run.layers.unflatten(params)
    for stage in ("fc1", "fc2"):
        x = torch.relu(x @ w[f"{stage}.linear.weight"].T + w[f"{stage}.linear.bias"])
    return F.cross_entropy(x @ w["head.weight"].T + w["head.bias"], y)


def slope(function: Any, at: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences of a function of a vector."""
    ways = torch.eye(len(at), dtype=at.dtype) * step
    return torch.stack([(function(at + way) - function(at - way)) / (2 * step) for way in ways])


def batches(run: LocalRun, purpose: str) -> list[Tensor]:
    """The traced batches of one stream, as rows of the client's samples."""
    assert run.orders is not None
    return [rows for name, rows in run.orders if name == purpose]
