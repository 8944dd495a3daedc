"""A link, a pipe or another's file in the folder of a run: nothing outside is written or removed, and nothing hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from conftest import simulate, tiny
from typer.testing import CliRunner, Result

import raysim
from raysim.api.simulation import Simulation
from raysim.cli.app import app
from raysim.config import ConfigError
from raysim.federation import Federation, lock
from raysim.federation.checkpoint import Checkpoints
from raysim.federation.lock import run_lock
from raysim.store.atomic import Foreign, replacing
from raysim.store.lock import take

HALF = {"total": 4, "checkpoint_every": 1}


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A run of four rounds that was stopped after two."""
    federation = Federation(tiny(rounds=HALF), tmp_path / "run")
    federation.step()
    federation.step()
    federation.close()
    return tmp_path / "run"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of files that have the names of raysim's own."""
    folder = tmp_path / "elsewhere"
    (folder / "deep/er").mkdir(parents=True)
    for name in (
        "weights.safetensors",
        "deep/er/weights.safetensors",
        "round-000009.states",
        ".round-000001.json.tmp",
        "part-000000-000003-000000.parquet",
    ):
        (folder / name).write_text(name)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["checkpoints", "rounds", "clients", "traces"])
def test_a_link_in_the_place_of_a_folder_is_refused(name: str, half: Path, elsewhere: Path) -> None:
    before = contents(elsewhere)
    inside = half / name
    if inside.is_dir():
        inside.rename(half / "moved")
    inside.symlink_to(elsewhere)
    done = command("resume", half, "record={traces: rounds}")
    assert done.exit_code == 1, done.output
    assert f"{inside} is no regular folder" in done.stderr
    assert "Traceback" not in done.output
    assert contents(elsewhere) == before


def test_checkpoints_inside_checkpoints_are_anothers(half: Path) -> None:
    """As where a user has put a second run, or weights of their own, below."""
    theirs = half / "checkpoints/mine"
    nested = Federation(tiny(rounds=HALF), theirs)
    nested.step()
    nested.close()
    (half / "checkpoints/best.safetensors").write_text("mine")
    before = sorted(path for path in theirs.rglob("*"))
    assert command("resume", half).exit_code == 0
    assert sorted(path for path in theirs.rglob("*")) == before
    assert (half / "checkpoints/best.safetensors").read_text() == "mine"
    assert command("resume", theirs).exit_code == 0


TEMPORARIES = (
    ".config.yaml.tmp",
    ".manifest.json.tmp",
    ".result.json.tmp",
    ".model.safetensors.tmp",
    ".label.json.tmp",
    "checkpoints/.round-000004.json.tmp",
)


@pytest.mark.parametrize(
    "plant", [lambda path, to: path.symlink_to(to), lambda path, to: os.mkfifo(path)], ids=["link", "pipe"]
)
def test_what_lies_under_a_temporary_name_is_replaced(
    plant: Callable[[Path, Path], None], half: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in TEMPORARIES:
        plant(half / name, victim)
    assert command("tag", half, "good").exit_code == 0
    assert command("resume", half, "evaluate.batch_size=7").exit_code == 0
    assert victim.read_text() == "mine"
    assert raysim.load(half).tags == ("good",)
    assert raysim.load(half).result["sha256"] == simulate(tiny(rounds=HALF), tmp_path / "whole").sha256()


def test_a_folder_under_a_temporary_name_is_named(tmp_path: Path) -> None:
    (tmp_path / ".a.json.tmp").mkdir()
    with pytest.raises(Foreign, match=r"\.a\.json\.tmp is no regular file"), replacing(tmp_path / "a.json"):
        pass


@pytest.mark.parametrize(
    "name", ["checkpoints/round-000002.json", "rounds/part-000002-000002-000002.parquet", "failed.txt"]
)
def test_a_folder_in_the_place_of_what_goes_is_named(name: str, half: Path) -> None:
    (half / name).unlink(missing_ok=True)
    (half / name).mkdir()
    done = command("resume", half)
    assert done.exit_code == 1
    assert f"{half / name} is no regular file" in " ".join(done.stderr.split())
    (half / name).rmdir()
    assert command("resume", half).exit_code == 0


@pytest.mark.parametrize(
    "plant", [lambda path: path.symlink_to("victim"), os.mkfifo, os.mkdir], ids=["link", "pipe", "folder"]
)
def test_a_lock_that_is_no_file_is_refused(plant: Callable[[Path], None], half: Path) -> None:
    (half / ".lock").unlink(missing_ok=True)
    plant(half / ".lock")
    done = command("resume", half)
    assert done.exit_code == 1
    assert f"{half / '.lock'} is no regular file" in done.stderr
    assert not (half / "victim").exists()
    assert raysim.load(half).state == "failed"


def test_a_fork_that_has_the_lock_open_does_not_keep_it(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker of a DataLoader that stays."""
    opened = []
    monkeypatch.setattr(lock, "take", lambda descriptor: (opened.append(os.dup(descriptor)), take(descriptor)))
    for _ in range(2):
        with run_lock(half), pytest.raises(ConfigError, match="another process uses this run"), run_lock(half):
            pass
    for descriptor in opened:
        os.close(descriptor)


def test_a_run_that_another_process_has_begun_is_not_begun_again(half: Path) -> None:
    """Who waits for a process to start has looked before: of two sweeps in one folder the second would have written over it."""
    (half / ".lock").touch()
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"has begun this run meanwhile\. `raysim resume .*` continues\."):
        Simulation(tiny(rounds=HALF), half)
    assert before == {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}


def test_who_asks_for_the_state_of_a_run_does_not_hold_it(half: Path) -> None:
    """However often: a reader that took the lock for a moment would let some of these fail."""
    run, done = raysim.load(half), []

    def watch() -> None:
        while not done:
            assert run.state in ("stopped", "running")

    watchers = [Thread(target=watch) for _ in range(2)]
    for thread in watchers:
        thread.start()
    try:
        for _ in range(300):
            with run_lock(half):
                assert run.state == "running"
    finally:
        done.append(True)
        for thread in watchers:
            thread.join()
    assert run.state == "stopped"


def test_only_names_of_its_own_form_are_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, {}, {})
    folder = tmp_path / "checkpoints"
    theirs = [
        "weights.safetensors",
        "round-1.safetensors",
        "round-000001-a.states",
        ".mine.tmp",
        "mine/server.safetensors",
    ]
    (folder / "mine").mkdir()
    (folder / "empty").mkdir()
    for name in theirs:
        (folder / name).write_text(name)
    for t in range(1, 5):
        Checkpoints(tmp_path).load(t - 1)
        checkpoints.save(t, {}, {})
    assert [name for name in theirs if not (folder / name).exists()] == []
    assert (folder / "empty").is_dir()
    assert not (folder / "round-000001.json").exists()
