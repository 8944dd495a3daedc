"""Client states spill to disk and come back to the same bits."""

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import simulate, small_files, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.engine.local import LocalEngine
from raysim.engine.state_store import StateStore
from raysim.host.client_state import StateFormat

ALL = {"participation": 1.0}
STATEFUL = {  # a vector; several; models; both, and what the server remembers
    "scaffold": {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
    "fedala": {"client": ["fedala", "ditto"], "local": {"state": "persist"}},
    "fedamp": {"client": ["fedamp"], "rounds": ALL},
    "fedfomo": {"client": [{"fedfomo": {"models": 3}}], "rounds": ALL, "data": {"client_val_frac": 0.2}},
}


def arrays(seed: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "weights": rng.standard_normal(size).astype(np.float32), "logits": rng.standard_normal((size, 2)),
        "settled:scalar": np.array(seed % 2 == 0), "steps:scalar": np.array(seed), "none:empty": np.empty(0, "f4"),
    }  # fmt: skip


def same(stored, expected: dict[str, np.ndarray]) -> None:
    assert dict(stored).keys() == expected.keys()
    for name, array in expected.items():
        assert stored[name].dtype == array.dtype
        assert stored[name].shape == array.shape
        assert stored[name].tobytes() == array.tobytes()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2000), st.lists(st.integers(0, 30), min_size=1, max_size=12), st.data())
def test_keeps_what_was_put_within_its_limit(limit, sizes, data):
    state_store, held = StateStore(limit), {}
    for i, size in enumerate(sizes):
        held[i] = state_store.put(arrays(i, size))
        assert state_store.bytes <= limit
        if data.draw(st.booleans()):
            same(held[i // 2], arrays(i // 2, sizes[i // 2]))
    for i, stored in held.items():
        same(stored, arrays(i, sizes[i]))
    assert (state_store.spilled > 0) == (
        sum(a.nbytes for i, n in enumerate(sizes) for a in arrays(i, n).values()) > limit
    )


def test_what_was_used_longest_ago_goes_first():
    state_store = StateStore(2 * 400)
    a, b = (state_store.put({"x": np.zeros(100, np.float32)}) for _ in range(2))
    assert a["x"].shape == (100,)  # used: now b is the oldest
    c = state_store.put({"x": np.ones(100, np.float32)})
    assert [stored._number in state_store._memory for stored in (a, b, c)] == [True, False, True]


def test_files_go_with_their_handles_and_the_folder_with_the_store():
    state_store = StateStore(0)
    handles = [state_store.put(arrays(i, 5)) for i in range(3)]
    folder = state_store._folder
    assert len(list(folder.glob("*.safetensors"))) == 3
    del handles[1:]
    gc.collect()
    assert len(list(folder.glob("*.safetensors"))) == 1
    del handles, state_store
    gc.collect()
    assert not folder.exists()


def test_a_full_disk_is_named_and_loses_nothing():
    state_store = StateStore(0)
    kept = state_store.put(arrays(0, 5))
    with small_files(3000), pytest.raises(OSError, match="raysim-states-"):
        state_store.put(arrays(1, 1000))
    assert len(list(state_store._folder.glob("*safetensors*"))) == 1
    same(kept, arrays(0, 5))


SPILLS = """
import sys
from raysim.engine.state_store import StateStore
import numpy as np
state = StateStore(0).put({"x": np.ones(1000)})
print("spilled", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_spilled_goes_with_the_next_that_spills(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command, environment = [sys.executable, "-c", SPILLS], os.environ | {"TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    killed, living = (subprocess.Popen(command, env=environment, **pipes) for _ in range(2))
    try:
        for process in (killed, living):
            assert process.stdout.readline() == b"spilled\n"
        killed.kill()
        killed.wait()
        assert len(list(tmp_path.iterdir())) == 2
        state_store = StateStore(0)
        stored = state_store.put(arrays(0, 5))
        assert len(list(tmp_path.iterdir())) == 2  # that of the living, and the new one
        del stored, state_store
        gc.collect()
        [left] = tmp_path.iterdir()
        assert [*left.glob("*.safetensors")]
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()


def test_a_missing_name_is_a_key_error():
    for limit in (0, 1000):
        with pytest.raises(KeyError, match="y"):
            StateStore(limit).put({"x": np.zeros(1)})["y"]


@pytest.mark.parametrize("name", STATEFUL)
def test_a_run_that_spills_is_the_same_run(name, tmp_path):
    """With no room at all, and with room for some."""

    def run(limit: int, folder: Path) -> tuple[str, LocalEngine]:
        federation = simulate(tiny(**STATEFUL[name], engine={"local": {"state_bytes": limit}}), folder)
        assert federation.engine.state_store.bytes <= limit
        return federation.sha256(), federation.engine

    expected, roomy = run(1 << 30, tmp_path / "roomy")
    assert roomy.state_store.spilled == 0
    for limit in (0, 30_000):
        found, engine = run(limit, tmp_path / str(limit))
        assert found == expected
        assert engine.state_store.spilled > 0


def test_states_are_stored_as_they_are_made(tmp_path, monkeypatch):
    """Not at the end of a visit: a cohort's new states together may be more than fits."""
    made, waiting = StateFormat.pack, [0]

    def count(change: int, function):
        def counted(*args):
            waiting.append(waiting[-1] + change)
            return function(*args)

        return counted

    monkeypatch.setattr(StateFormat, "pack", count(1, made))
    monkeypatch.setattr(StateStore, "put", count(-1, StateStore.put))
    simulate(tiny(client=["ditto"], rounds=ALL), tmp_path)
    assert len(waiting) == 1 + 3 * 8 * 2
    assert max(waiting) == 1


# Ten models of 4.3 MB, as last models and in the clients' states, and as many again while a round replaces them.
LARGE: dict[str, Any] = {
    "client": [{"fedfomo": {"models": 2}}], "model": {"name": "mlp", "options": {"hidden": [1000, 1000]}},
    "data": {"partition": {"dirichlet_counts": {"alpha": 5.0, "clients": 10, "min_size": 2}}, "client_val_frac": 0.2},
    "rounds": {"participation": 1.0, "total": 2, "evaluate_every": 2}, "local": {"batch_size": 64},
}  # fmt: skip
ON_RAY = """
import json, sys
from pathlib import Path
import ray
from ray._private.internal_api import memory_summary
from conftest import simulate, small_files, tiny
from raysim import machine
from raysim.engine.ray.cluster import cluster
from raysim.engine.ray.engine import ray_engine

machine.cpus = lambda: 1  # for one actor
changes, folder, store = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with cluster(None, store) as address:
    size = int(ray.cluster_resources()["object_store_memory"])
    federation = simulate(tiny(**changes, engine={"ray": {"clients_per_actor": 10}}), folder, make_engine=ray_engine)
    print(json.dumps([federation.sha256(), size, memory_summary(address, stats_only=True)]))
"""


def test_ray_spills_what_exceeds_its_object_store(tmp_path):
    """In a cluster of the run's own, with the smallest store that Ray allows, which is the size asked for; the same bits as
    in one process that spills."""
    local = simulate(tiny(**LARGE, engine={"local": {"state_bytes": 20 << 20}}), tmp_path / "local")
    assert local.engine.state_store.spilled > 50 << 20
    command = [sys.executable, "-c", ON_RAY, json.dumps(LARGE), str(tmp_path / "ray"), str(76 << 20)]
    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=alone)
    assert run.returncode == 0, run.stderr
    sha256, size, memory = json.loads(run.stdout.splitlines()[-1])
    assert (sha256, size) == (local.sha256(), 76 << 20)
    assert "Spilled" in memory
