"""A private cluster that outlives the command that starts it. A process of its own, the keeper, has started it and ends it:
`python -m raysim.engine.ray.keeper`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray._private.grpc_utils import grpc, init_grpc_channel  # type: ignore[attr-defined]  # what Ray itself imports
from ray._private.state import state
from ray.core.generated import node_manager_pb2
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

from raysim.engine.ray.cluster import own_cluster
from raysim.engine.ray.private import (
    PREFIX,
    PRELOADED,
    RECORD,
    PersistentCluster,
    metrics_wanted,
    parent,
    persistent_cluster,
)
from raysim.errors import ConfigError
from raysim.machine import cpus
from raysim.store.lock import alone

POLL = 0.2  # seconds
MOST_IDLE = "RAY_num_workers_soft_limit"
END_SECONDS = 60.0  # for a keeper to stop its cluster; it is killed then, and its cluster with it


def up(dashboard: bool = False) -> tuple[PersistentCluster, str]:
    """Start a cluster that runs join from now on; returns it, and what the keeper has printed. Raises `ConfigError` where
    they would join another, and `ConnectionError` where it does not come up."""
    if address := os.environ.get("RAY_ADDRESS"):
        raise ConfigError(f"RAY_ADDRESS is {address}: runs join the cluster there. Unset it first.")
    command = [sys.executable, "-m", __name__, *["--dashboard"] * dashboard]
    with alone(parent() / f".{PREFIX}up-{os.geteuid()}.lock"), tempfile.TemporaryFile("w+") as said:
        if found := persistent_cluster():
            raise ConfigError(f"a cluster is up already, at {found.address}. Runs join it; `raysim down` ends it.")
        keeper = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )  # no terminal's Ctrl-C reaches it
        try:
            while not ((found := persistent_cluster()) and found.keeper == keeper.pid):
                if keeper.poll() is not None:
                    said.seek(0)
                    raise ConnectionError(said.read().strip().rpartition("\n")[2] or "the cluster did not come up")
                time.sleep(POLL)
        except BaseException:
            keeper.terminate()
            raise
        said.seek(0)
        return found, said.read()


def down() -> PersistentCluster | None:
    """End the persistent cluster, and every run on it; returns it, None where there is none."""
    if found := persistent_cluster():
        deadline = time.monotonic() + END_SECONDS
        with suppress(ProcessLookupError):
            os.kill(found.keeper, signal.SIGTERM)
            while _lives(found.keeper):
                if time.monotonic() > deadline:
                    os.kill(found.keeper, signal.SIGKILL)
                time.sleep(POLL)
    persistent_cluster()  # removes what a killed one left
    return found


def keep(dashboard: bool) -> None:
    """Keep a cluster up until SIGTERM, or until it is broken, with processes for the next run: its driver and a host a CPU."""
    asked, processes, ended = threading.Event(), min(cpus(), PRELOADED) + 1, 0
    os.chdir("/")  # the folder of the shell may be removed
    os.environ[MOST_IDLE] = str(processes)
    with own_cluster(dashboard=dashboard) as folder:
        signal.signal(signal.SIGTERM, lambda *_: asked.set())  # in the place of Ray's
        PersistentCluster(folder, ray.get_runtime_context().gcs_address, os.getpid(), metrics_wanted()).write()
        node = ray._private.worker._global_node
        assert node is not None
        _start_workers(processes - cpus())  # Ray itself has started one a CPU
        while not (asked.wait(POLL) or node.dead_processes()):
            if (now := sum(job["IsDead"] for job in state.job_table())) > ended:
                ended = now
                _start_workers(processes)  # for those that have ended with their run; Ray ends what are too many
        (folder / RECORD).unlink(missing_ok=True)  # no run is to join what ends now


def _start_workers(count: int) -> None:
    """Ask Ray for idle workers, which import what `private` says; raises nothing, for without them a run is only slower."""
    node = ray.nodes()[0]
    messages: Any = node_manager_pb2  # generated, without types
    request = messages.PrestartWorkersRequest(num_workers=max(0, count))  # in Python, which is the default
    with (
        suppress(grpc.RpcError),
        init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel,
    ):
        NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=10)


def _lives(process: int) -> bool:
    """Whether it is there, and is not waiting for its parent to ask how it ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    try:
        keep("--dashboard" in sys.argv)
    except ConnectionError as error:
        sys.exit(str(error))
