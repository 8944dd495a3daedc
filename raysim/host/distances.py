"""Squared distances between vectors, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core import tree
from raysim.core.layers import LayerMap
from raysim.host.device import on_device
from raysim.host.messages import Arrays
from raysim.host.trained import Blocks, TrainedModels

MODELS_AT_ONCE = 8  # whose distances to another are taken when that is read


def of_updates(trained: TrainedModels, clients: Sequence[int], to: np.ndarray, layers: LayerMap) -> np.ndarray:
    """[k, runs] float64: squared distances of the clients' updates from `to` [P] (or [S]), for each run of
    `layers.segments`."""
    there = tree.as_array(on_device(to, trained.device))
    space = tree.as_array(trained.updates.new_empty(len(clients), trained.block))
    return squared(trained.blocks(clients), lambda _, a, b: there[a:b], layers, len(to), space)


def squared(
    vectors: Blocks, centre: Callable[[Any, int, int], Any], layers: LayerMap, width: int, space: Any
) -> np.ndarray:
    """[k, runs] float64: squared distances of the first `width` elements of k vectors from the
    `centre(block, start, stop)` of each block of them. `space` [k, block] is scratch."""
    ops = tree.operations(space)
    columns = []
    for start, stop in layers.segments.blocks(space.shape[1]):
        if start < width:
            block = vectors(start, stop)
            difference = ops.subtract(block, centre(block, start, stop), out=space[:, : stop - start])
            columns.append(layers.segments.squares(torch.as_tensor(difference), start))
    return torch.cat(columns, 1).cpu().numpy()


def between_models(rows: Sequence[int], models: Sequence[Arrays], P: int, device: torch.device) -> np.ndarray:
    """[rows, M] float64: ‖w_i − w_j‖² of the P parameters of the M `models` for each i of `rows` and the j after it."""
    result = np.zeros((len(rows), len(models)))

    def params(i: int) -> Tensor:
        return on_device(models[i]["value"], device)[:P]

    for first in range(0, len(rows), MODELS_AT_ONCE):
        some = range(first, min(first + MODELS_AT_ONCE, len(rows)))
        own = {row: (rows[row], params(rows[row])) for row in some}
        for j in range(rows[first] + 1, len(models)):
            other = params(j)
            for row, (i, model) in own.items():
                if i < j:
                    result[row, j] = squared_distance(model, other)
    return result


def squared_distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖², in float64; block by block on a CPU, where a block stays in a core's cache."""
    block = len(a) if a.is_cuda else tree.BLOCK
    parts = [(a[i : i + block].double() - b[i : i + block]).square_().sum() for i in range(0, len(a), block)]
    return float(torch.stack(parts).sum())
