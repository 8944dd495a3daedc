"""Embeddings whose row of padding has no gradient, where several models are one under vmap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from raysim.lazy import F, Tensor, torch


def padding_detached() -> AbstractContextManager[Any]:
    """Embeddings that run meanwhile leave their `padding_idx` out of the gradient themselves: vmap gives PyTorch's kernel the
    rows of all models as one matrix, of which it leaves out that row of the first model only."""
    mode: AbstractContextManager[Any] = _mode()()
    return mode


@cache
def _mode() -> type:
    from torch.overrides import TorchFunctionMode

    class Detached(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            given = kwargs or {}
            if function is F.embedding:
                return _of_function(*args, **given)
            if function is torch.embedding:
                return _of_kernel(*args, **given)
            return function(*args, **given)

    return Detached


def _of_function(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    made = F.embedding(input, weight, None, *args, **kwargs)
    return made if padding_idx is None else _without(made, input, padding_idx % len(weight))


def _of_kernel(weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any) -> Tensor:
    made = torch.embedding(weight, indices, -1, *args, **kwargs)
    return made if padding_idx < 0 else _without(made, indices, padding_idx)


def _without(rows: Tensor, indices: Tensor, padding: int) -> Tensor:
    """`rows` [..., D] of `indices` [...], those of `padding` without a gradient."""
    return torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)
