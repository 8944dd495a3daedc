"""A user's class or function as a builder of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from raysim.lazy import nn
from raysim.models.staged import Inputs


def builder_of(factory: Callable[..., nn.Module], head: str | None = None) -> Callable[..., nn.Module]:
    """A builder for `MODELS` from a class or function that makes a module of `Inputs` and options; `head` is the path of
    the module that is its head, where that is not the last Linear."""

    def build(inputs: Inputs, **options: Any) -> nn.Module:
        return factory(inputs, **options)

    update_wrapper(build, factory, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    build.__signature__ = inspect.signature(factory)  # type: ignore[attr-defined]  # its parameters are the options
    build.head = head  # type: ignore[attr-defined]
    return build
