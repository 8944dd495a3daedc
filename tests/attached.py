"""What raysim and Ray printed during a test that fails, as sections of its report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Command

TAIL = 50  # lines of each of Ray's logs
LOGS = (
    "python-core-driver-*.log",
    "raylet.*",
    "gcs_server.*",
    "worker-*.*",
    "dashboard_agent.*",
    "runtime_env_agent.*",
)
BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Commands that a test leaves running end with it."""
    item.stash[BEGAN] = time.time() - 1  # the times of files are coarser
    try:
        return (yield)
    finally:
        while Command.started:
            Command.started.pop().kill()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report: pytest.TestReport = yield
    if report.failed:
        report.sections += [*_outputs(), *_logs(Path(os.environ["RAY_TMPDIR"]), item.stash[BEGAN])]
    return report


def _outputs() -> Iterator[tuple[str, str]]:
    for command in Command.started:
        left = "".join(f"still there: {pid} {line}\n" for pid, line in command.processes().items())
        yield f"raysim {' '.join(command.words)}", command.output + left


def _logs(folder: Path, began: float) -> Iterator[tuple[str, str]]:
    """The ends of what Ray has written below the folder since the test began."""
    for path in sorted({path for name in LOGS for path in folder.rglob(f"session_*/logs/{name}")}):
        if path.stat().st_mtime >= began and (lines := path.read_text(errors="replace").splitlines(keepends=True)):
            yield str(path.relative_to(folder)), "".join(lines[-TAIL:])
