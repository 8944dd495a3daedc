"""The tests' own model of `conftest.tiny`, in plain torch and float64; shares no code with the package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MOMENTUM, EPS = 0.1, 1e-5  # of torch's BatchNorm


def tensors(state: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """A traced state as float64 tensors."""
    return {name: torch.tensor(np.asarray(array), dtype=torch.float64) for name, array in state.items()}


def inputs(federation: Any, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Images [n, C, H, W] and labels [n] of rows of the data set: (x / scale - mean) / std for each channel."""
    data = federation.data
    x = torch.tensor(data.x[rows].astype(np.float64)) / data.scale
    mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (data.mean, data.std))
    return (x - mean) / std, torch.tensor(data.y[rows])


def drawn(federation: Any, t: int, client: int, purpose: str) -> np.ndarray:
    """Rows of the data set: the client's samples in the order in which the stream (seed, round, client, purpose) takes them."""
    name = f"{federation.config.seed}/{t}/{client}/{purpose}"
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
    rows = federation.partition.train[client]
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).numpy()]


def forward(state: Mapping[str, Tensor], x: Tensor, train: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [n, C] of the tiny BatchNorm net, differentiable in `state`, and its running statistics afterwards.

    Two of: convolution 3x3 padded by 1, BatchNorm, ReLU, maximum over 2x2; then a linear layer. In train mode BatchNorm
    uses the batch's biased variance and moves the running one towards the unbiased, by a tenth.
    """
    statistics = {}
    for layer in ("conv1", "conv2"):
        x = F.conv2d(x, state[f"{layer}.conv.weight"], state.get(f"{layer}.conv.bias"), padding=1)
        mean, var, count = (state[f"{layer}.norm.{s}"] for s in ("running_mean", "running_var", "num_batches_tracked"))
        if train:
            n = x.numel() / x.shape[1]
            old_mean, old_var = mean, var
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            statistics[f"{layer}.norm.running_mean"] = (1 - MOMENTUM) * old_mean + MOMENTUM * mean.detach()
            statistics[f"{layer}.norm.running_var"] = (1 - MOMENTUM) * old_var + MOMENTUM * var.detach() * n / (n - 1)
            statistics[f"{layer}.norm.num_batches_tracked"] = count + 1
        else:
            statistics |= {f"{layer}.norm.running_mean": mean, f"{layer}.norm.running_var": var}
            statistics[f"{layer}.norm.num_batches_tracked"] = count
        x = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + EPS).sqrt()
        x = x * state[f"{layer}.norm.weight"].view(-1, 1, 1) + state[f"{layer}.norm.bias"].view(-1, 1, 1)
        x = F.max_pool2d(F.relu(x), 2)
    return F.linear(x.flatten(1), state["head.weight"], state["head.bias"]), statistics


def gradient(state: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient of the batch's mean cross-entropy in every parameter, in train mode; running statistics afterwards."""
    grads = gradient_of(state, lambda leaves: F.cross_entropy(forward(leaves, x, True)[0], y))
    return grads, forward(state, x, True)[1]


def gradient_of(state: Mapping[str, Tensor], loss: Callable[[dict[str, Tensor]], Tensor]) -> dict[str, Tensor]:
    """Gradient of a loss in every parameter of `state`."""
    leaves = {n: t.detach().clone().requires_grad_(n in parameters(state)) for n, t in state.items()}
    grads = torch.autograd.grad(loss(leaves), [leaves[n] for n in parameters(state)])
    return dict(zip(parameters(state), grads, strict=True))


def parameters(state: Mapping[str, Any]) -> list[str]:
    """Names of trainable tensors: what is no running statistic or counter."""
    return [n for n in state if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))]


def train(
    federation: Any, start: Mapping[str, Tensor], steps: Sequence[np.ndarray], lr: float, *,
    gradient: Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]] = gradient,
    only: Sequence[str] | None = None, velocity: dict[str, Tensor] | None = None, momentum: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Local training from `start` on the rows of every step: SGD with the configured momentum and weight decay.

    `gradient(state, x, y)` is what a method changes, `only` the tensors that move; `velocity` starts the momentum and
    is left as the training leaves it.
    """
    local, state = federation.config.local, dict(start)
    momentum = local.momentum if momentum is None else momentum
    velocity = {} if velocity is None else velocity
    for rows in steps:
        grads, statistics = gradient(state, *inputs(federation, rows))
        for n in parameters(state) if only is None else only:
            step = grads[n] + local.weight_decay * state[n]
            velocity[n] = momentum * velocity[n] + step if n in velocity else step
            state[n] = state[n] - lr * velocity[n]
        state |= statistics
    return state


def aggregate(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, np.ndarray]:
    """Σ weight · model of parameters and statistics; of counters the largest."""
    names = models[0].keys()
    mean = {n: sum(w * m[n] for w, m in zip(weights, models, strict=True)) for n in names}
    most = {n: torch.stack([m[n] for m in models]).amax(0) for n in names if n.endswith("num_batches_tracked")}
    return {n: tensor.numpy() for n, tensor in (mean | most).items()}


def part(state: Mapping[str, np.ndarray], prefix: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a traced state under `prefix`, such as "scaffold.c."; else zeros `like` those given."""
    found = {n.removeprefix(prefix): torch.tensor(v) for n, v in state.items() if n.startswith(prefix)}
    return found or {n: torch.zeros_like(t) for n, t in like.items() if n in parameters(like)}


def close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Whether tensors agree, relative to the largest entry of each."""
    assert actual.keys() == expected.keys()
    for n, tensor in expected.items():
        assert (actual[n] - tensor).abs().max() <= tolerance * max(1.0, tensor.abs().max()), n


def partition_of(table: Any) -> Any:
    """The `Partition` that a run's table `partition` describes, row for row."""
    from raysim.data import Partition
    from raysim.data.partition.shards import Shards

    header = json.loads(table.schema.metadata[b"raysim.partition"])
    sample, client, split = (table[name].to_numpy() for name in ("sample", "client", "split"))

    def rows(use: str) -> np.ndarray:
        return sample[split == use].astype(np.int64)

    def shards(use: str) -> Shards:
        return Shards(rows(use), np.searchsorted(client[split == use], np.arange(header["clients"] + 1)))

    label_map = None if header["label_map"] is None else np.array(header["label_map"], np.int64)
    return Partition(*map(shards, ("train", "test", "val")), *map(rows, ("server_test", "proxy")), label_map)
