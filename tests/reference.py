"""The tests' own model of `conftest.tiny`, in plain torch and float64; shares no code with the package."""

from __future__ import annotations

from collections.abc import Mapping
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
