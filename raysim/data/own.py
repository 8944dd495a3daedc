"""A user's functions as data sets and partitions: their parameters become settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.given import as_dataset
from raysim.data.partition.base import Scheme
from raysim.data.partition.check import shards_of
from raysim.data.partition.shards import Shards
from raysim.data.sources.base import Source


def source_of(function: Callable[..., Any]) -> type[Source]:
    """A source from a function that returns a `Dataset`, or what `as_dataset` makes one of.

    The function's parameters are the source's settings, except `root`, which it is given where it has it: the folder of all
    data sets, a Path or None.
    """
    parameters = inspect.signature(function).parameters

    def load(self: Source, root: Path | None) -> Dataset:
        settings = {name: getattr(self, name) for name in parameters if name != "root"}
        found = function(**settings, **({"root": root} if "root" in parameters else {}))
        return as_dataset(found, function.__name__)

    source: type[Source] = _with_settings(function, Source, {"load": load}, skipped=("root",))
    return source


def scheme_of(function: Callable[..., Sequence[np.ndarray]]) -> type[Scheme]:
    """A partition from a function of the training labels [n] and a `numpy.random.RandomState`: positions in those labels,
    an array for each client. Its further parameters are settings; call one `clients` where it is their number."""
    parameters = [*inspect.signature(function).parameters]
    if len(parameters) < 2:
        raise DataError(f"{function.__name__}: give it the parameters labels and rng, and after them its settings")
    labels, rng, *settings = parameters

    def split(self: Scheme, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> Shards:
        shares = function(data.y[rows], rng, **{name: getattr(self, name) for name in settings})
        way = f"positions in the labels, 0..{len(rows) - 1}"
        shards = shards_of(shares, np.ones(len(rows), bool), function.__name__, way)
        return Shards(rows[shards.rows], shards.offsets)

    scheme: type[Scheme] = _with_settings(function, Scheme, {"split": split}, skipped=(labels, rng))
    return scheme


def _with_settings(function: Callable[..., Any], base: type, methods: dict[str, Any], skipped: Sequence[str]) -> Any:
    """A frozen dataclass under the function's name, with a field for each of its parameters. Raises DataError where a parameter
    has the name of what `base` does."""
    for name in inspect.signature(function).parameters:
        if name not in skipped and callable(getattr(base, name, None)):
            raise DataError(
                f"{function.__name__}: its parameter {name} has the name of a method of {base.__name__}; rename it"
            )
    hints = get_type_hints(function)
    fields = [
        (name, hints.get(name, Any), field() if p.default is p.empty else field(default=_hashable(p.default)))
        for name, p in inspect.signature(function).parameters.items()
        if name not in skipped
    ]
    fields.sort(key=lambda one: one[2].default is not MISSING)  # those without a default come first
    namespace = methods | {"__qualname__": function.__qualname__, "__doc__": inspect.getdoc(function)}
    made = make_dataclass(function.__name__, fields, bases=(base,), frozen=True, namespace=namespace)
    made.__module__ = function.__module__  # where its source is; Python 3.12 writes that of its caller
    return made


def _hashable(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default
