"""The cluster: joined or started, and what it has free."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # Ray's public functions add the nodes up
from ray.exceptions import AuthenticationError

from raysim import machine
from raysim.clock import CLOCK
from raysim.engine.ray.placement import Node, Resources
from raysim.engine.ray.private import METRICS, TOKEN, admitted, forking, persistent_cluster, private, without_helpers
from raysim.errors import ConfigError

# Of Ray's own processes, and of each worker; fewer end in an abort, or in a hang that nothing can end.
THREADS = 160, 40
LOST_SECONDS = 30  # without an answer; after a minute, Ray itself ends the process, without an error that could be read
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


@contextmanager
def cluster(
    address: str | None = None, object_store: int | None = None, dashboard: bool = False, metrics: bool = False
) -> Iterator[str]:  # fmt: skip
    """Join the cluster at `address` or RAY_ADDRESS, or the one that `raysim up` keeps, or start one on this machine, with
    an `object_store` of so many bytes and perhaps Ray's `dashboard` and `metrics`, and stop it at the end. Inside another
    `cluster`, that one serves. Yields where other processes join it: those that this one starts, if the cluster is its own."""
    joined = address or cluster_address()
    with ExitStack() as stack:
        if not ray.is_initialized():
            if joined and object_store:
                raise ConfigError(
                    f"engine.ray.state_bytes: the cluster at {joined} has its own object store; leave it out, or, if "
                    "`raysim up` started it, `raysim down` first"
                )
            stack.enter_context(_joined(joined) if joined else own_cluster(object_store, dashboard, metrics))
        if metrics and os.environ.get(METRICS) == "0":  # as `admitted` has said of it, here or in the process above
            raise ConfigError(
                "record.sinks: ray_metrics: the cluster that serves this run was started without metrics. Start it with "
                f"{METRICS}=1 in the environment (after `raysim down`, if `raysim up` did), or let the run start one"
            )
        yield joined or ray.get_runtime_context().gcs_address


@contextmanager
def own_cluster(object_store: int | None = None, dashboard: bool = False, metrics: bool = False) -> Iterator[Path]:
    """Start a private cluster, and stop it at the end; yields its folder."""
    with private(metrics) as folder, forking(folder):
        try:  # from here on: Ctrl-C may come while Ray starts
            _start(folder, object_store, dashboard)
            yield folder
        finally:
            ray.shutdown()


@contextmanager
def _joined(address: str) -> Iterator[None]:
    found = persistent_cluster()
    with admitted(found.folder, found.metrics) if found and found.address == address else nullcontext():
        _join(address)
        try:
            yield
        finally:
            ray.shutdown()


def _join(address: str) -> None:
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, AuthenticationError, ValueError) as error:  # the last one of a port that Ray does not take
        raise ConnectionError(
            f"{error}. If the cluster asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN where "
            "~/.ray/auth_token is not the cluster's"
        ) from None


def _start(folder: Path, object_store: int | None, dashboard: bool, again: bool = True) -> None:
    """Start a cluster whose files lie in `folder`; `again` once if it does not come up, as on a busy machine, and with all of
    Ray's processes, which this Ray may need."""
    free, needed = machine.free_threads(), THREADS[0] + THREADS[1] * (machine.cpus() + 2)
    if free is not None and free < needed:
        raise ConnectionError(
            f"Ray needs about {needed} threads on this machine, and only {free} more may be started (ulimit -u, or the pids "
            "limit of the container). Raise the limit, or --set engine=local"
        )
    if full := machine.full_disk(folder):
        raise ConnectionError(f"Ray cannot start: {full}; or --set engine=local")
    files = folder / "r"  # one letter: paths of sockets must be short. Ray lets all users write there
    try:
        with without_helpers(dashboard) if again else nullcontext():
            context = ray.init(
                address="local", num_cpus=machine.cpus(), include_dashboard=dashboard, object_store_memory=object_store,
                _temp_dir=str(files), **QUIET,
            )  # fmt: skip
    except Exception as error:  # Ray raises a bare one where its processes are not up in time
        ray.shutdown()
        if again:
            _start(folder, object_store, dashboard, again=False)
            return
        raise ConnectionError(
            f"Ray did not start on this machine: {error}. Is it busy? Try again, or --set engine=local"
        ) from None
    if dashboard:
        print(f"Ray's dashboard: http://{context.dashboard_url}, with the token in {os.environ[TOKEN]}", flush=True)


def cluster_address() -> str | None:
    """The cluster a run would join, or None where it would start its own."""
    return os.environ.get("RAY_ADDRESS") or ((found := persistent_cluster()) and found.address) or None


def free_resources() -> Resources:
    """What the cluster this process is connected to has free, node by node."""
    free = available_resources_per_node()
    nodes = [
        Node(id, of.get("CPU", 0.0), of.get("GPU", 0.0), of.get("memory", float("inf"))) for id, of in free.items()
    ]
    return Resources(tuple(sorted(nodes, key=lambda node: node.id)))


class Watch:
    """Whether the cluster that this process is connected to is still there. Ray waits for one that is not, and at last ends
    the process."""

    def __init__(self) -> None:
        node: Any = ray._private.worker._global_node
        assert node is not None
        self._raylet, self._gcs = node.raylet_socket_name, node.gcs_address
        # That of another machine may be started again, or its network may come back.
        self._patience = 0 if node.all_processes else LOST_SECONDS
        self._answered = CLOCK.now()

    def gone(self) -> str | None:
        """The process of Ray's that has ended, as a clause; None where none has."""
        with socket.socket(socket.AF_UNIX) as end:
            try:
                end.connect(self._raylet)
            except (ConnectionRefusedError, FileNotFoundError):
                return "its raylet on this machine has ended"
        if machine.answers(self._gcs):
            self._answered = CLOCK.now()
        elif CLOCK.now() - self._answered >= self._patience:
            return f"its control store (gcs_server) does not answer at {self._gcs}"
        return None
