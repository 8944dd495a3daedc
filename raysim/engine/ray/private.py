"""A cluster that is started here belongs to this process and its children: nobody else can connect to it, also as another
user of this machine."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

PREFIX = "raysim-"
TOKEN = "RAY_AUTH_TOKEN_PATH"
METRICS = "RAY_enable_metrics_collection"
NO_METRICS = {METRICS: "0", "DASHBOARD_METRIC_PORT": "-1", "AUTOSCALER_METRIC_PORT": "-1"}  # no server has such a port


@contextmanager
def private() -> Iterator[str]:
    """Let Ray start a cluster that listens on the loopback interface alone, asks everybody for a token, and publishes no
    metrics (unless `METRICS` in the environment asks for them). Yields where its files go: in a folder that only this user
    can open, and that is removed at the end. The token lies there, too; Ray's processes, and those that this one starts,
    read where it is in their environment.
    """
    parent = Path(get_default_system_temp_dir())
    _remove_abandoned(parent)
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as folder,
        open(Path(folder) / "lock", "x") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # as long as this process lives
        token = Path(folder) / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        settings: dict[str, str | None] = {
            "RAY_AUTH_MODE": "token",
            TOKEN: str(token),
            "RAY_AUTH_TOKEN": None,  # would be taken before the path
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # which is to say: no node but this one, at 127.0.0.1
        }
        if METRICS not in os.environ:
            settings |= NO_METRICS
        before = {name: os.environ.get(name) for name in settings}
        many = ray_constants.ENABLE_RAY_CLUSTER
        try:
            _put(settings, many=False)
            yield f"{folder}/r"  # one letter: paths of sockets must be short. Ray lets everybody write there
        finally:
            _put(before, many)


@contextmanager
def without_helpers(dashboard: bool) -> Iterator[None]:
    """Let Ray start without the processes of its own that a private cluster has no use for: one that asks a cloud for
    machines, one that prints what workers print, and the dashboard's server, if that is not wanted. They take a second of
    CPU and 70 MB each."""
    helpers = ["start_monitor", "start_log_monitor"] + ["start_api_server"] * (not dashboard)
    before = {name: getattr(Node, name) for name in helpers}
    try:
        for name in helpers:
            setattr(Node, name, lambda *_, **__: None)
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError), open(folder / "lock") as lock:  # another user's, gone meanwhile, or in use
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


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
