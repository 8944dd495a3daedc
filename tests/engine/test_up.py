"""A cluster that outlives the command that starts it: `raysim up` and `raysim down`."""

import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Command, marked
from conftest import simulate

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


def ended(*words: object, **environment: str) -> Command:
    """The command, when it has ended."""
    command = Command(*words, **environment)
    command.end()
    return command


def sha256(text: str) -> str:
    found = re.search(r"\b[0-9a-f]{64}\b", text)
    assert found, text
    return found[0]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where clusters are kept, and found: for this test alone."""
    with tempfile.TemporaryDirectory(prefix="k", dir=os.environ["RAY_TMPDIR"]) as folder:  # a short path: sockets
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)
        ended("down")


def up(place: Path) -> tuple[Path, str]:
    """The folder and the address of a cluster that is up from now on."""
    command = ended("up")
    said = re.fullmatch(r"A cluster is up at (127\.0\.0\.1:\d+)\. Runs join it; .*\n", command.output)
    assert said, command.output
    (folder,) = place.glob(f"{private.PREFIX}*")
    return folder, said[1]


def processes(folder: Path) -> dict[int, str]:
    """All that were started with the token of the cluster in this folder."""
    return marked(f"{private.TOKEN}={folder}/")


def test_one_is_kept_and_joined_until_it_is_ended(place, tmp_path, monkeypatch):
    """Runs join it by its address, or without being told; a relative path means what it means to the command."""
    monkeypatch.chdir(tmp_path)
    Path("kept.yaml").write_text(CONFIG)
    folder, address = up(place)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert len(processes(folder)) >= 4  # control store, raylet, two agents, workers

    again = ended("up")
    assert (again.end(), again.out) == (2, "")
    assert again.err == f"a cluster is up already, at {address}. Runs join it; `raysim down` ends it.\n"
    elsewhere = ended("up", RAY_ADDRESS=address)
    assert elsewhere.err == f"RAY_ADDRESS is {address}: runs join the cluster there. Unset it first.\n"

    found = private.persistent_cluster()
    assert found and found.address == address
    # Of another user, who could make us run what he likes, or of another Python or raysim, whose code is another.
    for where, name, other in ((private, "_HERE", ["/another", "/place"]), (os, "geteuid", lambda: 12345)):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, other)
            assert private.persistent_cluster() is None
        assert folder.exists()

    simulate(load("kept.yaml", ["engine=local"]), tmp_path / "first")
    Path("kept.yaml").write_text(CONFIG.replace("mlp,", "mlp, init: first/model.safetensors,"))
    named = ended("run", "kept.yaml", "--address", address)
    code = "import raysim; print(raysim.run('kept.yaml', progress=False).result['sha256'])"
    python = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert sha256(named.output) == sha256(python.stdout + python.stderr)
    assert [*place.glob(f"{private.PREFIX}*")] == [folder]  # nobody has started another

    assert ended("down").output == f"ended the cluster at {address}\n"
    assert not processes(folder)
    assert not folder.exists()
    assert ended("down").output == "There is no cluster.\n"


KEEPER = """
import os, sys
from raysim.engine.ray.private import PersistentCluster, private
with private() as folder:
    PersistentCluster(folder, sys.argv[1], os.getpid()).write()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_dead_one_is_noticed_and_removed(place, tmp_path):
    """Its keeper was killed, whoever still answers where it was."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", KEEPER, address], **pipes) as keeper:
            folder = Path(keeper.stdout.readline().rstrip())
            assert private.persistent_cluster() == private.PersistentCluster(folder, address, keeper.pid)
            keeper.kill()
        (tmp_path / "kept.yaml").write_text(CONFIG)
        said = ended("run", tmp_path / "kept.yaml", "--dry-run").output
    assert re.search(r"actors? on this machine", said)
    assert not folder.exists()


def test_one_at_a_time_is_brought_up(place):
    """Of two at once, one would wait for its own for ever, or both would be up."""
    commands = [Command("up"), Command("up")]
    for command in commands:
        command.end()
    later, first = sorted((command.output for command in commands), reverse=True)
    address = re.fullmatch(r"A cluster is up at (\S+)\. Runs join it; .*\n", first)[1]
    assert later == f"a cluster is up already, at {address}. Runs join it; `raysim down` ends it.\n"
    assert len(list(place.glob(f"{private.PREFIX}*"))) == 1
