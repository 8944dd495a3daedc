"""Memory does not grow with rounds: not the driver's, not the hosts', not the object store's."""

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from conftest import tiny
from ray import cloudpickle

from raysim.federation import Federation, MakeEngine, local_engine

WARM_UP, ROUNDS, EVERY = 30, 80, 10
MODEL = {"name": "mlp", "options": {"hidden": [1000]}}  # 69,004 parameters: Ray puts them into the object store
METHODS = {
    "models are summed as they come": {"local": {"batch_size": 32}},  # few steps, because rounds matter
    "models, uploads and states are kept": {
        "client": [{"scaffold": {"c_update": "mean_grad"}}, "fedala"],
        "local": {"momentum": 0.0, "weight_decay": 0.0, "batch_size": 32},
        "weighting": [{"fedldf": {"top_n": 2}}], "server": ["fedlws"],
    },
}  # fmt: skip


def allocated_bytes() -> int:
    """What this process has asked of its allocator and not given back. Resident memory has holes besides, that widen."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2  # of glibc
    mallinfo2.restype = type("mallinfo2", (ctypes.Structure,), {"_fields_": [("counts", ctypes.c_size_t * 10)]})
    counts = mallinfo2().counts
    return int(counts[4] + counts[7])  # hblkhd, in maps of their own, and uordblks, in the heaps of all threads


def usage(*_: Any) -> dict[str, int]:
    """Of this process; on a host, its actor is the argument."""
    gc.collect()
    found = {"bytes": allocated_bytes(), "objects": len(gc.get_objects())}
    if ray.is_initialized():
        found["references"] = len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
    return found


def measure(changes: dict[str, Any], folder: Path, make_engine: MakeEngine) -> dict[str, list[dict[str, int]]]:
    """`usage` of every process at the checkpoints after the warm-up."""
    rounds = {"total": ROUNDS, "checkpoint_every": EVERY, "evaluate_every": 5}
    federation = Federation(tiny(**changes, model=MODEL, rounds=rounds), folder, make_engine=make_engine)
    found: dict[str, list[dict[str, int]]] = {}
    for t in range(1, ROUNDS + 1):
        federation.step()
        if t >= WARM_UP and t % EVERY == 0:
            found.setdefault("driver", []).append(usage())
            for i, host in enumerate(federation.engine.hosts if make_engine is not local_engine else ()):
                found.setdefault(f"host {i}", []).append(ray.get(host.__ray_call__.remote(usage)))
    federation.close()
    return found


def check(found: dict[str, list[dict[str, int]]]) -> None:
    """A median is compared: what is kept each round grows between all checkpoints, a table of Ray's that doubles only once."""
    for process, usages in found.items():
        growth = {what: np.median(np.diff([u[what] for u in usages])) / EVERY for what in usages[0]}  # a round
        # A model that were kept each round would be 276,000 bytes. Ray's buffers come and go with 1,000,000.
        assert growth["bytes"] < 100_000, (process, usages)
        # One object that stays each round would be 1.
        assert growth["objects"] < 0.5, (process, usages)
        assert abs(growth.get("references", 0)) < 0.05, (process, usages)


@pytest.mark.parametrize("name", METHODS)
def test_in_process(name, tmp_path):
    check(measure(METHODS[name], tmp_path, local_engine))


@pytest.mark.parametrize("name", METHODS)
def test_ray(name, tmp_path, warm_ray):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # hosts cannot import this file
    engine = {"ray": {"clients_per_actor": 2}}
    check(measure({**METHODS[name], "engine": engine}, tmp_path, warm_ray))
