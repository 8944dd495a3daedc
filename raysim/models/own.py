"""A user's class or function as a builder of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import update_wrapper
from inspect import Parameter
from typing import Any

from raysim.core.failures import breaks_device, out_of_memory
from raysim.core.hooks import form
from raysim.lazy import nn
from raysim.models.staged import Inputs, ModelError

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def builder_of(factory: Callable[..., nn.Module], head: str | None = None) -> Callable[..., nn.Module]:
    """A builder for `MODELS` from a class or function that makes a module; `head` is the path of the module that is its head,
    where that is not the last Linear.

    A first parameter without a default is given the `Inputs`; all others are options. Raises `ModelError` for a module that
    is made already; the builder, where the factory cannot be called like that or makes no module.
    """
    if isinstance(factory, type) and not issubclass(factory, nn.Module):
        raise ModelError(f"the class {factory.__name__} is no nn.Module.")
    if isinstance(factory, nn.Module):
        cls = type(factory).__name__
        raise ModelError(
            f"it is an instance of {cls}, and a run makes its models itself, under its seed. Give the class (model={cls}), or a "
            f"function that makes one (model=lambda: {cls}(...)). model.init begins with weights that are saved in a file."
        )
    options = [*inspect.signature(factory).parameters.values()]
    asks = bool(options) and options[0].default is Parameter.empty and options[0].kind in POSITIONAL

    def build(inputs: Inputs, **options: Any) -> nn.Module:
        return _made(factory, asks, inputs, options)

    update_wrapper(build, factory, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    its_own = [Parameter("_", Parameter.POSITIONAL_ONLY), *options[asks:]]  # the inputs; an option may have that name
    build.__signature__ = inspect.Signature(its_own)  # type: ignore[attr-defined]
    build.head = head  # type: ignore[attr-defined]
    return build


def _made(factory: Callable[..., nn.Module], asks: bool, inputs: Inputs, options: Mapping[str, Any]) -> nn.Module:
    """What a user's factory makes. It is no part of the builder, which travels to actors by its source."""
    try:
        made = factory(inputs, **options) if asks else factory(**options)
    except Exception as error:
        if isinstance(error, ModelError) or out_of_memory(error) or breaks_device(error):
            raise
        chosen = f" with model.options {options}" if options else ""
        why = f"cannot be made{chosen}: {type(error).__name__}: {error}"
        if isinstance(error, TypeError):  # as of arguments that it does not have
            first = next(iter(inspect.signature(factory).parameters), None)
            given = f"Its first parameter, {first}, has no default, and so is given raysim.Inputs. " if asks else ""
            why += (
                f". {given}model.options holds values for parameters that have a default; or give a function of no parameters, "
                "as in model=lambda: Net(16)"
            )
        raise ModelError(why) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"is made by a function that returns {form(made)}, and no nn.Module.")
    return made
