"""`raysim runs`, `compare`, `tag`, `note`, `rm` and `watch`, over real runs."""

from __future__ import annotations

import errno
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import simulate, tiny
from typer.testing import CliRunner, Result

import raysim
from raysim.api.lines import ending
from raysim.cli.app import app
from raysim.cli.runs import age, last_score
from raysim.federation.lock import run_lock
from raysim.paths import natural
from raysim.report.groups import compare
from raysim.report.runs import Run
from raysim.report.summary import GLOBAL, PERSONAL, final, judged_by, summarise
from raysim.report.watch import Watch, serving
from raysim.store.lock import take


def command(*args: object, **kwargs: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], **kwargs)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs in `runs`: r2 and r10 with two seeds, of which r10 has shrinking as well, and `half`, which was stopped."""
    monkeypatch.chdir(tmp_path)
    raysim.run(tiny(), out="runs/r2", progress=False)
    raysim.run(tiny(), out="runs/r10", progress=False, seed=4, server="fedlws")
    simulation = raysim.stream(tiny(), out="runs/half")
    next(simulation)
    simulation.save()
    simulation.stop()
    return Path("runs")


def test_runs_have_a_line_each(ran: Path) -> None:
    head, *lines = command("runs").output.splitlines()
    assert head.split() == ["run", "methods", "data", "seed", "round", "score", "age", "state"]
    assert [line.split()[0] for line in lines] == ["runs/half", "runs/r2", "runs/r10"]  # by number
    half, first, second = (line[len("runs/half") :].split("  ") for line in lines)
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (half, first, second)]
    final = raysim.load(ran / "r2").result["final"]
    assert cells[1][:5] == ["fedavg", "synthetic", "3", "3/3", f"{100 * final:.2f} %"]
    assert cells[2][:4] == ["fedavg + fedlws", "synthetic", "4", "3/3"]
    assert (cells[0][3], cells[0][-1]) == ("1/3", "stopped")
    assert (cells[1][-1], cells[2][-1]) == ("finished", "finished")
    assert command("runs", ran / "nowhere").exit_code == 1


def test_a_run_that_goes_on_shows_its_tasks_own_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"name": "diabetes", "partition": {"iid_equal": {"clients": 4}}}
    model, rounds = {"name": "mlp", "options": {"hidden": [8]}}, {"total": 2, "evaluate_every": 1}
    simulation = raysim.stream(tiny(data=data, model=model, rounds=rounds), out="runs/numbers")
    first = next(simulation)
    simulation.save()
    simulation.stop()
    assert last_score(raysim.load("runs/numbers")) == f"{first.score:.4f}"


def test_compare_names_what_differs(ran: Path) -> None:
    rows = {line.split()[0]: line for line in command("compare", "runs/r2", "runs/r10").output.splitlines() if line}
    assert rows["seed"].split() == ["seed", "3", "4"]
    assert "'fedlws'" in rows["server"]
    assert not {"local.lr", "data.name"} & rows.keys()
    assert rows["Not"] == "Not the same bits."
    raysim.run(tiny(), out="runs/again", progress=False)
    assert command("compare", "runs/r2", "runs/again").output.endswith("\nThe same bits.\n")
    assert command("compare", "runs/r2").exit_code == 2


def test_rm_asks_and_leaves_alone_what_is_no_run_or_is_being_played(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("rm", "runs/r2", input="n\n").exit_code == 0
    assert (ran / "r2").is_dir()
    assert command("rm", "runs", "--yes").exit_code == 1
    with (ran / "half/.lock").open("a") as lock:
        take(lock.fileno())
        refused = command("rm", "runs/r2", "runs/half", "--yes")
    assert refused.stderr == "runs/half: run in progress; stop it first (Ctrl-C).\n"
    assert (ran / "r2").is_dir()
    with (ran / "half/.lock").open("a") as lock:

        def begun_meanwhile(_: str) -> bool:
            take(lock.fileno())
            return True

        monkeypatch.setattr("typer.confirm", begun_meanwhile)
        refused = command("rm", "runs/half")
    assert refused.stderr == "runs/half: another process uses this run; wait until it has ended.\n"
    with run_lock(ran / "r2"):  # finished, and about to be extended
        assert command("rm", "runs/r2", "--yes").exit_code == 2
    assert (ran / "r2" / "model.safetensors").exists()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", ".lock")))
        refused = command("rm", "runs/r2", "--yes")
    assert (refused.exit_code, refused.stderr) == (1, "raysim: runs/r2 cannot be removed: Permission denied.\n")
    removed = command("rm", ran.resolve() / "r2", "runs/r2", "runs/half", "--yes")
    assert (removed.exit_code, removed.output) == (0, "removed runs/r2\nremoved runs/half\n")
    assert {path.name for path in ran.iterdir()} == {"r10"}


def test_ages_and_numbers(ran: Path) -> None:
    run = raysim.load(ran / "r2")
    now = (ran / "r2/config.yaml").stat().st_mtime
    os.utime(ran / "r2/config.yaml", (now, now - 3 * 3600 - 60))
    assert age(run) == "3 h"
    assert sorted(["r10", "r9", "a", "r9b"], key=natural) == ["a", "r9", "r9b", "r10"]


def test_tags_and_notes_stay_with_the_run(ran: Path) -> None:
    before = raysim.load(ran / "r2").result
    assert command("tag", "runs/r2", "baseline", "paper").output == "baseline paper\n"
    assert command("tag", "runs/r2", "paper", "--remove").output == "baseline\n"
    command("note", "runs/r2", "the one in the thesis\nsecond line")
    assert raysim.load(ran / "r2").note == "the one in the thesis\nsecond line"
    _, line = command("runs", "--tag", "baseline").output.splitlines()
    assert line.startswith("runs/r2 ") and line.endswith("#baseline  the one in the thesis")
    raysim.resume("runs/half", progress=False)
    assert raysim.load(ran / "r2").result == before
    (ran / "r2/label.json").write_text('{"tags": 7}')
    assert command("runs").exit_code == 1
    assert "label.json" in command("tag", "runs/r2", "x").stderr


def test_tags_that_are_put_at_once_all_stay(ran: Path) -> None:
    def label(number: int) -> None:
        for part in range(10):
            raysim.load(ran / "r2").label(add=[f"{number}.{part}"], note=f"note {number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(label, range(4)))
    assert {*raysim.load(ran / "r2").tags} == {f"{number}.{part}" for number in range(4) for part in range(10)}


def test_a_page_follows_runs_that_grow(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysim.report.page.DETAILED", 0)  # most of a page's time
    watch = Watch([ran], 3)
    with serving(watch) as address:
        with urllib.request.urlopen(address) as answer:
            first = answer.read().decode()
            assert answer.headers["Refresh"] is None  # no run is active
        assert "1 of 3 rounds" in first
        with urllib.request.urlopen(address) as answer:
            assert answer.read().decode() == first
        with (ran / "half/.lock").open("a") as lock:
            take(lock.fileno())
            with urllib.request.urlopen(address) as answer:
                assert answer.headers["Refresh"] == "3"
        raysim.resume("runs/half", progress=False)
        watch._next = 0.0
        with urllib.request.urlopen(address) as answer:
            assert "1 of 3 rounds" not in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address.rsplit("/", 2)[0] + "/")
    (ran / "half/config.yaml").write_text("seed: many\n")
    text, may_change = Watch([ran], 3).page()
    assert may_change and "half/config.yaml is damaged" in text
    with serving(Watch([ran / "none"], 3)) as address, urllib.request.urlopen(address) as answer:
        assert answer.headers["Refresh"] == "3" and "none" in answer.read().decode()


def test_a_score_is_of_the_model_beside_which_it_stands(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Runs that go on without their evaluation: what was measured of an earlier model is not shown as the last one's."""
    ways = {"global": {}, "personal": {"data": {"client_test_frac": 0.25}, "evaluate": {"personal": "after_init"}}}
    without = {
        "global": {"evaluate__global": False},
        "personal": {"evaluate__global": False, "evaluate__personal": None},
    }
    for kind, changes in ways.items():
        with subtests.test(kind):
            folder = simulate(tiny(**changes), tmp_path / kind).folder
            before = Run(folder)
            assert final(before, judged_by([before])) is not None
            run = raysim.resume(folder, rounds__total=6, **without[kind])
            assert run.result is not None
            for scores in filter(None, (run.result, run.result["personal"])):
                assert (scores["final"], scores["last10"], scores["best"] is None) == (None, None, False)
            assert list(filter(None, map(partial(final, run), (GLOBAL, PERSONAL)))) == []
            assert last_score(run) == "-"
            assert "final -" in ending(run.result | {"folder": folder})
            assert "The last model was not evaluated" in summarise(compare([run])).sentence
