"""Squared distances between vectors, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raysim.core import tree
from raysim.core.arrays import on_device
from raysim.core.layers import LayerMap
from raysim.host.messages import Arrays
from raysim.host.trained import Blocks, TrainedModels
from raysim.lazy import Tensor, torch

MODELS_AT_ONCE = 128  # whose distances to the others are taken at once, at most
SHARES = 16  # blocks that there are of few models as well, for several hosts
GROUP_BYTES = 1 << 29  # of models in float64 that are held for that


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


def blocks_of(models: int, P: int) -> list[range]:
    """Rows that are worked on at once, of so many `models` with P parameters: what they are depends on nothing else."""
    rows = min(MODELS_AT_ONCE, -(-models // SHARES), max(1, GROUP_BYTES // (8 * P)))
    return [range(first, min(first + rows, models)) for first in range(0, models, rows)]


def between_models(blocks: Sequence[range], models: Sequence[Arrays], P: int, device: torch.device) -> list[np.ndarray]:
    """Of some of the `blocks_of` the models [rows, M − first row] float64: ‖w_i − w_j‖² of the P parameters, for i of a
    block's rows and the j from the first of these on. What is not above the diagonal means nothing.

    By products, ‖x_i‖² + ‖x_j‖² − 2⟨x_i, x_j⟩ with x = w − w_0: as exact as w_0's distances from the others allow. Products
    have the same shapes and order on every host.
    """
    M, every = len(models), blocks_of(len(models), P)
    at_once = max(1, GROUP_BYTES // (8 * P * len(every[0])))  # blocks that are read once and met by all
    first = on_device(models[0]["value"], device)[:P].double()
    found = [torch.empty(len(block), M - block.start, dtype=torch.float64, device=device) for block in blocks]

    def read(rows: range) -> Tensor:
        result = torch.empty(len(rows), P, dtype=torch.float64, device=device)
        for i, row in zip(rows, result, strict=True):
            torch.sub(on_device(models[i]["value"], device)[:P], first, out=row)
        return result

    for start in range(0, M, len(every[0]) * at_once):
        columns = range(start, min(start + len(every[0]) * at_once, M))
        meeting = [(block, out) for block, out in zip(blocks, found, strict=True) if block.start < columns.stop]
        group = read(columns) if meeting else first
        for block, out in meeting:
            own = group[block.start - start : block.stop - start] if block.start >= start else read(block)
            others = group[max(block.start - start, 0) :]
            squares = [torch.stack([row.dot(row) for row in rows]) for rows in (own, others)]
            place = out[:, max(start - block.start, 0) : columns.stop - block.start]
            place.copy_((squares[0][:, None] + squares[1]).addmm_(own, others.T, alpha=-2).clamp_min_(0))
    return [out.cpu().numpy() for out in found]
