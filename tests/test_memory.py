"""Nothing stays of a round: not in the driver, not in the hosts, not in the object store. Bytes over 1,500 rounds:
benchmarks/endurance.py."""

import gc
import sys
from collections.abc import Iterator
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from conftest import tiny
from ray import cloudpickle
from torch import Tensor

from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting
from raysim.engine.ray.actors import HostActor
from raysim.federation import Federation, MakeEngine
from raysim.methods import WEIGHTINGS

ROUNDS, EVERY, LOOKS = 30, 5, range(10, 31, 5)  # the first ten rounds warm up
MODEL = {"name": "mlp", "options": {"hidden": [1000]}}  # 69,004 parameters: Ray puts them into the object store
METHODS = {
    "models are summed as they come": {"local": {"batch_size": 32}},  # few steps, because rounds matter
    "models, uploads and states are kept": {
        "client": [{"scaffold": {"c_update": "mean_grad"}}, "fedala"],
        "local": {"momentum": 0.0, "weight_decay": 0.0, "batch_size": 32},
        "weighting": [{"fedldf": {"top_n": 2}}], "server": ["fedlws"],
    },
}  # fmt: skip


def usage(actor: HostActor | None = None) -> dict[str, int]:
    """Of this process; on a host, its actor is the argument. Arrays and tensors are counted where something holds them."""
    if actor is not None:
        actor.host.samples.clear()  # a host keeps the samples of its clients, and in any round it may be given another client
    gc.collect()
    objects = gc.get_objects()
    found = {"objects": len(objects)}
    held: set[int] = set()
    for i in range(0, len(objects), 10_000):
        kinds = [*map(type, ones := gc.get_referents(*objects[i : i + 10_000]))]
        arrays = {kind for kind in {*kinds} if issubclass(kind, np.ndarray | Tensor)}
        held.update(map(id, compress(ones, map(arrays.__contains__, kinds))))
    found["arrays"] = len(held)
    if ray.is_initialized():
        found["references"] = len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
    return found


def measure(changes: dict[str, Any], folder: Path, make_engine: MakeEngine | None) -> dict[str, list[dict[str, int]]]:
    """`usage` of every process in the rounds of LOOKS, each just after a checkpoint."""
    rounds = {"total": ROUNDS, "checkpoint_every": EVERY, "evaluate_every": EVERY}
    federation = Federation(tiny(**changes, model=MODEL, rounds=rounds), folder, make_engine=make_engine)
    found: dict[str, list[dict[str, int]]] = {}
    for t in range(1, ROUNDS + 1):
        federation.step()
        if t in LOOKS:
            found.setdefault("driver", []).append(usage())
            for i, host in enumerate(federation.engine.hosts if make_engine is not None else ()):
                found.setdefault(f"host {i}", []).append(ray.get(host.__ray_call__.remote(usage)))
    federation.close()
    return found


@pytest.fixture(autouse=True)
def _everything() -> Iterator[None]:
    """Modules may hold what stays."""
    gc.unfreeze()
    yield
    gc.freeze()


def check(found: dict[str, list[dict[str, int]]]) -> None:
    """What stays of each round is at least one more a round between any two looks. What is made once, when a host first sees a form
    of batch, say, is in one of them alone."""
    for process, looks in found.items():
        for what in looks[0]:
            grown = [after[what] - before[what] for before, after in pairwise(looks)]
            assert min(grown) < LOOKS.step / 2, (process, what, looks)


def test_what_stays_is_found(tmp_path: Path) -> None:
    stays: list[object] = []

    class Leaks(Weighting):
        """Keeps a model each round."""

        def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
            stays.append(server.value.numpy().copy())
            return prior

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WEIGHTINGS, "leaks", Leaks)
        found = measure({"weighting": ["leaks"]}, tmp_path, None)
    with pytest.raises(AssertionError, match="arrays"):
        check(found)


@pytest.mark.parametrize("name", METHODS)
def test_in_process(name, tmp_path):
    check(measure(METHODS[name], tmp_path, None))


@pytest.mark.parametrize("name", METHODS)
def test_ray(name, tmp_path, warm_ray):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # hosts cannot import this file
    engine = {"ray": {"clients_per_actor": 2}}
    check(measure({**METHODS[name], "engine": engine}, tmp_path, warm_ray))
