"""What a model returns: a tensor of outputs, or tensors in tuples, lists and mappings, for a task that knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raysim.late import Tensor, torch

Outputs = Any  # a tensor in nearly all models


def mapped(function: Callable[..., Tensor], *outputs: Outputs) -> Outputs:
    """`function` of the tensors at each place of some `outputs` of one structure, in that structure."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return function(*outputs)
    if isinstance(first, Mapping):
        return {key: mapped(function, *(part[key] for part in outputs)) for key in first}
    if isinstance(first, tuple | list):
        return tuple(mapped(function, *parts) for parts in zip(*outputs, strict=True))
    return first


def leaves(outputs: Outputs) -> list[Tensor]:
    """All tensors of `outputs`."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(add, outputs)
    return found
