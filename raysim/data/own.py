"""Functions of somebody's own as data sets and partitions: their parameters become settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.partition.base import Scheme
from raysim.data.sources.base import Source


def source_of(function: Callable[..., Any]) -> type[Source]:
    """A source from a function that returns a `Dataset`, or a pair of map-style torch data sets for training and test.

    Samples of the latter are pairs (tensor, class). The function's parameters are the source's settings, except `root`, which it is
    given where it has it: the folder of all data sets, a Path or None.
    """
    parameters = inspect.signature(function).parameters

    def load(self: Source, root: Path | None) -> Dataset:
        settings = {name: getattr(self, name) for name in parameters if name != "root"}
        found = function(**settings, **({"root": root} if "root" in parameters else {}))
        return found if isinstance(found, Dataset) else from_torch(function.__name__, *found)

    source: type[Source] = _with_settings(function, Source, {"load": load}, skipped=("root",))
    return source


def from_torch(name: str, train: Any, test: Any = None) -> Dataset:
    """Map-style torch data sets of (tensor, integer label) pairs as one `Dataset`. Raises DataError naming the sample."""
    import torch

    x: list[np.ndarray] = []
    y: list[int] = []
    for split, samples in (("training", train), ("test", test if test is not None else ())):
        for i in range(len(samples)):
            try:
                sample, label = samples[i]
                x.append(torch.as_tensor(sample).numpy())
                y.append(int(label))
            except (TypeError, ValueError) as error:
                raise DataError(f"{name}: {split} sample {i} is no pair of a tensor and an integer: {error}") from error
            if x[-1].shape != x[0].shape:
                raise DataError(f"{name}: {split} sample {i} is {x[-1].shape}, but the first one is {x[0].shape}")
    if not x:
        raise DataError(f"{name}: there is no sample")
    classes = getattr(train, "classes", None) or range(max(y) + 1)
    samples = np.ascontiguousarray(np.stack(x))
    return Dataset(
        name, samples if samples.dtype == np.uint8 else samples.astype(np.float32), np.array(y, np.int64), len(train),
        tuple(str(c) for c in classes),
    )  # fmt: skip


def scheme_of(function: Callable[..., Sequence[np.ndarray]]) -> type[Scheme]:
    """A partition from a function of the training labels [n] and a `numpy.random.RandomState`: positions in those labels,
    an array for each client. Its further parameters are settings; call one `clients` where it is their number."""
    labels, rng, *settings = inspect.signature(function).parameters

    def split(self: Scheme, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        shares = function(data.y[rows], rng, **{name: getattr(self, name) for name in settings})
        taken = (
            np.concatenate([np.asarray(share, np.int64) for share in shares]) if len(shares) else np.empty(0, np.int64)
        )
        if taken.size and (taken.min() < 0 or taken.max() >= len(rows) or len(np.unique(taken)) < taken.size):
            raise DataError(
                f"{function.__name__}: positions must lie in 0..{len(rows) - 1} and belong to one client each"
            )
        return [rows[np.asarray(share, np.int64)] for share in shares]

    seed = ("seed", int | None, field(default=None))
    scheme: type[Scheme] = _with_settings(function, Scheme, {"split": split}, skipped=(labels, rng), more=[seed])
    return scheme


def _with_settings(
    function: Callable[..., Any], base: type, methods: dict[str, Any], skipped: Sequence[str], more: Sequence[Any] = ()
) -> Any:
    """A frozen dataclass under the function's name, with a field for each of its parameters."""
    hints = get_type_hints(function)
    fields = [
        (name, hints.get(name, Any), field() if p.default is p.empty else field(default=_hashable(p.default)))
        for name, p in inspect.signature(function).parameters.items()
        if name not in skipped
    ]
    fields.sort(key=lambda one: one[2].default is not MISSING)  # those without a default come first
    namespace = methods | {"__module__": function.__module__, "__doc__": inspect.getdoc(function)}
    return make_dataclass(function.__name__, [*fields, *more], bases=(base,), frozen=True, namespace=namespace)


def _hashable(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default
