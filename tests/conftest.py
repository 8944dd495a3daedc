"""A federation small enough for hundreds of runs, and one Ray session for all tests that need it."""

import atexit
import gc
import importlib.metadata
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from attached import pytest_runtest_makereport, pytest_runtest_protocol  # noqa: F401  # hooks
from hypothesis import settings

from raysim.config import Config, fingerprint, from_dict
from raysim.federation import Federation, MakeEngine

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(
    prefix="rt", dir="/tmp"
)  # where nobody's `raysim up` is found; short: sockets
atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of the suite's many processes compiles raysim anew,
sys.dont_write_bytecode = False  # and this one the tests
os.environ.setdefault("RAY_worker_niceness", "0")  # else a test's actors wait for the CPUs of all other tests
os.environ |= {  # a busy machine needs minutes; a node that is gone refuses, and is found out in a second
    "RAY_raylet_start_wait_time_s": "240", "RAY_gcs_server_port_wait_time_s": "240", "RAY_py_gcs_connect_timeout_s": "240",
    "RAY_gcs_rpc_server_connect_timeout_s": "240", "RAY_worker_register_timeout_seconds": "240",
    "RAY_agent_register_timeout_ms": "240000", "RAY_health_check_timeout_ms": "240000",
    "RAY_health_check_period_ms": "300", "RAY_health_check_initial_delay_ms": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills actors for the memory of other processes
}  # fmt: skip
torch.set_num_threads(1)  # as in actors; hypothesis is neither random nor impatient, because machines may be busy
os.fsync = lambda descriptor: None  # no test cuts the power, and waiting for the disk is half of a small run
importlib.metadata.version = cache(importlib.metadata.version)  # no test installs a package, and a run asks for seven
settings.register_profile("raysim", derandomize=True, deadline=None)
settings.load_profile("raysim")


needs_plain_path = pytest.mark.skipif(
    " " in sys.executable, reason="Ray's jobs and trials need a Python whose path has no space"
)


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end. To look through them again and again takes a tenth of the suite's time."""
    gc.collect()
    gc.freeze()


def tiny(**changes: Any) -> Config:
    """Eight unequal clients, three a round, a BatchNorm net of 2k parameters, momentum, a decaying learning rate.

    `changes` are top-level keys; mappings are merged one level deep.
    """
    raw: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "data": {
            "name": {"synthetic": {"samples": 260, "shape": [1, 8, 8], "classes": 4}},
            "partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 8, "min_size": 6}},
        },
        "model": {"name": "tiny_bn_cnn"},
        "rounds": {"total": 3, "participation": 0.4, "evaluate_every": 3, "checkpoint_every": 100},
        "local": {"batch_size": 8, "lr": 0.1, "lr_decay": 0.9, "momentum": 0.9, "weight_decay": 1e-4},
        "engine": "local",
    }
    for key, value in changes.items():
        merge = isinstance(value, Mapping) and isinstance(raw.get(key), Mapping)
        raw[key] = {**raw[key], **value} if merge else value
    return from_dict(raw)


def simulate(config: Config, out: Path, **kwargs: Any) -> Federation:
    """Run a whole simulation and close it; the federation is returned to be looked at."""
    federation = Federation(config, out, **kwargs)
    try:
        while federation.step() is not None:
            pass
        federation.finish()
    finally:
        federation.close()
    return federation


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Federation]:
    """Returns the finished run of `tiny(**changes)`, the same one to all tests: they only look at it."""
    runs: dict[str, Federation] = {}

    def run(**changes: Any) -> Federation:
        config = tiny(**changes)
        key = fingerprint(config)
        if key not in runs:
            runs[key] = simulate(config, tmp_path_factory.mktemp("ran"))
        return runs[key]

    return run


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file below the folder, and what is in it; of a table also what its compressed pages hold."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += f"{pq.read_table(path).to_pydict()} {pq.read_schema(path).metadata}".encode()
        yield path, content


