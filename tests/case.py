"""What every method in the catalogue must bring to the property tests: one `Case`, in tests/cases/<name>.py.

A case is written from the paper's algebra alone. Its recomputation reads the files of one traced round and shares no
code with the package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load_file

State = dict[str, np.ndarray]  # float64, under state_dict names


@dataclass(frozen=True)
class Case:
    """How one method is tested. Configurations are changes to `conftest.tiny`."""

    method: str  # its name in the catalogue
    changes: dict[str, Any]  # the setting in which it is recomputed and compared between engines
    exact: dict[str, Any]  # the setting in which it collapses ...
    near_miss: dict[str, Any]  # ... and a setting close to it that must differ
    equals: dict[str, Any] = field(default_factory=dict)  # ... to this one: FedAvg
    recompute: Callable[[Traced], State] | None = None  # `after` of a traced round, parameters and buffers
    tolerance: float = 2e-6  # of the recomputation, relative to the largest entry of a tensor
    compared: Callable[[Any], Any] = lambda federation: federation.server.value  # what the collapse compares


@dataclass(frozen=True)
class TracedClient:
    """The files of one client of a traced round. Vectors of the model's size are split under its tensors' names, such as
    "scaffold.c.head.bias"."""

    id: int
    model: State  # as the aggregator sees it
    init: State  # where local training began
    before: State  # the client's state
    after: State
    upload: State  # further uploads
    steps: list[np.ndarray]  # rows of the data set of every batch
    samples: int


@dataclass(frozen=True)
class Traced:
    """One traced round, in float64, with the plain facts that a reader of the run folder has."""

    folder: Path
    t: int
    federation: Any  # facts only: data arrays, partition, configuration

    def load(self, name: str) -> State:
        path = self.folder / "traces" / f"round-{self.t + 1:04d}" / f"{name}.safetensors"
        return {k: v.astype(np.float64) for k, v in load_file(path).items()} if path.exists() else {}

    @cached_property
    def before(self) -> State:
        return self.load("before")

    @cached_property
    def server(self) -> State:
        """What the server shared and remembered before the round, as "shared.scaffold.head.bias" or "memory.feddyn...."."""
        return self.load("server")

    @cached_property
    def after(self) -> State:
        return self.load("after")

    @cached_property
    def clients(self) -> list[TracedClient]:
        """In order of id."""
        found = sorted((self.folder / "traces" / f"round-{self.t + 1:04d}").glob("client-*.init.safetensors"))
        return [self._client(int(path.name[7:11])) for path in found]

    @cached_property
    def bank(self) -> dict[int, State]:
        """The last model that each client sent before this round."""
        earlier = [Traced(self.folder, t, self.federation) for t in range(self.t)]
        return {client.id: client.model for round_ in earlier for client in round_.clients}

    def _client(self, client: int) -> TracedClient:
        name = f"client-{client:04d}"
        steps = self.load(f"{name}.samples")
        offsets = steps["offsets"].astype(int)
        values = steps["values"].astype(int)
        return TracedClient(
            client, self.load(name), self.load(f"{name}.init"), self.load(f"{name}.state.before"),
            self.load(f"{name}.state.after"), self.load(f"{name}.upload"),
            [values[a:b] for a, b in pairwise(offsets)],
            len(self.federation.partition.train[client]),
        )  # fmt: skip

    @cached_property
    def proxy_batches(self) -> list[np.ndarray]:
        """Rows of the data set of every batch that the server drew."""
        drawn = self.load("server.samples")
        return np.split(drawn["values"].astype(int), drawn["offsets"].astype(int)[1:-1])

    def at(self, t: int) -> Traced:
        """An earlier round of the same run."""
        return Traced(self.folder, t, self.federation)

    def note(self, method: str, name: str) -> np.ndarray:
        """What the method recorded in this round, as a vector in the order recorded."""
        rows = pq.read_table(self.folder / "notes").to_pylist()
        return np.array([r["value"] for r in rows if (r["round"], r["method"], r["name"]) == (self.t, method, name)])

    @property
    def sizes(self) -> np.ndarray:
        """[K] training samples."""
        return np.array([c.samples for c in self.clients], np.float64)

    @property
    def p(self) -> np.ndarray:
        """[K] weights by size."""
        return self.sizes / self.sizes.sum()

    @property
    def lr(self) -> float:
        local = self.federation.config.local
        return local.lr * local.lr_decay**self.t

    @property
    def parameters(self) -> list[str]:
        """Names of trainable tensors, in model order: what is no running statistic or counter."""
        return [n for n in self.before if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))]


# Layers of the default grouping in `conftest.tiny`'s model: a norm layer belongs to the layer before it.
UNITS = {
    "conv1": ["conv1.conv.weight", "conv1.conv.bias", "conv1.norm.weight", "conv1.norm.bias"],
    "conv2": ["conv2.conv.weight", "conv2.conv.bias", "conv2.norm.weight", "conv2.norm.bias"],
    "head": ["head.weight", "head.bias"],
}


def norm(state: State, names: list[str]) -> float:
    """L2 norm of some tensors together."""
    return float(np.sqrt(sum((state[n] ** 2).sum() for n in names)))


def minus(a: State, b: State) -> State:
    return {n: a[n] - b[n] for n in a}


def average(states: list[State], weights: np.ndarray, names: Mapping | list | None = None) -> State:
    """Σ w_k state_k."""
    return {
        n: sum(w * s[n] for w, s in zip(weights, states, strict=True))
        for n in (names if names is not None else states[0])
    }


def fedavg(round_: Traced, weights: np.ndarray | None = None) -> State:
    """The plain aggregate: everything averaged, counters by their maximum."""
    models = [c.model for c in round_.clients]
    result = average(models, round_.p if weights is None else weights)
    for name in result:
        if name.endswith("num_batches_tracked"):
            result[name] = np.max([m[name] for m in models], axis=0)
    return result


def cases() -> dict[str, Case]:
    """All cases by method."""
    folder = Path(__file__).parent / "cases"
    modules = [importlib.import_module(f"cases.{path.stem}") for path in sorted(folder.glob("[a-z]*.py"))]
    found = [case for module in modules for case in vars(module).values() if isinstance(case, Case)]
    return {case.method: case for case in found}
