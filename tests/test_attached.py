"""A failing test shows what its commands and Ray have printed."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import os
from pathlib import Path
from command import Command

def test_that_fails():
    logs = Path(os.environ["RAY_TMPDIR"], "raysim-x", "r", "session_1", "logs")
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("".join(f"line {number} of Ray\\n" for number in range(100)))
    (logs / "worker-2.err").touch()
    (logs / "raylet.out").write_text("of an earlier test")
    os.utime(logs / "raylet.out", (0, 0))
    os.mkfifo("never.yaml")
    waits = Command("run", "never.yaml")
    Path("pid").write_text(str(waits.process.pid))
    assert Command("explain", "fedavgg").end() == 0

def test_that_passes():
    assert not Command.started
    assert not Path("/proc", Path("pid").read_text()).exists()
"""


def test_what_was_printed_is_attached(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of commands, the last lines of Ray's logs; and what still runs ends with its test."""
    monkeypatch.setenv("RAY_TMPDIR", str(pytester.mkdir("ray")))
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "attached", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*- raysim run never.yaml -*",
            "*- raysim explain fedavgg -*",
            "raysim explain: nothing is named 'fedavgg'. Did you mean 'fedavg'? *",
            "*- raysim-x/r/session_1/logs/worker-1.err -*",
            "line 50 of Ray",
            "line 99 of Ray",
        ]
    )
    for absent in ("line 49 of Ray", "*- raysim-x/*/worker-2.err -*", "of an earlier test"):
        result.stdout.no_fnmatch_line(absent)
