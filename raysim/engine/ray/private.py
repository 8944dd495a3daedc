"""A cluster that is started here belongs to this process and its children: no other process can connect to it, also as another
user of this machine."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

from raysim.engine.ray import forked
from raysim.machine import answers, cpus
from raysim.store.atomic import replacing
from raysim.store.temporary import own, owned

PREFIX = "raysim-"
RECORD, TOKEN_FILE = "cluster.json", "token"
TOKEN = "RAY_AUTH_TOKEN_PATH"
METRICS = "RAY_enable_metrics_collection"
FORKED = [
    "torch", "safetensors.torch", "numpy", "pydantic", "yaml", "asyncio", "jsonschema", "requests",
    "google.protobuf.descriptor_pb2",
]  # fmt: skip
"""What takes seconds to import and starts no thread: done once on this machine, in the process whose forks are Ray's workers.
Not Ray itself, which reads a worker's variables when it is imported, and not raysim, which may change while the cluster
stays."""
PRELOAD = ["pyarrow.parquet", "pyarrow.compute", *FORKED[:5]]
"""What Ray's workers import before they are asked for anything."""
PRELOADED = 16  # CPUs; Ray starts a worker for each, and on more of them most would do it for nothing
NO_METRICS = {METRICS: "0", "DASHBOARD_METRIC_PORT": "-1", "AUTOSCALER_METRIC_PORT": "-1"}  # no server has such a port
AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
NO_AGENT = 'sh -c "exec tail --pid=$PPID -f /dev/null"'  # ends with the raylet, which does not live without it
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
_HERE = [sys.prefix, str(Path(__file__).parents[2])]  # this Python and this raysim


@dataclass(frozen=True)
class PersistentCluster:
    """A private cluster that `raysim up` has left running."""

    folder: Path
    address: str
    keeper: int  # the process that ends it
    metrics: bool = False  # whether it publishes them

    def write(self) -> None:
        """Let `persistent_cluster` find it."""
        with replacing(self.folder / RECORD) as path:
            path.write_text(json.dumps([_HERE, self.address, self.keeper, self.metrics]), encoding="utf-8")


def persistent_cluster() -> PersistentCluster | None:
    """The cluster that this user keeps on this machine, with this Python and this raysim. What is left of dead ones is
    removed."""
    for folder in owned(parent(), PREFIX):
        with suppress(OSError, ValueError):  # no record; or gone meanwhile
            here, address, keeper, *metrics = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            if here == _HERE and answers(address):
                return PersistentCluster(folder, address, keeper, metrics == [True])
    return None


def metrics_wanted() -> bool:
    """Whether the environment asks for the metrics of a private cluster."""
    return os.environ.get(METRICS, "").lower() in ("1", "true")


