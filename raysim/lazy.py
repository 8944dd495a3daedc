"""PyTorch, torchvision's transforms, and of Arrow what computes, imported when something of them is first used. Their import
takes seconds, which a command that computes nothing does not wait for: modules of raysim take them from here.

`Tensor` is for annotations; code that asks what a value is uses `torch.Tensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

__all__ = ["F", "Tensor", "nn", "no_grad", "pc", "pq", "torch", "v2"]

P = ParamSpec("P")
T = TypeVar("T")


class _Lazy(ModuleType):
    """Stands for the module of this name."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)  # the next time it is found without a call
        return value


if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torchvision.transforms import v2
else:
    F, nn, torch = map(_Lazy, ("torch.nn.functional", "torch.nn", "torch"))
    v2 = _Lazy("torchvision.transforms.v2")
    pc, pq = map(_Lazy, ("pyarrow.compute", "pyarrow.parquet"))
    Tensor = Any


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: the function runs under `torch.no_grad()`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call
