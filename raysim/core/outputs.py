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
            made = [each(function, part) for part in first]
        else:
            made = [each(function, *places) for places in zip(*parts, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else tuple(made)  # a named tuple has its names again
    if isinstance(first, Mapping):
        named = {key: each(function, *[part[key] for part in parts]) for key in first}
        return named if type(first) is dict else type(first)(named)  # type: ignore[call-arg]
    return function(*parts)


def mapped(function: Callable[..., Any], *outputs: Outputs) -> Outputs:
    """`function` of the tensors at each place of some `outputs` of one structure, in that structure; else what is there."""
    tensor = torch.Tensor
    return each(lambda *at: function(*at) if isinstance(at[0], tensor) else at[0], *outputs)


def floats(outputs: Outputs) -> Outputs:
    """`outputs` whose numbers of 16 bits are fp32; integers stay."""
    return mapped(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, outputs)


def latent_rows(z: Tensor) -> Tensor:
    """[n, D] of latents: one of each sample, [B, D] or a feature map [B, C, H, W], or of each position of a sequence [B, T, D]."""
    return z.flatten(1) if z.ndim > 3 else z.flatten(0, -2)


def leaves(outputs: Outputs) -> list[Tensor]:
    """All tensors of `outputs`."""
    found: list[Any] = []
    each(found.append, outputs)
    return [part for part in found if isinstance(part, torch.Tensor)]
