"""A run that stops anywhere is resumed to the bits of one that does not, and leaves no process behind."""

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clocks import ManualClock
from command import Command, held
from conftest import contents, simulate, tiny

import raysim
from raysim.config import Config, ConfigError, check_unchanged, to_yaml
from raysim.engine.base import MachineFailure, StateLost
from raysim.federation import Federation, Round, RoundFailed, RunParts, run_round
from raysim.federation.resume import StateUnreadable
from raysim.store import tables
from raysim.store.atomic import FolderGone, write_json, write_tensors
from raysim.store.parts import DamagedTable

METHODS = {
    "fedavg": {"local": {"state": "persist"}},
    "fedlws": {"server": ["fedlws"]},
    "fedldf": {"weighting": [{"fedldf": {"top_n": 2}}], "model": {"bn_stats": "local"}},
    "scaffold": {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
    "fedala": {"client": ["fedala"], "server": [{"fedavgm": {}}]},
}
ROUNDS = {"rounds": {"total": 6, "checkpoint_every": 2}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[str], Federation]:
    """A run with the method of this name that is not stopped."""
    return cache(lambda name: simulate(tiny(**METHODS[name], **ROUNDS), tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("engine", ["local", {"ray": {"clients_per_actor": 2}}], ids=["local", "ray"])
@pytest.mark.parametrize("name", METHODS)
def test_resumed_run_is_the_undisturbed_one(name, engine, tmp_path, undisturbed, request):
    """It stops after the third round, one after the checkpoint; then again, where it has just saved."""
    make_engine = None if engine == "local" else request.getfixturevalue("warm_ray")
    whole = undisturbed(name)
    config = tiny(**METHODS[name], **ROUNDS, engine=engine)
    for first, last in ((0, 2), (2, 3), (4, 5)):
        federation = Federation(config, tmp_path / "resumed", bool(first), make_engine)
        assert [federation.step()["round"] for _ in range(first, last + 1)] == list(range(first, last + 1))
        if last == 5:
            assert federation.step() is None
            federation.finish()
        federation.close()
    assert federation.sha256() == whole.sha256()
    for table in ("rounds", "clients", "layers", "traffic", "notes"):
        ours, theirs = (tables.read(f.folder, table) for f in (federation, whole))
        measured = {"seconds", "wall", "host", "node", "transport_up", "transport_down"}
        same = [c for c in theirs.column_names if c not in measured and not c.startswith("seconds_")]
        assert ours.select(same).equals(theirs.select(same)), table
    assert json.loads((federation.folder / "result.json").read_text())["sha256"] == whole.sha256()


def test_stopped_before_anything_but_the_configuration_was_written(tmp_path):
    config = tiny(rounds={"total": 1})
    Federation(config, tmp_path / "undisturbed").close()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    Federation(config, tmp_path / "run", resume=True).close()
    ours, theirs = (tables.read(tmp_path / name, "partition") for name in ("run", "undisturbed"))
    assert ours.equals(theirs)
    ours, theirs = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("run", "undisturbed"))
    assert ours["partition_sha256"] == theirs["partition_sha256"]


@pytest.mark.parametrize("checkpoint_every", [2, 100])
def test_lost_client_states(checkpoint_every, tmp_path):
    """As with a node that dies: what was run since the last checkpoint, or the start, is repeated."""
    changes = {**METHODS["scaffold"], "rounds": {"total": 6, "checkpoint_every": checkpoint_every}}
    undisturbed = simulate(tiny(**changes), tmp_path / "undisturbed").sha256()
    ran = []

    def lossy(run: RunParts, t: int, **options: Any) -> Round:
        ran.append(t)
        if len(ran) == 4:
            raise StateLost("gone")
        return run_round(run, t, **options)

    federation = simulate(tiny(**changes), tmp_path / "lossy", run_round=lossy)
    assert ran == ([0, 1, 2, 3, 2, 3, 4, 5] if checkpoint_every == 2 else [0, 1, 2, 3, *range(6)])
    assert federation.sha256() == undisturbed
    assert tables.read(federation.folder, "rounds")["round"].to_pylist() == list(range(6))


def test_client_states_that_are_lost_again_and_again(tmp_path):
    """What is lost before a round is done counts, until that round is done."""
    changes, ran = {**METHODS["scaffold"], "rounds": {"total": 6, "checkpoint_every": 1}}, []

    def lossy(run: RunParts, t: int, **options: Any) -> Round:
        ran.append(t)
        if len(ran) in (2, 3) or t == 3:
            assert len(ran) < 20
            raise StateLost("gone")
        return run_round(run, t, **options)

    with pytest.raises(MachineFailure, match=r"lost 3 times before round 4 was done"):
        simulate(tiny(**changes), tmp_path, run_round=lossy)
    assert ran == [0, 1, 1, 1, 2, 3, 3, 3]


def test_a_clock_that_is_set_back(tmp_path):
    """By an hour, in the second round: the checkpoint counts, and so do the seconds."""
    clock, config = ManualClock(tick=1), tiny(rounds={"total": 4, "checkpoint_every": 2})
    federation = Federation(config, tmp_path, clock=clock)
    federation.step()
    clock.set_back = 3600
    federation.step()
    federation.close()
    federation = Federation(config, tmp_path, resume=True, clock=clock)
    assert federation.t == 2
    while federation.step():
        pass
    walls = [0, *tables.read(tmp_path, "rounds")["wall"].to_pylist(), federation.finish()["seconds"]]
    assert walls == sorted(walls)
    federation.close()


def test_a_checkpoint_with_a_time_below_zero_counts(tmp_path):
    """Where the clock was set back, an older raysim wrote one."""
    config = tiny(rounds={"total": 4, "checkpoint_every": 2})
    federation = Federation(config, tmp_path)
    federation.step()
    federation.saved.save(1, -3600.0)
    federation.close()
    federation = Federation(config, tmp_path, resume=True)
    assert federation.t == 1
    assert federation.wall >= 0
    federation.close()


def test_the_hash_is_of_the_model_and_of_each_client(tmp_path):
    """After the model each client's number, as 8 bytes, and the SHA-256 of what it keeps: the names, types and shapes of its
    arrays as JSON, then their bytes. The same before a checkpoint, after it, and where no state is in memory."""
    changes = {
        **METHODS["scaffold"],
        "rounds": {"total": 5, "checkpoint_every": 3},
        "engine": {"local": {"state_bytes": 0}},
    }
    federation = Federation(tiny(**changes), tmp_path)
    for saved in (False, False, True, False):
        federation.step()
        engine, digest = federation.engine, hashlib.sha256()
        assert (not engine.client_states.maps[0]) == saved
        for name, tensor in federation.server.layers.state_dict(federation.server.value).items():
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        assert len(engine.client_states) > 2
        for client in sorted(engine.client_states):
            state = sorted(engine.value_of(engine.client_states[client]).items())
            kind = json.dumps([[f"state.{name}", a.dtype.str, a.shape] for name, a in state], separators=(",", ":"))
            content = b"".join(np.ascontiguousarray(a).tobytes() for _, a in state)
            digest.update(client.to_bytes(8, "little") + hashlib.sha256(kind.encode() + content).digest())
        assert federation.sha256() == digest.hexdigest()
    federation.close()


def test_states_that_fit_stay_in_memory(ran, tmp_path):
    """Clients that take part again and again count once."""
    room = 8 * 4 * ran().server.layers.P  # bytes of the controls of all clients
    rounds, engine = {"total": 8, "checkpoint_every": 1}, {"local": {"state_bytes": room}}
    federation = Federation(tiny(**METHODS["scaffold"] | {"rounds": rounds, "engine": engine}), tmp_path)
    while federation.step():
        pass
    federation.close()
    asked = tables.read(tmp_path, "clients")["client"].to_pylist()
    assert {*federation.engine.client_states.maps[0]} == {*asked}
    assert len(asked) > 2 * len({*asked})


def test_a_state_that_is_damaged_while_the_run_goes_on(tmp_path):
    """It ends in a sentence, once a client takes part whose state is not in memory any more."""
    rounds = {"total": 20, "checkpoint_every": 1}
    config = tiny(**METHODS["scaffold"] | {"rounds": rounds, "engine": {"local": {"state_bytes": 0}}})
    federation = Federation(config, tmp_path)
    federation.step()
    [path] = (tmp_path / "checkpoints").glob("*.states")
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    sentence = f"cannot be read from the checkpoint any more: {path}: the state of client . is not as it was written"
    with pytest.raises((RoundFailed, StateUnreadable), match=sentence):  # noqa: PT012
        while federation.step():
            pass
    federation.close()


def test_a_checkpoint_that_was_passed_over_does_not_come_back(tmp_path):
    """Where its file is back, for instance with a disk: the rows after the checkpoint that was taken are gone by then."""
    changes = METHODS["scaffold"] | {"rounds": {"total": 6, "checkpoint_every": 2}}
    expected, folder = simulate(tiny(**changes), tmp_path / "expected"), tmp_path / "run"

    def run(rounds: int) -> None:
        federation = Federation(tiny(**changes), folder, resume=folder.exists())
        for _ in range(rounds):
            federation.step()
        federation.close()

    run(5)
    states = [*(folder / "checkpoints").glob("*.states")]
    assert len(states) == 2
    for path in states:
        path.rename(tmp_path / path.name)
    run(1)  # from the start
    for path in states:
        (tmp_path / path.name).rename(path)
    resumed = simulate(tiny(**changes), folder, resume=True)
    assert resumed.sha256() == expected.sha256()
    assert tables.read(folder, "rounds")["round"].to_pylist() == [*range(6)]


LEARNED = {"data": {"proxy": {"samples": 24}}, "weighting": [{"fedlaw": {"epochs": 2}}]}


@pytest.mark.parametrize("saved", [False, True])
def test_the_file_that_a_run_began_with_stays(saved, tmp_path):
    """After a checkpoint, too: a client that has not taken part yet begins with the statistics in that file."""
    init, quiet = tmp_path / "init.safetensors", {"evaluate": {"global": False}}
    write_tensors(init, Federation(tiny(**quiet), tmp_path / "model").model().state_dict())
    began = init.read_bytes()
    config = tiny(model={"bn_stats": "local", "init": str(init)}, **quiet)
    federation = Federation(config, tmp_path / "run")
    federation.step()
    if saved:
        federation.checkpoint()
    federation.close()
    init.write_bytes(began[:-1] + b"?")
    with pytest.raises(ConfigError, match=r"^model\.init: \S+init\.safetensors is not .* Put it back"):
        Federation(config, tmp_path / "run", resume=True)
    init.write_bytes(began)

    def lossy(*_: Any, **__: Any) -> Round:
        init.write_bytes(began[:-1] + b"?")
        resumed.run_round = run_round
        raise StateLost("gone")

    resumed = Federation(config, tmp_path / "run", resume=True, run_round=lossy)
    assert resumed.t == saved
    if saved:  # the checkpoint has the model, and the engine what it was told as the run went on
        assert resumed.step()["round"] == 1
    else:
        with pytest.raises(ConfigError, match=r"^model\.init"):
            resumed.step()
    resumed.close()


def test_what_a_method_reads_of_the_run_stays(tmp_path):
    """FedLAW computes in another order where models are not gathered; what no method reads may change."""
    for name, changes in (("fedlaw", LEARNED), ("fedavg", {})):
        simulate(tiny(**changes, rounds={"total": 1}), tmp_path / name)
    more = {"rounds": {"total": 2}, "engine": {"local": {"gather_bytes": 0}}}
    check_unchanged(tiny(**more), tmp_path / "fedavg")
    check_unchanged(tiny(**LEARNED, rounds={"total": 2}), tmp_path / "fedlaw")
    check_unchanged(tiny(**LEARNED, engine={"ray": {"fan_in": 2}}), tmp_path / "fedlaw")
    with pytest.raises(
        ConfigError, match="gather_bytes was 2147483648 when the run began, and fedlaw computes with it"
    ):
        check_unchanged(tiny(**LEARNED, **more), tmp_path / "fedlaw")


def test_a_run_stays_on_its_kind_of_device(tmp_path):
    config = tiny(rounds={"total": 1})
    simulate(config, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["device"] == "cpu"
    write_json(tmp_path / "manifest.json", manifest | {"device": "cuda"})
    with pytest.raises(ConfigError, match="began on cuda, and this engine computes on cpu, which rounds differently"):
        Federation(config, tmp_path, resume=True)


@pytest.mark.parametrize("method", [{"server": [{"feddf": {"epochs": 1}}]}, {"server": [{"fedbe": {"epochs": 1}}]}])
def test_the_batches_of_an_evaluation_are_no_part_of_the_bits(method, tmp_path):
    """Also with methods that ask the clients' models for predictions."""
    changes = {"data": {"proxy": {"samples": 40}}, **method}
    found = {simulate(tiny(**changes, evaluate={"batch_size": n}), tmp_path / str(n)).sha256() for n in (512, 1)}
    assert len(found) == 1


# ---- the folder removed under a run


@pytest.mark.parametrize("victim", ["", "rounds", "clients", "checkpoints", "rounds/*", "layers/*"])
def test_what_is_removed_under_a_run_is_missed(victim, tmp_path, monkeypatch):
    """Nothing is made again in silence: a folder whose first half is lost would be taken for a whole run."""
    monkeypatch.setattr(tables, "FLUSH_SECONDS", 0.0)
    run = tmp_path / "run"
    config = tiny(rounds={"total": 6, "checkpoint_every": 3})
    with pytest.raises((FolderGone, DamagedTable), match=f"{run}.* (is gone|are missing)"):  # noqa: PT012
        for ran in raysim.stream(config, out=run):
            if ran.number == 4:
                for path in [*run.glob(victim)] if victim.endswith("*") else [run / victim]:
                    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert not (run / "result.json").exists()
    if not victim.endswith("*"):
        assert not (run / victim).exists()


def test_a_run_with_rows_missing_is_not_continued(tmp_path):
    config = tiny(rounds={"total": 4, "checkpoint_every": 1})
    for ran in raysim.stream(config, out=tmp_path / "run"):
        if ran.number == 2:
            break
    for table in ("traffic", "rounds"):
        shutil.move(tmp_path / "run" / table, tmp_path / table)
        with pytest.raises(DamagedTable, match="rows of 2 of 2 rounds are missing, the first of round 0"):
            Federation(config, tmp_path / "run", resume=True)
        shutil.move(tmp_path / table, tmp_path / "run" / table)


# ---- the real command line

RAY = {"ray": {"clients_per_actor": 3}}


def waiting(gate: Path, t: int, engine: Any) -> Config:
    """A run in whose round `t` a client waits at the gate."""
    client = ["scaffold", {"waits": {"gate": str(gate), "t": t}}]
    return tiny(**METHODS["scaffold"] | {"client": client}, **ROUNDS, engine=engine)


def start(gate: Path, t: int, engine: Any) -> tuple[Command, Path]:
    """The command that runs it, and the run's folder."""
    file, folder = gate.with_name("federation.yaml"), gate.with_name("run")
    file.write_text(to_yaml(waiting(gate, t, engine)))
    return Command("run", file, "--out", folder), folder


def played_on(gate: Path, t: int, first: int, undisturbed: Callable[[str], Federation]) -> None:
    """What is left can be run by another engine as well."""
    federation = Federation(waiting(gate, t, "local"), gate.with_name("run"), resume=True)
    assert federation.step()["round"] == first
    while federation.step():
        pass
    assert federation.finish()["sha256"] == undisturbed("scaffold").sha256()
    federation.close()
    assert tables.read(federation.folder, "rounds")["round"].to_pylist() == list(range(6))


def test_a_command_whose_folder_is_removed(gate):
    run, folder = start(gate, 2, "local")
    with held(gate):
        folder.rename(folder.with_name("moved"))  # at once, so that it is gone whatever the run is writing
    assert run.end() == 1, run.output
    assert re.search(rf"raysim: {folder}\S* is gone: it was removed or moved", run.output), run.output
    assert "Traceback" not in run.output
    assert not folder.exists()


def test_ctrl_c(gate, undisturbed):
    """As the terminal sends it, to every process of the group."""
    run, folder = start(gate, 2, RAY)
    with held(gate):
        os.killpg(run.process.pid, signal.SIGINT)
        run.wait_for("Stopping after this round")
    assert run.end() == 128 + signal.SIGINT, run.output
    assert "Stopped." in run.output
    assert f"raysim resume {folder}" in run.output
    assert "Traceback" not in run.output
    run.wait_for_all()
    secret = run.mark.encode()  # an environment variable of all its processes
    assert not [path for path, content in contents(folder) if secret in content]

    played_on(gate, 2, 3, undisturbed)


def test_a_second_ctrl_c_does_not_wait_for_the_clients(gate):
    """One waits as long as the command lives."""
    run, _ = start(gate, 0, RAY)
    with held(gate):
        run.signal(signal.SIGINT)
        run.wait_for("Stopping after this round")
        run.signal(signal.SIGINT)
        assert run.end() == 128 + signal.SIGINT, run.output
        run.wait_for_all()
    assert "Stopped at once." in run.output
    assert "Traceback" not in run.output


def test_sigkill(gate, undisturbed):
    run, _ = start(gate, 3, RAY)
    with held(gate):
        run.process.kill()
        assert run.end() == -signal.SIGKILL
        # Ray's two small agents may look for their dead cluster for a minute before they give up.
        run.wait_for_all("ray::DashboardAgent", "ray::RuntimeEnvAgent")

    played_on(gate, 3, 2, undisturbed)
