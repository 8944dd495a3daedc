"""A torch module of somebody's own as a model of raysim."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from raysim.late import nn, torch
from raysim.models.staged import Inputs, ModelError

if TYPE_CHECKING:
    from raysim.models.model import Model

WAY_OUT = (
    "Give it two attributes, `features` and `head`, of which `head` is an nn.Linear and forward(x) is head(features(x)), "
    "or return an nn.Sequential that ends in an nn.Linear"
)


def builder_of(factory: Callable[..., nn.Module]) -> Callable[..., Model]:
    """A builder for `MODELS` from a class or function that makes a module of `Inputs` and options."""

    def build(inputs: Inputs, **options: Any) -> Model:
        return staged(factory(inputs, **options), inputs)

    update_wrapper(build, factory, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    build.__signature__ = inspect.signature(factory)  # type: ignore[attr-defined]  # its parameters are the options
    return build


def staged(module: nn.Module, inputs: Inputs) -> Model:
    """`module` as features and a head, with its own tensors. Raises `ModelError` where it has no such split."""
    from raysim.models.model import Model

    if isinstance(module, Model):
        return module
    features, head = getattr(module, "features", None), getattr(module, "head", None)
    if isinstance(module, nn.Sequential) and not isinstance(head, nn.Module):
        *first, head = module
        features = nn.Sequential(*first)
    if not (isinstance(features, nn.Module) and isinstance(head, nn.Linear)):
        raise ModelError(f"a {type(module).__name__} does not say what its head is. {WAY_OUT}")
    model = Model(OrderedDict(body=features, head=head))
    if len(list(model.parameters())) != len(list(module.parameters())):
        raise ModelError(f"a {type(module).__name__} has parameters outside its features and head. {WAY_OUT}")
    x = torch.zeros(2, *inputs.shape, dtype=None if inputs.vocab is None else torch.long)
    was_training = module.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            same = torch.equal(module.eval()(x), model.eval()(x))
        except RuntimeError as error:
            raise ModelError(
                f"samples of shape {inputs.shape} do not fit a {type(module).__name__}: {error}"
            ) from error
    model.train(was_training)
    if not same:
        raise ModelError(f"the forward of a {type(module).__name__} is not its head after its features. {WAY_OUT}")
    return model
