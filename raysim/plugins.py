"""Own methods, models, data sets, partitions, tasks, metrics, instruments, schedules, traits and availabilities under a name that
configurations can use.

A class or function is registered where it is written: in a script, in a notebook's cell, or in an installed package,
which can name it as an entry point instead (see `raysim.registry`). It travels to Ray's actors with the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from raysim.registry import REGISTRY, Table, origin_of

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
Role = Literal["client", "weighting", "server", "transform", "attack", "selection"]


def _in_brackets(decorator: Callable[P, R]) -> Callable[P, R]:
    """Refuses `@raysim.model` for `@raysim.model()`: it would put a function in the place of the class and register nothing."""

    @wraps(decorator)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if args and callable(args[0]):
            raise TypeError(f"write @raysim.{decorator.__name__}(), with brackets, above {args[0]!r}")
        return decorator(*args, **kwargs)

    return checked


def method(role: Role, name: str | None = None) -> Callable[[T], T]:
    """Decorate a frozen dataclass: a `ClientMethod`, `Weighting`, `ServerStep`, `Transform`, `Attack` or `Selection`.

    `name` is what configurations call it; by default the class's own, in lower case.
    """
    if role not in get_args(Role):
        roles = ", ".join(get_args(Role))
        raise ValueError(f'{role!r} is no role of a method; there are {roles}. Write @raysim.method("client").')
    return REGISTRY.add(role, name)


@_in_brackets
def model(name: str | None = None, head: str | None = None) -> Callable[[T], T]:
    """Decorate an `nn.Module` class or a function that makes one. A first parameter without a default is given the `Inputs`
    (shape of a sample, classes, vocabulary); the others are options.

    Its forward takes a batch of samples and returns outputs [B, C]. `head` names the module that makes the outputs of what
    methods call latents, such as "fc"; by default it is the nn.Linear whose output forward returns.
    """
    from raysim.models.own import builder_of

    return _registered("model", name, partial(builder_of, head=head))


@_in_brackets
def dataset(name: str | None = None) -> Callable[[T], T]:
    """Decorate a function that returns a `Dataset`, or what `as_dataset` makes one of, such as two torch data sets, for
    training and test; or a `Source` class."""
    from raysim.data.own import source_of

    return _registered("dataset", name, source_of)


@_in_brackets
def partition(name: str | None = None) -> Callable[[T], T]:
    """Decorate a function of the training labels [n] and a random state that returns each client's positions in them; or
    a `Scheme` class."""
    from raysim.data.own import scheme_of

    return _registered("partition", name, scheme_of)


@_in_brackets
def metric(
    name: str | None = None, higher_is_better: bool = True, value: Callable[[Any], Any] | None = None
) -> Callable[[T], T]:  # fmt: skip
    """Decorate a function of outputs [n, ...] and labels [n, ...] that returns a score [n] of every sample; the metric is
    their mean. With `value` the function returns sums of the batch instead, numbers or tensors of a fixed shape, and `value`
    makes the score of those of all batches: see `raysim.Metric`. `evaluate.metrics` of a configuration names it."""

    from raysim.core.score import Metric

    def register(function: T) -> T:
        word = name or function.__name__  # type: ignore[attr-defined]
        of: Any = function
        made = Metric(word, of, value, higher_is_better) if value else Metric.mean(word, of, higher_is_better)
        REGISTRY.register("metric", word, made, origin_of(function))
        return function

    return register


@_in_brackets
def task(name: str | None = None) -> Callable[[T], T]:
    """Decorate a `Task`, for a loss of one's own: a frozen dataclass whose fields have defaults. `data.task` of a
    configuration names it, or the `task` of a `Dataset`."""

    def register(cls: T) -> T:
        REGISTRY.register("task", name or cls.__name__.lower(), cls(), origin_of(cls))  # type: ignore
        return cls

    return register


@_in_brackets
def instrument(name: str | None = None) -> Callable[[T], T]:
    """Decorate an `Instrument`: a frozen dataclass that looks at every round and records numbers."""
    return REGISTRY.add("instrument", name)


@_in_brackets
def schedule(name: str | None = None) -> Callable[[T], T]:
    """Decorate a `Schedule`: a frozen dataclass whose `factor` a rate is multiplied by, round by round."""
    return REGISTRY.add("schedule", name)


@_in_brackets
def trait(name: str | None = None) -> Callable[[T], T]:
    """Decorate a `Trait`: a frozen dataclass whose `of` gives clients a speed, bandwidth or latency."""
    return REGISTRY.add("trait", name)


@_in_brackets
def availability(name: str | None = None) -> Callable[[T], T]:
    """Decorate an `Availability`: a frozen dataclass whose `state` says when clients can be asked."""
    return REGISTRY.add("availability", name)


def registered(kind: str, entry: Any, name: str | None = None) -> str:
    """The name of a model, a metric or a class of methods that was given as an object; its own one, where it has none.
    Raises `HookError` where an object is no metric."""
    from raysim.core.score import Metric
    from raysim.models.own import builder_of

    table: Table[Any] = REGISTRY.table(kind)
    for word, known in table.items():
        if name in (None, word) and (known is entry or (isinstance(known, Metric) and known.function is entry)):
            return word
    word = name or (
        entry.name if isinstance(entry, Metric) else getattr(entry, "__name__", type(entry).__name__).lower()
    )
    word = word if name or word.isidentifier() else kind  # of a lambda
    if word in table and word not in table.own:
        word = f"own_{word}"
    if kind == "model":
        entry = builder_of(entry)
    elif kind == "metric":
        decorated = (known for known in table.values() if isinstance(known, Metric) and known.function is entry)
        entry = _metric_of(next(decorated, entry), word)
    table[word] = entry  # in the place of what a cell of a notebook has given before
    return word


def _metric_of(entry: Any, name: str) -> Any:
    """A function, a `Metric` or an object of torchmetrics as the `Metric` of a name."""
    from raysim.core.hooks import HookError
    from raysim.core.score import Metric
    from raysim.core.torch_metrics import is_torchmetrics, of_torchmetrics

    if isinstance(entry, Metric):
        return replace(entry, name=name)
    if is_torchmetrics(entry):
        return of_torchmetrics(entry, name)
    if callable(entry) and not isinstance(entry, type):
        return Metric.mean(name, entry)
    what = f"the class {entry.__name__}" if isinstance(entry, type) else repr(entry)
    raise HookError(
        f"{what} is no metric. Give a function of outputs and labels, a raysim.Metric or an object of torchmetrics."
    )


def _registered(kind: str, name: str | None, adapt: Callable[[Any], Any]) -> Callable[[T], T]:
    """Register what `adapt` makes of a function; a class of raysim's own kind is taken as it is."""
    from raysim.data.partition.base import Scheme
    from raysim.data.sources.base import Source

    def register(entry: T) -> T:
        ready = isinstance(entry, type) and issubclass(entry, Source | Scheme)
        word = name or entry.__name__.lower()  # type: ignore[attr-defined]
        REGISTRY.register(kind, word, entry if ready else adapt(entry), origin_of(entry))
        return entry

    return register
