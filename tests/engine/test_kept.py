"""A cluster that outlives the command that starts it: `raysim up` and `raysim down`."""

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import play

from raysim.config import load
from raysim.engine.ray import private

CONFIG = """
name: kept
data: {name: {synthetic: {samples: 60, test_samples: 20}}, partition: {iid_equal: {clients: 4}}}
model: {name: mlp, options: {hidden: [8]}}
rounds: {total: 2, participation: 0.5}
local: {batch_size: 5, lr: 0.1}
engine: {ray: {clients_per_actor: 2}}
"""


def run(environment: dict[str, str], *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raysim", *map(str, words)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)


def sha256(text: str) -> str:
    found = re.search(r"\b[0-9a-f]{64}\b", text)
    assert found, text
    return found[0]


def folders(environment: dict[str, str]) -> list[Path]:
    return list(Path(environment["RAY_TMPDIR"]).glob(f"{private.PREFIX}*"))


def processes(folder: Path) -> list[int]:
    """All that were started with the token of the cluster in this folder."""
    mark, found = f"{private.TOKEN}={folder}/".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "kept.yaml").write_text(CONFIG)
    return tmp_path / "kept.yaml"


@pytest.fixture(scope="module")
def address(kept: dict[str, str]) -> str:
    (folder,) = folders(kept)
    return json.loads((folder / private.RECORD).read_text())[1]


def test_commands_and_python_join_it(kept, address, config, tmp_path):
    """By its address, or without being told; a relative path means what it means to the command."""
    started = folders(kept)
    play(load(config, ["engine=local"]), tmp_path / "first")
    config.write_text(CONFIG.replace("mlp,", "mlp, init: first/model.safetensors,"))
    told = run(kept, "run", config, "--address", address, cwd=tmp_path)
    code = "import raysim; print(raysim.run('kept.yaml', progress=False).result['sha256'])"
    python = subprocess.run([sys.executable, "-c", code], env=kept, cwd=tmp_path, capture_output=True, text=True)
    assert sha256(told.stdout + told.stderr) == sha256(python.stdout + python.stderr)
    assert folders(kept) == started  # nobody has started another


def test_only_one_is_kept_and_only_its_owner_finds_it(kept, address):
    again = run(kept, "up")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"a cluster is up already, at {address}. Runs join it; `raysim down` ends it.\n"
    elsewhere = run(kept | {"RAY_ADDRESS": address}, "up")
    assert elsewhere.stderr == f"RAY_ADDRESS is {address}: runs join the cluster there. Unset it first.\n"
    (folder,) = folders(kept)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["python", "owner"])
def test_a_cluster_of_somebody_else_is_not_joined(kept, address, monkeypatch, what):
    """Of another user, who could make us run what he likes, or of another Python or raysim, whose code is another."""
    monkeypatch.setenv("RAY_TMPDIR", kept["RAY_TMPDIR"])
    found = private.kept()
    assert found and found.address == address
    if what == "python":
        monkeypatch.setattr(private, "_HERE", ["/another", "/place"])
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert private.kept() is None
    assert folders(kept)


@pytest.fixture
def alone() -> Iterator[dict[str, str]]:
    """The environment of a cluster that is up for one test."""
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp") as folder:
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"RAY_TMPDIR": folder}
        up = run(environment, "up")
        assert re.fullmatch(r"A cluster is up at 127\.0\.0\.1:\d+\. Runs join it; .*\n", up.stdout), up.stderr
        yield environment
        if folders(environment):
            run(environment, "down")


def test_nothing_is_left_of_it(alone):
    (folder,) = folders(alone)
    assert len(processes(folder)) >= 4  # control store, raylet, two agents, workers
    ended = run(alone, "down")
    assert ended.stdout.startswith("ended the cluster at 127.0.0.1:")
    assert (processes(folder), folders(alone)) == ([], [])
    assert run(alone, "down").stdout == "There is no cluster.\n"


def test_a_dead_one_is_noticed_and_removed(alone, config, tmp_path):
    (folder,) = folders(alone)
    keeper = psutil.Process(json.loads((folder / private.RECORD).read_text())[2])
    keeper.kill()
    while keeper.is_running() and keeper.status() != psutil.STATUS_ZOMBIE:  # on a busy machine it lives on for a while
        time.sleep(0.01)
    said = run(alone, "run", config, "--dry-run", cwd=tmp_path).stdout
    assert re.search(r"actors? on this machine", said)
    assert folders(alone) == []
