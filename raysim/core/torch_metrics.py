"""Metrics of torchmetrics, whose states add up. raysim does not import the package: who gives an object of it has done so."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

from raysim.core.hooks import HookError
from raysim.core.score import Metric, Sums
from raysim.lazy import Tensor, torch


def is_torchmetrics(entry: object) -> bool:
    """Whether it is a `torchmetrics.Metric`."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(entry, package.Metric)


def of_torchmetrics(metric: Any, name: str) -> Metric:
    """The score that a `torchmetrics.Metric` computes of its states, which are the sums; the object itself stays as it is.
    Raises `HookError` where a state is not a sum."""
    added = sys.modules["torchmetrics"].utilities.dim_zero_sum
    of = type(metric).__name__
    if not metric._defaults:
        raise HookError(f"{of} has no states of its own that add up over batches and clients. Give what it is made of.")
    for state, default in metric._defaults.items():
        if isinstance(default, list):
            raise HookError(
                f"{of} keeps every sample (its state {state!r} is a list), and raysim adds up sums over batches and clients. "
                "Curves and the areas below them are sums with thresholds, as in thresholds=200."
            )
        if metric._reductions[state] is not added:
            raise HookError(
                f"{of} has a state {state!r} that is not a sum, so that batches and clients do not add up. "
                "raysim.Metric(name, sums, value) makes a score of sums of your own."
            )
    its = copy.deepcopy(metric)
    its.reset()
    better = metric.higher_is_better is not False
    return Metric(name, _States(its), _Value(copy.deepcopy(its)), better, probabilities=True)


@dataclass(frozen=True)
class _States:
    metric: Any

    def __call__(self, outputs: Tensor, y: Tensor) -> Sums:
        metric = self.metric.to(y.device)
        metric.reset()
        metric.update(outputs, y)
        return metric.metric_state


@dataclass(frozen=True)
class _Value:
    metric: Any

    def __call__(self, sums: Sums) -> Any:
        metric = copy.deepcopy(self.metric)  # another thread may compute another round's
        for state, default in metric._defaults.items():
            setattr(metric, state, torch.as_tensor(sums[state], dtype=default.dtype))
        metric._update_count = 1  # else it warns that it has seen nothing
        return metric.compute()
