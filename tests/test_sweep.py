"""A grid of runs: what it consists of, and that it goes on where it was stopped."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import string
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import PYTHONPATH, Command, held
from conftest import simulate
from typer.testing import CliRunner

from raysim.cli.app import app
from raysim.config import ConfigError, load, to_yaml
from raysim.data import Dataset
from raysim.report.runs import Run
from raysim.sweep.compare import compare
from raysim.sweep.grid import Point, grid
from raysim.sweep.parallel import _outcome, carried, run_parallel, start
from raysim.sweep.running import run_all

ROOT = Path(__file__).parent.parent

BASE = """
data: {name: {synthetic: {samples: 60, test_samples: 20}}, partition: {iid_equal: {clients: 4}}}
model: {name: mlp, options: {hidden: [8]}}
rounds: {total: 2, participation: 0.5, checkpoint_every: 5}
local: {batch_size: 5, lr: 0.1}
server: [fedlws]
engine: local
"""

METHODS = """
methods:
  fedavg: {server: []}
  prox + lws: {client: [{fedprox: {mu: 0.5}}], local.lr: 0.2}
  fedlws:
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raysim.report.page.DETAILED", 0)  # most of a page's time
    Path("base.yaml").write_text(BASE)
    return Path("base.yaml")


def sweep(*args: object) -> Any:
    return CliRunner().invoke(app, ["sweep", *map(str, args)])


def test_a_grid_is_every_value_with_every_seed(base: Path) -> None:
    changes = ["server.0.fedlws.beta=0.01,0.1", "local.lr=0.2", "rounds.participation=0.5,1"]
    points = grid(base, changes, [8, 9], Path("out"))
    inner = [f"beta{beta}-participation{share}" for beta in ("0.01", "0.1") for share in ("0.5", "1")]
    assert [point.name for point in points] == [f"{part}-seed{seed}" for seed in (8, 9) for part in inner]
    for point in points:
        beta, share, seed = (float(part.lstrip(string.ascii_lowercase)) for part in point.name.split("-"))
        config = point.config
        assert (config.server[0].beta, config.rounds.participation, config.seed) == (beta, share, seed)
        assert config.local.lr == 0.2
        assert config.name == point.name
        assert point.folder == Path("out") / point.name
        assert not point.finished
        assert not point.saved
    assert [point.name for point in grid(base, [], [], Path("out"))] == ["base"]


def test_values_may_be_whole_lists(base: Path) -> None:
    points = grid(base, ["server=[],[fedavgm, fedlws],[{fedlws: {beta: 0.5}}]"], [], Path("out"))
    assert [len(point.config.server) for point in points] == [0, 2, 1]
    assert points[2].config.server[0].beta == 0.5
    assert [point.name for point in points] == ["no-server", "fedavgm-fedlws", "fedlws-beta0.5"]
    long = [f"[{{fedavgm: {{beta: 0.123456789}}}}, {{fedlws: {{beta: 0.{last}}}}}]" for last in "12"]
    first, second = grid(base, [f"server={','.join(long)}"], [], Path("out"))
    assert len({first.name, second.name}) == 2 and max(len(first.name), len(second.name)) < 60


