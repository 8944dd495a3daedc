"""raysim on a CUDA device, on machines without one: the files check_*.py, each in a process that has the emulated device.

To look at one of them: pytest tests/device/check_methods.py -k fedlws
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from device import emulated

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    if reason := emulated.missing():
        pytest.skip(reason)
    emulated.built()


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("check_*.py")))
def test_on_the_device(file: str) -> None:
    paths = [str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(HERE / file)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