def table(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The columns of one of a finished run's tables; what is null is NaN or None."""
    rows = pq.read_table(folder / name)
    return {column: rows[column].to_numpy() for column in rows.column_names}


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """No file grows beyond so many bytes: what is written then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Ray gives up on a node that it has started after 30 seconds, whatever the environment says."""

    def wait(*args: Any) -> Any:
        for _ in range(2100):
            with suppress(RuntimeError):
                return get_node(*args)
            time.sleep(0.1)
        return get_node(*args)

    return wait


@contextmanager
def one_node(**resources: int) -> Iterator["Cluster"]:
    """This process connected to a Ray cluster of one node with these resources."""
    import ray
    from ray.cluster_utils import Cluster

    from raysim.engine.ray.private import forking, without_helpers

    folder = Path(tempfile.mkdtemp(dir=os.environ["RAY_TMPDIR"]))
    services = ray._private.services
    with (
        pytest.MonkeyPatch.context() as patch,
        forking(folder),
        without_helpers(dashboard=False),  # of which one reads every log all the time
    ):
        patch.setattr(services, "get_node", patient(services.get_node))
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **resources})
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator["Cluster"]:
    """A cluster with room for many small actors; tests may add nodes. However busy the machine is, what comes is waited for."""
    with pytest.MonkeyPatch.context() as patch, one_node(num_cpus=16, object_store_memory=512 << 20) as cluster:
        for limit in ("engine.START_SECONDS", "engine.ROOM_SECONDS", "driver.RELEASE_SECONDS"):
            patch.setattr(f"raysim.engine.ray.{limit}", 10**6)
        yield cluster


@pytest.fixture(scope="session")
def warm_ray(cluster: "Cluster") -> MakeEngine:
    """Makes Ray engines whose host processes go on to serve the next one: starting them takes most of a test's time."""
    from raysim.engine.ray.engine import ray_engine
    from raysim.engine.ray.pool import Pool

    return partial(ray_engine, pool=Pool())


@pytest.fixture
def idle(cluster: "Cluster", warm_ray: MakeEngine) -> Callable[[], bool]:
    """The cluster, from the moment when nobody has a share of it any more; returns whether that is so again."""
    import ray

    def idle() -> bool:
        return bool(ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])

    warm_ray.keywords["pool"].clear()  # type: ignore[attr-defined]
    while not idle():  # what other tests have killed is on its way out
        time.sleep(0.1)
    return idle


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FIFO for `command.held`, at which clients of the method `waits` wait, here as in commands."""
    from sabotage import Waits

    from raysim.methods import CLIENTS

    monkeypatch.setitem(CLIENTS, "waits", Waits)
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data that some checks read; users of raysim do not have it."""
    root = os.environ.get("RAYSIM_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("RAYSIM_DATA names no folder of real data")
    return Path(root)


OPTIONS: dict[str, dict[str, Any]] = {  # of every measure, so that it is soon taken
    "correlation": {},
    "histogram": {"bins": 11},
    "rescaling": {"points": 5},
    "hessian": {"rounds": (2, 4), "top": 2, "samples": 32, "tolerance": 0.1},
    "slice": {"points": 5, "samples": 32, "tolerance": 0.1},
    "simplex": {"rounds": (1, 4), "step": 0.25, "samples": 32},
    "transport": {"samples": 20, "components": 4},
    "trajectory": {"client": 2, "grid": 4},
    "confusion": {},
    "personalization": {},
}


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds with all instruments, of which every measure was taken."""
    from raysim.analysis import MEASURES
    from raysim.analysis.measure import write
    from raysim.federation.saved import SavedRun

    folder = tmp_path_factory.mktemp("measured")
    watched = [{"coherence": {"groups": {"low": [0, 1, 2, 3]}}}, "heterogeneity", "balance", "similarity", "objective"]
    rounds = {"total": 4, "participation": 1.0, "evaluate_every": 2}
    simulate(
        tiny(
            name="measured", rounds=rounds, server=["fedlws"], record={"instruments": watched, "traces": "rounds"},
            data={"client_test_frac": 0.25}, evaluate={"personal": "after_init"},
        ),
        folder,
    )  # fmt: skip
    for name, options in OPTIONS.items():
        write(name, MEASURES[name](**options), SavedRun(folder))
    return folder
