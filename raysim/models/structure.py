"""What raysim needs to know of a module that it did not write: which tensors a round may change, and which part is the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.core.arrays import tensor_of
from raysim.core.flat import inexact
from raysim.lazy import Tensor, nn, torch
from raysim.models.staged import ModelError


@dataclass(frozen=True)
class Structure:
    """What `structure_of` finds."""

    head: str | None
    """Path of the module that makes the outputs, and whose inputs are the latents; None where there is none."""
    counted: frozenset[str] = frozenset()
    """Tables of integers that training changes."""


def structure_of(
    model: nn.Module, again: Callable[[], nn.Module], samples: np.ndarray, head: str | None = None
) -> Structure:
    """What `model` does with a batch of training `samples`; `head` is what its author says of it.

    The batch is given to a model that `again` makes, so that `model` stays as it is; one of raysim's own is not called.
    Raises `ModelError` with the reason where the model cannot be trained as it is.
    """
    from raysim.models.model import Model

    _check_types(model)
    if isinstance(model, Model):
        return Structure([*model._modules][-1])
    model, x = again(), tensor_of(samples)
    modules = dict(model.named_modules())
    if head is not None and head not in modules:
        raise ModelError(
            f"its head is said to be {head!r}, but it has no such module. It has {', '.join(modules)[2:]}."
        )
    made: list[tuple[str, Any]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output, path=path: made.append((path, output)))
        for path, module in modules.items()
        if path == head or (head is None and isinstance(module, nn.Linear))
    ]
    with torch.no_grad():
        outputs = called(model.eval(), x)
        calls = [path for path, _ in made]
        found = next((path for path, output in reversed(made) if _same_storage(output, outputs)), None) or head
        for hook in hooks:
            hook.remove()
        if head is not None and head not in calls:
            raise ModelError(f"its head is said to be {head!r}, but its forward does not call it.")
        tables = {name: t.clone() for name, t in model.state_dict().items() if t.dim() and not t.is_floating_point()}
        called(model.train(), x)
    state = model.state_dict()
    counted = frozenset(name for name, before in tables.items() if not torch.equal(before, state[name]))
    for name, counter in state.items():
        exact = counter.is_floating_point() or (counter.dim() and name not in counted) or not counter.numel()
        if not exact and not torch.equal(counter, counter.float().to(counter.dtype)):
            raise ModelError(f"{name}: {inexact(counter)}.")
    return Structure(found if found in calls and calls.count(found) == 1 else None, counted)


def called(model: nn.Module, x: Tensor) -> Any:
    """What `model` makes of a batch `x`. Raises `ModelError` where it fails, with what its forward should be."""
    try:
        return model(x)
    except Exception as error:
        batch = f"a batch {list(x.shape)} {str(x.dtype).removeprefix('torch.')} of training samples"
        mode = "in training, " if model.training else ""
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{mode}its forward does not take {batch} ({reason}).{_advice(model, error)}") from error


def _advice(model: nn.Module, error: Exception) -> str:
    if isinstance(error, TypeError) and "required positional argument" in str(error):
        return " raysim calls forward(x) with only the samples; labels go to the task."
    recurrent = isinstance(model, nn.Sequential) and any(isinstance(part, nn.RNNBase) for part in model)
    if recurrent and isinstance(error, TypeError):
        return (
            " A recurrent layer returns a pair (outputs, state), which no nn.Sequential hands on: "
            "write a module whose forward takes the outputs out of it."
        )
    return ""


def _check_types(model: nn.Module) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise ModelError(
                f"its state_dict has {name}, a {kind}, and raysim averages tensors. Leave it out of the state_dict."
            )
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ModelError(f"{name} is {_type(tensor)}; raysim trains in float32. Make it so with .float().")
        if tensor.is_complex() or tensor.is_sparse or tensor.is_quantized:
            raise ModelError(f"{name} is {_type(tensor)}, which raysim cannot average. Store it as float32 numbers.")


def _type(tensor: Tensor) -> str:
    kind = "sparse" if tensor.is_sparse else "quantized" if tensor.is_quantized else ""
    return f"{kind} {str(tensor.dtype).removeprefix('torch.')}".strip()


def _same_storage(output: Any, outputs: Any) -> bool:
    """Whether the output of a module is what the model returns, or another view of it."""
    both = isinstance(output, torch.Tensor) and isinstance(outputs, torch.Tensor)
    return both and output.untyped_storage().data_ptr() == outputs.untyped_storage().data_ptr()


def outside(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `model` that its state_dict does not have, by their paths: buffers that are not persistent, and
    attributes."""
    inside = set(model.state_dict())
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for name, value in (own | dict(module.named_buffers(recurse=False))).items():
            full = f"{path}.{name}".lstrip(".")
            if full not in inside:
                yield full, value