def test_a_configuration_may_list_methods(base: Path) -> None:
    base.write_text(BASE + METHODS)
    points = grid(base, [], [8, 9], Path("out"))
    fedavg, both, lws, *_ = points
    assert [point.config.seed for point in points] == [8] * 3 + [9] * 3
    assert fedavg.name == "fedavg-seed8"
    assert both.name == "prox-lws-seed8"
    assert fedavg.config.server == ()
    assert (both.config.client[0].mu, both.config.local.lr, len(both.config.server)) == (0.5, 0.2, 1)
    assert (lws.config.client, lws.config.local.lr, len(lws.config.server)) == ((), 0.1, 1)
    betas = [
        point.config.server and point.config.server[0].beta
        for point in grid(base, ["server.0.fedlws.beta=0.7"], [8], Path("out"))
    ]
    assert betas == [(), 0.7, 0.7]  # fedavg stays what it is
    with pytest.raises(ConfigError, match=r"--set server.0.awd.lam=0.1: no run has awd in its server\.$"):
        grid(base, ["server.0.awd.lam=0.1"], [8], Path("out"))
    alone = CliRunner().invoke(app, ["run", str(base)])
    assert alone.exit_code == 2
    assert "`raysim sweep base.yaml --out DIR` runs and compares them" in alone.stderr
    base.write_text(BASE + "methods: {fedavg: {}, fedavg*: {local.lr: 0.2}}")
    assert len({point.folder for point in grid(base, [], [8], Path("out"))}) == 2
    base.write_text(BASE + "methods: [fedavg]")
    with pytest.raises(ConfigError, match="methods: must be a mapping"):
        grid(base, [], [], Path("out"))


def test_a_method_without_the_option_that_varies_runs_once(base: Path) -> None:
    base.write_text(BASE + METHODS)
    points = grid(base, ["server.0.fedlws.beta=0.3,0.7", "local.batch_size=8,16"], [8, 9], Path("out"))
    names = [point.name for point in points if point.config.seed == 9]
    sizes = ("batch_size8", "batch_size16")
    assert names == [
        *(f"fedavg-{size}-seed9" for size in sizes),
        *(
            f"{name}-beta{beta}-{size}-seed9"
            for name in ("prox-lws", "fedlws")
            for beta in (0.3, 0.7)
            for size in sizes
        ),
    ]
    with pytest.raises(ConfigError, match=r"two runs would be called fedlws-beta0\.3-batch_size8-seed8"):
        grid(base, ["server.0.fedlws.beta=0.3,0.7", "local.batch_size=8,8"], [8], Path("out"))
    with pytest.raises(ConfigError, match="no run has awd in its server"):
        grid(base, ["server.0.awd.lam=0.1,0.2"], [8], Path("out"))


def test_methods_of_one_seed_share_partition_model_and_cohorts(base: Path) -> None:
    base.write_text(BASE + METHODS)
    changes = ("--set", "record.traces=[1]", "--set", "rounds.total=1")
    done = sweep(base, "--out", "out", *changes, "--format", "markdown")
    assert done.exit_code == 0
    assert "table   out/table.md\n" in done.output
    assert len([line for line in Path("out/table.md").read_text().splitlines() if line.startswith("|")]) == 2 + 3
    runs = [Run(folder) for folder in sorted(Path("out").iterdir()) if folder.is_dir()]
    assert len(runs) == 3
    assert len({run.manifest["partition_sha256"] for run in runs}) == 1
    assert len({tuple(run["clients"]["client"].to_pylist()) for run in runs}) == 1
    assert len({(run.folder / "traces/round-0001/before.safetensors").read_bytes() for run in runs}) == 1


