"""The models of the papers as ordered stages, the last a linear head; and torchvision's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, get_type_hints

from raysim.lazy import nn
from raysim.models import torchvision
from raysim.models.cnn import alexnet, amazon_mlp, bn_cnn, fedavg_cnn, lenet, mlp, simple_cnn, small_cnn, tiny_bn_cnn
from raysim.models.densenet import densenet121
from raysim.models.resnet import resnet8, resnet18, resnet20, resnet56, resnet110, wrn56_4
from raysim.models.staged import Inputs, ModelError
from raysim.models.text import char_gru, fasttext, text_cnn
from raysim.models.torchvision import resnet18_imagenet
from raysim.models.vgg import vgg9, vgg16
from raysim.models.vit import vit
from raysim.registry import REGISTRY, Table

__all__ = ["MODELS", "Inputs", "ModelError", "assemble", "build", "builder", "option_types"]

MODELS: Table[Callable[..., nn.Module]] = REGISTRY.table("model").fill(
    {
        builder.__name__: builder
        for builder in (
            *(simple_cnn, bn_cnn, mlp, lenet, alexnet, fedavg_cnn, small_cnn, tiny_bn_cnn, amazon_mlp),
            *(resnet8, resnet20, resnet56, resnet110, wrn56_4, resnet18, resnet18_imagenet),
            *(densenet121, vit, vgg9, vgg16, fasttext, text_cnn, char_gru),
        )
    }
)


def build(name: str, inputs: Inputs, **options: object) -> nn.Module:
    """The model of that name in MODELS, else torchvision's; `torchvision.NAME` is always torchvision's.

    Weights come from torch's global generator, in registration order. ModelError says which name, option or input
    shape does not fit.
    """
    return assemble(name, builder(name), inputs, options)


def builder(name: str) -> Callable[..., nn.Module]:
    """What builds the model of that name: a function of inputs and options. Raises ModelError for an unknown name."""
    if name in MODELS:
        return MODELS[name]
    architectures = torchvision.architectures()
    if name.removeprefix("torchvision.") in architectures:
        return partial(torchvision.classifier, name.removeprefix("torchvision."))
    raise ModelError(f"unknown model '{name}'.{_nearest(name, [*MODELS, *architectures])}")


def option_types(builder: Callable[..., nn.Module]) -> dict[str, Any]:
    """What a builder's annotations say that its options may be, of those that say it in names that can be looked up."""
    found: dict[str, Any] = {}
    names = getattr(builder, "__globals__", {})
    for name, parameter in list(signature(builder).parameters.items())[1:]:
        with suppress(NameError, AttributeError, TypeError):
            shim = SimpleNamespace(__annotations__={name: parameter.annotation}, __globals__=names)
            found |= get_type_hints(shim, include_extras=True)
    return {name: hint for name, hint in found.items() if hint is not Parameter.empty}


def assemble(
    name: str, builder: Callable[..., nn.Module], inputs: Inputs, options: Mapping[str, object]
) -> nn.Module:  # fmt: skip
    """What `builder` makes; errors name the model. A process that got the builder need not know the name."""
    _, *known = signature(builder).parameters
    for option in options:
        if option not in known:
            takes = f" It takes {', '.join(known) or 'none'}."
            raise ModelError(f"{name}: unknown option '{option}'.{_nearest(option, known)}{takes}")
    try:
        return _apart(builder(inputs, **options))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:  # the latter two of a size that no machine has
        if not options:
            raise
        raise ModelError(f"{name}: cannot be made with model.options {dict(options)}: {error}") from error


def _apart(model: nn.Module) -> nn.Module:
    """Each parameter has memory of its own: two of one memory would be one in a step of PyTorch's and two in a vector."""
    places: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter) or parameter.is_meta or not parameter.numel():
            continue
        if (first := places.setdefault(parameter.data_ptr(), name)) != name:
            raise ModelError(
                f"{name} and {first} are two parameters with one memory. Tie them by making them one: "
                "self.decoder.weight = self.encoder.weight, or let one be a copy: .clone()."
            )
    return model


def _nearest(word: str, words: list[str]) -> str:
    close = ", ".join(f"'{match}'" for match in get_close_matches(word, words))
    return f" Did you mean {close}?" if close else ""
