"""`ray job submit`, by which a run is started on a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from conftest import needs_plain_path, simulate, tiny

from raysim.config import to_yaml

RAY = Path(sys.executable).with_name("ray")


@contextmanager
def head(environment: dict[str, str]) -> Iterator[str]:
    """A cluster of one node that takes jobs, at an address that it chooses."""
    command = [
        RAY, "start", "--head", "--block", "--port=0", "--include-dashboard=true", "--dashboard-port=0",
            "--dashboard-agent-listen-port=0",
        "--node-ip-address=127.0.0.1", "--num-cpus=2", "--num-gpus=0", f"--object-store-memory={100 << 20}",
        "--disable-usage-stats",
    ]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        told = ""
        for line in process.stdout:
            told += line
            if found := re.search(r"http://[\w.]+:\d+", line):
                Thread(target=process.stdout.read, daemon=True).start()
                yield found[0]
                process.terminate()
                return
        raise AssertionError(told)


@needs_plain_path
def test_a_job_has_the_bits_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/tiny.yaml").write_text(to_yaml(tiny(engine={"ray": {"clients_per_actor": 3}})))
    with tempfile.TemporaryDirectory(prefix="rj", dir="/tmp") as folder:  # a short path: sockets
        token = Path(folder, "token")
        token.write_text("0" * 64)
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        with head(environment) as address:
            submit = [RAY, "job", "submit", "--address", address, "--working-dir", tmp_path / "job", "--"]
            job = [*submit, sys.executable, "-m", "raysim", "run", "tiny.yaml", "--out", tmp_path / "run"]
            while True:  # the agent that starts jobs comes up after the dashboard
                done = subprocess.run(job, env=environment, capture_output=True, text=True, check=False)
                if "No available agent" not in done.stderr:
                    break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 3/3" in done.stdout
    sha256 = json.loads((tmp_path / "run/result.json").read_text())["sha256"]
    assert sha256 == simulate(tiny(), tmp_path / "local").sha256()