@contextmanager
def private(metrics: bool = False) -> Iterator[Path]:
    """Let Ray start a cluster that listens only on the loopback interface, asks for a token, and publishes no
    metrics (unless `metrics`, or `METRICS` in the environment, asks for them). Yields where its files go: a folder that
    only this user can open, and that is removed at the end. The token lies there, too."""
    owned(parent(), PREFIX)  # removes what others have left
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent(), ignore_cleanup_errors=True) as name,
        own(folder := Path(name)),
    ):
        token = folder / TOKEN_FILE
        token.touch(0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        with admitted(folder, metrics or metrics_wanted()):
            yield folder


@contextmanager
def admitted(folder: Path, metrics: bool) -> Iterator[None]:
    """Ray in this process, and in those that it starts, belongs to the private cluster of this folder: it finds the token
    there, and no node but this one. `metrics`: whether the cluster publishes them."""
    settings: dict[str, str | None] = {
        "RAY_AUTH_MODE": "token",
        TOKEN: str(folder / TOKEN_FILE),
        "RAY_AUTH_TOKEN": None,  # would be taken before the path
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # which is to say: no node but this one, at 127.0.0.1
    }
    settings |= {METRICS: "1"} if metrics else NO_METRICS
    if cpus() <= PRELOADED:
        settings["RAY_preload_python_modules"] = ",".join(PRELOAD)
    before = {name: os.environ.get(name) for name in settings}
    many = ray_constants.ENABLE_RAY_CLUSTER
    try:
        _put(settings, many=False)
        yield
    finally:
        _put(before, many)


@contextmanager
def without_helpers(dashboard: bool) -> Iterator[None]:
    """Let Ray start without the processes of its own that a private cluster has no use for: one that asks a cloud for
    machines, one that prints what workers print, and, if no dashboard is wanted, its server, and the agents that serve it,
    metrics and runtime environments. They take a second of CPU and 70 MB each."""
    helpers = ["start_monitor", "start_log_monitor"] + ["start_api_server"] * (not dashboard)
    replaced: dict[Any, dict[str, Any]] = {Node: dict.fromkeys(helpers, lambda *_, **__: None)}
    if not dashboard and os.environ.get(METRICS) == "0" and sys.platform == "linux":
        replaced[services] = {"start_ray_process": _without_agents(services.start_ray_process)}
    before = {owner: {name: getattr(owner, name) for name in new} for owner, new in replaced.items()}
    try:
        for owner, new in replaced.items():
            for name, method in new.items():
                setattr(owner, name, method)
        yield
    finally:
        for owner, old in before.items():
            for name, method in old.items():
                setattr(owner, name, method)


def _without_agents(start: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's `start`, which lets a raylet start processes that do nothing in place of its agents, and know that they have no
    ports."""

    def started(command: list[str], kind: str, *args: Any, **kwargs: Any) -> Any:
        if kind == ray_constants.PROCESS_TYPE_RAYLET:
            options = dict(part.partition("=")[::2] for part in command)
            for port in AGENT_PORTS:
                Path(options["--session_dir"], f"{port}_{options['--node_id']}").write_text("-1")
            command = [f"{name}={NO_AGENT}" if (name := part.partition("=")[0]) in AGENTS else part for part in command]
        return start(command, kind, *args, **kwargs)

    return started


@contextmanager
def forking(folder: Path) -> Iterator[None]:
    """Let a node that Ray starts meanwhile take forks as its workers, of a server that lives as long as this context, with its
    socket in this folder. Where the server does not come up, or has died, workers are processes as ever."""
    if sys.platform != "linux":
        yield
        return
    path = str(folder / "f")
    with socket.socket(socket.AF_UNIX) as listener:  # it listens from the start: who comes early waits
        listener.bind(path)
        listener.listen(1024)
        command = [sys.executable, forked.__file__, "serve", str(listener.fileno()), *FORKED]
        one_thread = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with open(folder / "forks.log", "x") as log:
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[listener.fileno()], env=one_thread,
                start_new_session=True,
            )  # fmt: skip
    start, outer = Node.start_raylet, os.environ.get(forked.SERVER)

    def start_raylet(node: Node, *args: Any, **kwargs: Any) -> None:
        node._ray_params.worker_path = forked.__file__
        start(node, *args, **kwargs)

    try:
        os.environ[forked.SERVER] = path
        setattr(Node, "start_raylet", start_raylet)  # noqa: B010  # mypy
        yield
    finally:
        setattr(Node, "start_raylet", start)  # noqa: B010
        if outer is None:
            del os.environ[forked.SERVER]
        else:
            os.environ[forked.SERVER] = outer
        server.stdin.close()  # type: ignore[union-attr]  # a pipe, as asked for
        server.wait()


def parent() -> Path:
    """Where the folders of private clusters lie."""
    return Path(get_default_system_temp_dir())


def _put(settings: dict[str, str | None], many: bool) -> None:
    """Set or unset variables of the environment, and let Ray, which has read them as it was imported, read them again."""
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ray_constants.ENABLE_RAY_CLUSTER = many
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
