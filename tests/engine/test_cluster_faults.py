"""A private cluster loses one of Ray's own processes, or its machine has no memory or disk left: the command ends with a
sentence, and the run goes on to the same bits."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import PYTHONPATH, Command, Python, held
from conftest import tiny
from typer.testing import CliRunner

import raysim
from raysim.cli.app import app
from raysim.config import Config, to_yaml
from raysim.machine import FULL_AT

RAY = {"ray": {"clients_per_actor": 2, "state_bytes": 80 << 20}}
PATIENT = {"RAY_health_check_period_ms": "3000"}
"""Ray's own. A driver that has been told that its node is dead is ended by Ray, without a word; the tests' Ray tells it soon."""
AGENTS = "ray::DashboardAgent", "ray::RuntimeEnvAgent"  # Ray's own, which at times wait a minute for its store
SCAFFOLD = {"local": {"momentum": 0.0, "weight_decay": 0.0}}


def written(config: Config) -> str:
    """The name of its file, where the commands of the test are."""
    Path("run.yaml").write_text(to_yaml(config))
    return "run.yaml"


def finished(config: Config) -> str:
    """The hash with which the run in `run` ends in one process, which is that of an undisturbed one."""
    resumed = CliRunner().invoke(app, ["resume", "run", "engine=local"])
    assert resumed.exit_code == 0, resumed.output
    [ours] = re.findall(r"^sha256 +(\w+)$", resumed.output, re.MULTILINE)
    assert ours == raysim.run(config, out="undisturbed", progress=False, engine="local").result["sha256"]
    return resumed.output


@pytest.mark.parametrize(
    ("process", "said", "environment"),
    [
        ("raylet/raylet", "its raylet on this machine has ended", PATIENT),
        ("gcs/gcs_server", r"its control store \(gcs_server\) does not", {}),
    ],
)
def test_a_process_of_the_cluster_is_killed(process, said, environment, tmp_path, gate, monkeypatch):
    """While a client trains."""
    monkeypatch.chdir(tmp_path)
    rounds = {"total": 3, "checkpoint_every": 1}
    config = tiny(**SCAFFOLD, client=["scaffold", {"waits": {"gate": str(gate), "t": 1}}], rounds=rounds, engine=RAY)
    run = Command("run", written(config), "--out", "run", **environment)
    with held(gate):
        [victim] = [pid for pid, line in run.processes().items() if f"/{process} --" in line]
        os.kill(victim, signal.SIGKILL)
        assert run.end() == 1
    assert re.search(rf"raysim: the Ray cluster is gone: {said}.*\n`raysim resume run` continues\.\n\Z", run.err), (
        run.err
    )
    assert "Traceback" not in run.output
    run.wait_for_all(*AGENTS)
    assert "round 2/3" in finished(config)  # from the checkpoint after the first


ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-m', 'raysim', *sys.argv[1:]])"


def test_the_raylet_is_killed_under_a_run_without_a_parent(tmp_path, gate, monkeypatch):
    """As after `nohup raysim run &` in a terminal that was closed. Ray takes a driver's parent for its raylet."""
    monkeypatch.chdir(tmp_path)
    config = tiny(
        client=[{"waits": {"gate": str(gate), "t": 1}}], rounds={"total": 3, "checkpoint_every": 1}, engine=RAY
    )
    run = Python("-c", ORPHAN, "run", written(config), "--out", "run", folder=tmp_path, **PATIENT)
    with held(gate):
        run.process.join()  # the parent
        [victim] = [pid for pid, line in run.processes().items() if "/raylet/raylet --" in line]
        os.kill(victim, signal.SIGKILL)
        run.end()
    assert re.search(r"the Ray cluster is gone: its raylet .*\n`raysim resume run` continues\.\n\Z", run.err), run.err
    run.wait_for_all(*AGENTS)


def test_memory_runs_out_before_the_first_round(tmp_path, monkeypatch):
    """There is nothing to resume."""
    monkeypatch.chdir(tmp_path)
    always = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "20"}
    run = Command("run", written(tiny(engine=RAY)), "--out", "run", **always)
    assert run.end() == 1
    assert run.err.endswith("\nNothing was written; start it again.\n")
    assert "its node ran out of memory. Free memory there, or take a smaller model or cohort\n" in run.err
    assert "Traceback" not in run.output
    assert not Path("run").exists()


UNCHECKED = """
import sys
from raysim import machine
machine.full_disk = lambda folder: None
from raysim.cli.app import main
main()
"""


def test_the_disk_of_the_cluster_is_full(tmp_path, monkeypatch):
    """Before the start, and, as it was not then, when states no longer fit into the object store. A share of almost nothing
    makes any disk full to Ray."""
    monkeypatch.chdir(tmp_path)
    most = {FULL_AT[0]: "1e-6"}
    large = {"name": "mlp", "options": {"hidden": [3000, 1500]}}
    config = tiny(**SCAFFOLD, client=["scaffold"], model=large, engine=RAY, rounds={"participation": 1.0})
    run = Command("run", written(config), "--out", "run", **most)
    assert run.end() == 1
    folder = Path(os.environ["RAY_TMPDIR"]) / "raysim-"
    said = (
        rf"raysim: Ray cannot start: the disk of {folder}\w+ is [\d.]+ % full, and Ray stores nothing more .*RAY_TMPDIR"
    )
    assert re.match(said, run.err), run.err
    assert not Path("run").exists()

    command = [sys.executable, "-c", UNCHECKED, "run", "run.yaml", "--out", "run"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(command, env=environment | {"PYTHONPATH": PYTHONPATH} | most, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "raysim: Ray's object store is full, and so is the disk" in ended.stderr
    assert "resume run` " in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    finished(config)
