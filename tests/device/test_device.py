"""raysim on a CUDA device, on machines without one: the files check_*.py, in processes that have the emulated device.

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
TOGETHER = [  # in one process, which takes seconds to start; first those that look at what a process has done before
    ["check_numerics.py", "check_counts.py", "check_faults.py", "check_models.py", "check_batched.py"],
    ["check_methods.py"],
    ["check_ray.py"],
]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    if reason := emulated.missing():
        pytest.skip(reason)
    emulated.built()


@pytest.mark.parametrize("files", TOGETHER, ids=" ".join)
def test_on_the_device(files: list[str]) -> None:
    paths = [str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [str(HERE / file) for file in files]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_every_file_is_run() -> None:
    assert {file for files in TOGETHER for file in files} == {path.name for path in HERE.glob("check_*.py")}
