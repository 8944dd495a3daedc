"""What a model returns: a tensor of outputs, or tensors in tuples, lists and mappings, for a task that knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raysim.lazy import Tensor, torch

Outputs = Any  # a tensor in nearly all models


def each(function: Callable[..., Any], *parts: Any) -> Any:
    """`function` of what is at each place of some `parts` of one structure (tuples, lists, mappings), in that structure."""
    first = parts[0]
    if isinstance(first, tuple) or isinstance(first, list):  # noqa: SIM101  # twice as fast as one call: scores pass here
        if len(parts) == 1:
            return tuple([each(function, part) for part in first])
        return tuple([each(function, *places) for places in zip(*parts, strict=True)])
    if isinstance(first, Mapping):
        return {key: each(function, *[part[key] for part in parts]) for key in first}
    return function(*parts)


def mapped(function: Callable[..., Any], *outputs: Outputs) -> Outputs:
    """`function` of the tensors at each place of some `outputs` of one structure, in that structure; else what is there."""
    tensor = torch.Tensor
    return each(lambda *at: function(*at) if isinstance(at[0], tensor) else at[0], *outputs)


def leaves(outputs: Outputs) -> list[Tensor]:
    """All tensors of `outputs`."""
    found: list[Any] = []
    each(found.append, outputs)
    return [part for part in found if isinstance(part, torch.Tensor)]
