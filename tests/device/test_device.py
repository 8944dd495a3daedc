"""raysim on a CUDA device, on machines without one: the files check_*.py, in processes that have the emulated device.

To look at one of them: pytest tests/device/check_methods.py -k fedlws
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from device import emulated

HERE = Path(__file__).parent
TOGETHER = {  # in one process, which takes seconds to start; first those that look at what a process has done before
    "in process": ["numerics", "counts", "faults", "models", "precision", "batched", "graphs", "methods"],
    "on ray": ["ray"],
}


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    if reason := emulated.missing():
        pytest.skip(reason)
    emulated.built()


@pytest.mark.parametrize("where", TOGETHER)
def test_on_the_device(where: str, subtests: pytest.Subtests, tmp_path: Path) -> None:
    """Each check is a subtest, with its own output."""
    report = tmp_path / "report.xml"
    paths = [str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", f"--junitxml={report}"]
    command += ["-o", "junit_logging=all", "-o", "junit_log_passing_tests=false", f"--basetemp={tmp_path / 'checks'}"]
    command += [str(HERE / f"check_{name}.py") for name in TOGETHER[where]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert report.exists(), f"the process ended with {done.returncode}:\n{done.stdout}"
    for check in ElementTree.parse(report).iter("testcase"):
        with subtests.test(f"{check.get('classname')}::{check.get('name')}"):
            told = "\n".join(part.text or part.get("message", "") for part in check)
            assert check.find("failure") is None and check.find("error") is None, told
            if check.find("skipped") is not None:
                pytest.skip(told)
    assert done.returncode == 0, done.stdout


def test_every_file_is_run() -> None:
    checks = [f"check_{name}.py" for names in TOGETHER.values() for name in names]
    assert sorted(checks) == sorted(path.name for path in HERE.glob("check_*.py"))