def test_all_faults_of_a_grid_are_told_once(base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        grid(base, ["rounds.total=x,3", "local.lr=0.1,-1"], [8, 9], Path("out"))
    assert len(caught.value.faults) == 2
    with pytest.raises(ConfigError, match=r"base\.yaml: two runs would be called lr0\.1"):
        grid(base, ["local.lr=0.1,0.2,0.1"], [], Path("out"))
    with pytest.raises(ConfigError, match=r"lr0\.1-seed8 and lr0\.2-seed8 are the same run: .* overrides it") as caught:
        grid(base, ["local.lr=0.1,0.2", "local.lr=0.3"], [8, 9], Path("out"))
    assert len(caught.value.faults) == 2
    assert sweep(base, "--out", "out", "--seeds", "8,x").stderr.startswith("--seeds 8,x: must be whole numbers")
    assert not Path("out").exists()


def test_a_sweep_ends_in_one_table_and_one_report(base: Path) -> None:
    result = sweep(base, "--set", "server=[],[fedlws]", "--seeds", "8,9", "--out", "out", "--target", "0.01")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "4 runs, 0 of them finished"
    scores = next(i for i, line in enumerate(lines) if "final (%)" in line)
    assert lines[scores + 1].split()[:3] == ["fedavg", "8,", "9"]
    assert lines[scores + 2].split()[:5] == ["fedavg", "+", "fedlws", "8,", "9"]
    assert "round to 1 %" in result.output
    assert "fedavg + fedlws" in Path("out/report.html").read_text(encoding="utf-8")
    again = sweep(base, "--set", "server=[],[fedlws]", "--seeds", "8,9", "--out", "out", "--target", "0.01")
    assert again.output.splitlines()[0] == "4 runs, 4 of them finished"
    assert again.output.splitlines()[1:] == lines[scores - 1 :]  # the same table, and nothing run

    more = sweep(base, "--set", "server=[],[fedlws]", "--seeds", "8,9,10", "--out", "out")
    assert more.output.splitlines()[0] == "6 runs, 4 of them finished"


def test_a_run_that_failed_is_missing_in_the_table(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = grid(base, [], [8, 9], Path("out"))
    assert run_all(points) == 0
    Path("out/seed9/result.json").unlink()  # as if its second round had failed
    Path("out/seed9/failed.txt").write_text("The loss is NaN.")
    capsys.readouterr()
    compare(points, Path("out"), kind="csv")
    heads, row = (re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()[1:3])
    score = f"{100 * Run(points[0].folder)['rounds']['accuracy'][-1].as_py():.2f}"
    assert row[1:] == ["8, 9", "2 of 2", f"{score} (1 of 2)", row[4]] and heads[2] == "final (%)"
    assert f"{score} (1 of 2)" in Path("out/report.html").read_text(encoding="utf-8")


def test_a_run_that_is_killed_has_failed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(point: Point, *_: object) -> Any:
        point.folder.mkdir(parents=True)
        (point.folder / "config.yaml").write_text(to_yaml(point.config))
        process = subprocess.Popen(["sh", "-c", "kill -9 $$"], stdin=subprocess.PIPE, text=True)
        return process, (point.folder / "log.txt").open("w")

    monkeypatch.setattr("raysim.sweep.parallel.start", start)
    [point] = grid(base, [], [8], Path("out"))
    assert run_parallel([point], 1, None) == ([point.name], 0)
    assert Run(point.folder).state == "failed"


def test_an_address_that_no_run_joins_is_refused(base: Path) -> None:
    for several in ((), ("--parallel", "2")):
        result = sweep(base, "--seeds", "8,9", "--out", "out", "--address", "127.0.0.1:1", *several)
        assert result.exit_code == 2
        assert result.stderr == "--address: engine is local, which joins no cluster. Use --set engine=ray.\n"
    assert not Path("out").exists()


def test_a_folder_of_another_configuration_is_not_touched(base: Path) -> None:
    assert sweep(base, "--seeds", "8", "--out", "out").exit_code == 0
    result = sweep(base, "--seeds", "8", "--out", "out", "--set", "local.lr=0.3")
    assert result.exit_code == 2
    assert result.stderr == "out/seed8: holds a run whose local is another. Name another --out, or remove it.\n"


def test_an_out_that_cannot_be_written_ends_a_sweep_before_its_runs(base: Path) -> None:
    for out, reason in ((base / "out", "Not a directory"), (Path("/dev/fd"), "[^:]+")):  # in /dev/fd not even root can
        ended = sweep(base, "--seeds", "8,9", "--out", out)
        assert ended.exit_code == 2 and re.fullmatch(f"out: {out} cannot be written: {reason}.\n", ended.stderr)


def test_data_that_cannot_be_downloaded_end_a_sweep_before_its_runs(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        asked.append(args)
        raise OSError("no network")

    asked: list[object] = []
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", offline)
    found = CliRunner().invoke(
        app, ["sweep", str(base), "data.name=cifar10", "local.lr=0.1,0.2", "--seeds", "8,9", "--out", "out"]
    )
    assert found.exit_code == 1
    assert re.fullmatch(
        r"raysim: cifar10: cannot download \S+ \(no network\); unpack the archive in .*\n", found.stderr
    )
    assert (len(asked), found.stdout, Path("out").exists()) == (1, "", False)


def test_a_run_that_fails_does_not_keep_the_others(base: Path) -> None:
    args = (base, "--set", f"data.partition={CANNOT},{{iid_equal: 4}}", "--out", "out")
    result = sweep(*args)
    assert result.exit_code == 1
    assert "1 runs failed: dirichlet_counts-alpha0.001" in result.stderr
    assert "Traceback" not in result.stderr
    assert "final (%)" in result.stdout
    assert Path("out/report.html").exists()


CANNOT = "{dirichlet_counts: {alpha: 0.001, clients: 20, min_size: 3}}"
KINDS = f"""
methods:
  short: {{}}
  cannot: {{data.partition: {CANNOT}}}
  long: {{rounds.total: 99, rounds.checkpoint_every: 99, client: [{{waits: {{gate: GATE, t: 2}}}}]}}
"""


def wait_for(text: str, path: Path) -> None:
    while not (path.is_file() and text in path.read_text()):
        time.sleep(0.01)


def test_several_at_a_time_stop_together_and_give_the_same_bits(
    base: Path, gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base.write_text(BASE + KINDS.replace("GATE", str(gate)))
    points = grid(base, [], [], Path("out"))
    together = Command("sweep", base, "--out", "out", "--parallel", 2)
    with held(gate):  # it began when one of the others had ended
        for name in ("short", "cannot"):
            together.wait_for(f" of 3   {name}   ")
        together.signal(signal.SIGINT)
        wait_for("Stopping after this round", Path("out/long/log.txt"))
    status, out, err = together.end(), together.out, together.err
    assert status == 130, err
    assert "once more stops at once" in err
    assert err.endswith("The same command continues the sweep.\n")
    lines = sorted(line.split("   ")[1:3] for line in out.splitlines() if " of 3   " in line)
    (cannot, failed), (short, accuracy) = lines
    assert (cannot, short) == ("cannot", "short")
    assert failed.startswith("failed: raysim: ")
    assert failed.endswith("(see out/cannot/log.txt)")
    assert accuracy.startswith("accuracy ")
    assert "Stopped. `raysim resume out/long` continues." in Path("out/long/log.txt").read_text()
    assert [point.finished for point in points] == [True, False, False]

    assert run_all(points) == 1  # one at a time
    assert "3 runs, 1 of them finished" in capfd.readouterr().out
    for point in (points[0], points[2]):
        straight = simulate(point.config, Path("straight", point.name)).sha256()
        assert json.loads((point.folder / "result.json").read_text())["sha256"] == straight


def test_what_tests_personal_models_alone_says_their_accuracy(base: Path) -> None:
    alone = ["evaluate={global: false, personal: after_train}", "data.client_test_frac=0.2", "rounds.total=1"]
    (point,) = grid(base, alone, [], Path("out"))
    simulate(point.config, point.folder)
    personal = Run(point.folder).result["personal"]["final"]
    assert _outcome(point, 0) == f"personal accuracy {100 * personal:.2f} %"


def test_a_run_ends_with_the_process_that_started_it(base: Path, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    (point,) = grid(base, [f"client=[{{waits: {{gate: {gate}, t: 0}}}}]"], [], Path("out"))
    process, log = start(point, None, None)
    with process, log, held(gate):
        assert os.getpgid(process.pid) != os.getpgid(0)  # a terminal's Ctrl-C does not reach it twice
        assert process.stdin is not None
        process.stdin.close()  # as the system does when that process is killed
        assert process.wait() == 1


def test_as_many_as_the_machine_carries(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    config = grid(base, ["engine={local: {device: cpu}}"], [], Path("out"))[0].config
    for free, threads, number in ((100 << 30, 1, 8), (100 << 30, 3, 2), (5 << 30, 1, 4), (1 << 20, 1, 1), (None, 1, 8)):
        monkeypatch.setattr("raysim.machine.free_memory", lambda free=free: free)
        engine = replace(config.engine, threads=threads)
        assert carried([replace(config, engine=engine)]) == number
    for wish in ("0", "-1", "many"):
        assert sweep(base, "--out", "out", f"--parallel={wish}").stderr.startswith(
            f"--parallel {wish}: must be a whole"
        )


def data_sets() -> int:
    """In this process."""
    return sum(issubclass(type(one), Dataset) for one in gc.get_objects())


def test_a_run_on_ray_gives_back_what_it_took(idle: Callable[[], bool], base: Path) -> None:
    """Else the next run of a sweep finds no room: hosts die a moment after their driver. Data stay in the object store
    alone."""
    from raysim.federation.remote import session

    config = grid(base, ["engine={ray: {clients_per_actor: 2}}"], [], Path("out"))[0].config
    here = data_sets()
    with session(config) as launch:
        assert data_sets() == here
        federation = launch(config, Path("run"), False)
        assert federation.step() is not None
        federation.close()
        assert idle()


def test_processes_that_a_run_does_not_take_are_let_go(idle: object, base: Path) -> None:
    """How many clients there are, the data alone tell here; until then a process starts for each of three CPUs."""
    import ray

    from raysim.engine.ray.cluster import free_resources
    from raysim.engine.ray.placement import Node, Resources
    from raysim.federation.remote import session

    x, y = np.zeros((8, 1, 4, 4), np.uint8), np.arange(8) % 2
    np.savez("two.npz", x_train=x, y_train=y, client_train=np.arange(8) // 4, x_test=x, y_test=y)
    changes = ["data={name: {npz: two.npz}, partition: natural, root: .}", "engine=ray", "rounds.participation=1"]
    config = grid(base, changes, [], Path("out"))[0].config
    free = free_resources().cpus
    three = Resources((Node(ray.get_runtime_context().get_node_id(), 3.0),))
    with session(config, resources=three) as launch:
        federation = launch(config, Path("run"), False)
        while free - free_resources().cpus != 2:
            time.sleep(0.1)
        assert federation.step() is not None
        federation.close()


def test_a_sweep_killed_half_way_continues(base: Path, gate: Path) -> None:
    """In the eighth round of its second run, in which a single client trains as in each."""
    args = [str(base), "--out", "out", "rounds.total=60", "rounds.participation=0.25", "--seeds", "8,9"]
    args += [f"client=[{{waits: {{gate: {gate}, t: 7}}}}]"]
    killed = Command("sweep", *args)
    with held(gate):
        pass
    os.mkfifo(gate)
    with held(gate):
        killed.signal(signal.SIGKILL)
        assert killed.end() == -signal.SIGKILL
    first, second = Path("out/seed8"), Path("out/seed9")
    assert (first / "result.json").exists()
    assert not (second / "result.json").exists()
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}

    result = sweep(*args)
    assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before, "a finished run was touched"
    rounds = [line for line in result.output.splitlines() if line.startswith("round ")]
    start = int(rounds[0].split("/")[0].split()[1])
    assert start == 6, "it began anew"  # there was a checkpoint after the fifth round
    assert len(rounds) == 61 - start
    straight = CliRunner().invoke(app, ["run", str(second / "config.yaml"), "--out", "straight"])
    assert straight.exit_code == 0, straight.output
    assert Run(second).result["sha256"] == Run("straight").result["sha256"]  # type: ignore[index]
    assert Run(second)["rounds"].num_rows == 60
    assert load(second / "config.yaml").seed == 9
