"""What the hooks of methods, metrics and instruments return or leave, checked where they do so.

A hook is what a user writes: `plan` of a weighting, `penalty` of a client method, the function of a metric. Checks look at
only types and shapes where a device would have to be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

from raysim.core.outputs import each, leaves
from raysim.errors import Explained
from raysim.lazy import Tensor, torch

STORAGE = ("value", "params", "buffers", "grad")  # of the model, which hooks write into


class HookError(Explained, ValueError):
    """A hook returned or left something that cannot be used; the message names both and says what to return."""


def misused(hook: Callable[..., Any], fault: str, way: str, t: int | None = None) -> HookError:
    """The error of a method's `hook`; `fault` and `way` complete a sentence each, `t` is the round, from 0."""
    owner = type(getattr(hook, "__self__", hook)).__name__
    when = "" if t is None else f"round {t + 1}: "
    return HookError(f"{when}{owner}.{hook.__name__} {fault}. {way}.")


def form(made: object) -> str:
    """What something is, in words."""
    if isinstance(made, torch.Tensor):
        return f"a tensor {[*made.shape]} {str(made.dtype).removeprefix('torch.')}"
    return "None" if made is None else f"a {type(made).__name__}"


def alike(made: Any, tensor: Tensor) -> bool:
    """Whether it is a tensor of the same shape and type as `tensor`."""
    return isinstance(made, torch.Tensor) and made.shape == tensor.shape and made.dtype == tensor.dtype


def check_vector(hook: Callable[..., Any], made: Any, like: Tensor, t: int) -> Tensor:
    """The model [S] that a server's `hook` has `made` in round t, of the same type as `like` [S]."""
    if not alike(made, like):
        raise misused(hook, f"returned {form(made)}", f"Return the new model, {form(like)} as target is", t)
    return made  # type: ignore[no-any-return]


def check_storage(hook: Callable[..., Any], run: Any, made: object = None) -> None:
    """That a client's run has the model's own storage, which a hook must write into, and that it `made` nothing else."""
    check_nothing(hook, made, "the model's own storage, as in run.params.copy_(...)")
    for name in STORAGE:
        if getattr(run, name) is not getattr(run.flat, name):
            raise replaced(hook, name)


def check_nothing(hook: Callable[..., Any], made: object, place: str) -> None:
    """That a hook which is to write into some `place` returned nothing."""
    if made is not None:
        raise misused(hook, f"returned {form(made)}, which nothing reads", f"Write into {place}")


def replaced(hook: Callable[..., Any], name: str) -> HookError:
    """The error of a hook that has put a tensor of its own in the place of the storage `name` of a run."""
    way = f"Nothing else reads it: write into the model's own, as in run.{name}.copy_(...)"
    return misused(hook, f"has put another tensor in the place of run.{name}", way)


def check_term(hook: Callable[..., Any], term: Any, of: Tensor) -> Any:
    """The `term` that a penalty adds to the objective; without a gradient where `of`, from which it is made, has one, it would
    change nothing."""
    a_tensor = isinstance(term, torch.Tensor)
    if term.dim() if a_tensor else not isinstance(term, Real):
        raise misused(hook, f"returned {form(term)}", "Return one number: a float, or a tensor [] such as a mean")
    if of.requires_grad and not (term.requires_grad if a_tensor else term == 0):
        way = "Make it of z, loss or run.model.parameters(), or add its gradient to run.grad in correct_grad. Where there is no "
        way += "term, return 0.0"
        raise misused(hook, "returned a number without a gradient, which changes nothing; run.params has none", way)
    return term


def check_type(
    hook: Callable[..., Any], made: Any, kind: type | tuple[type, ...], way: str, t: int | None = None
) -> Any:
    """What a hook has `made`, where it is of this `kind`."""
    if not isinstance(made, kind):
        raise misused(hook, f"returned {form(made)}", way, t)
    return made


def check_upload(hook: Callable[..., Any], made: object, upload: Any, value: Tensor) -> None:
    """What `finish` has left of an upload, whose model is like `value` [S], and that it `made` nothing else."""
    check_nothing(hook, made, "upload, as in upload.value = ...")
    way = f"It must be {form(value)}, as run.value is"
    if not alike(upload.value, value):
        raise misused(hook, f"left {form(upload.value)} as upload.value", way)
    sent = upload.sent
    if sent is not None and not (
        isinstance(sent, torch.Tensor) and sent.shape == value.shape and sent.dtype == torch.bool
    ):
        way = f"It must be a tensor {[*value.shape]} bool, true for what is sent, or None"
        raise misused(hook, f"left {form(sent)} as upload.sent", way)
    for kind in ("vectors", "scalars"):
        for name, given in getattr(upload, kind).items():
            if not isinstance(given, torch.Tensor):
                raise misused(hook, f"left {form(given)} as upload.{kind}[{name!r}]", "It must be a tensor")


def check_samples(made: Any, n: int, by: str) -> Tensor:
    """The numbers [n] that something, named `by`, has made of n samples."""
    try:
        numbers = torch.as_tensor(made)
    except (TypeError, ValueError, RuntimeError):
        numbers = None
    if numbers is None or numbers.shape != (n,):
        shown = form(made if numbers is None else numbers)
        raise HookError(f"{by} made {shown} of {n} samples. Return a tensor [{n}], one number for each, and no mean.")
    return numbers


@contextmanager
def unchanged(by: str, given: Any) -> Iterator[None]:
    """That something, named `by`, leaves the tensors that it is `given` as they are, which others read after it."""
    tensors = [tensor for tensor in leaves(given) if not tensor.is_inference()]  # which torch itself protects
    before = [tensor._version for tensor in tensors]
    yield
    if before != [tensor._version for tensor in tensors]:
        raise HookError(
            f"{by} changes the outputs or labels that it is given in place, and what reads them after it would be wrong. Let it "
            "make new tensors, as in outputs = outputs - 1, or work on outputs.clone()."
        )


def check_sums(made: Any, by: str) -> Any:
    """The sums of a metric, named `by`: a number or a tensor, or a tuple, list or mapping of them."""

    def check(part: Any) -> None:
        if not isinstance(part, torch.Tensor | Real):
            raise HookError(f"{by} made {form(part)} as one of its sums. Return numbers or tensors that add up.")

    each(check, made)
    return made
