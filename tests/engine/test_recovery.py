"""Processes die and clients fail: the run goes on, to the same bits wherever that can be."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import sabotage
from conftest import play, tiny
from ray import cloudpickle
from sabotage import Fails, Stalls, Tells, ending, kill
from typer.testing import CliRunner

import raysim.engine.ray.engine
from raysim.cli.app import app
from raysim.config import to_yaml
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting
from raysim.engine import scheduler
from raysim.engine.base import HostLost
from raysim.engine.evaluation import evaluate
from raysim.engine.ray.actors import HostActor
from raysim.engine.ray.driver import RemoteFederation
from raysim.engine.ray.engine import RayEngine
from raysim.engine.ray.placement import PlacementError
from raysim.federation import Federation, RoundFailed, local_engine, prepare, sample
from raysim.methods import CLIENTS, WEIGHTINGS
from raysim.store import tables

PAIR = {"ray": {"clients_per_actor": 2}}  # three clients a round: one host trains two of them
EACH = {"ray": {"clients_per_actor": 1}}
METHODS = {
    "fedavg": {},
    "fedlws": {"server": ["fedlws"]},
    "scaffold": {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
    "fedala": {"client": ["fedala"]},
}


@pytest.fixture(autouse=True)
def mischief(monkeypatch):
    cloudpickle.register_pickle_by_value(sabotage)  # no process but this one can import it
    for method in (Stalls, Fails, Tells):
        monkeypatch.setitem(CLIENTS, method.__name__.lower(), method)


def with_client(changes: dict[str, Any], method: str, **fields: Any) -> dict[str, Any]:
    return {**changes, "client": [*changes.get("client", []), {method: fields}]}


def undisturbed(changes: dict[str, Any], folder: Path) -> str:
    return play(tiny(**changes), folder).sha256()


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedala"])
def test_actor_killed_while_it_trains(name, tmp_path, warm_ray):
    expected = undisturbed(METHODS[name], tmp_path / "undisturbed")
    changes = with_client(METHODS[name], "stalls", folder=str(tmp_path))
    with ending(tmp_path):
        federation = Federation(tiny(**changes, engine=PAIR), tmp_path / "killed", make_engine=warm_ray)
        shown = list(iter(federation.step, None))
        federation.finish()
        federation.close()
    assert federation.sha256() == expected
    [told] = [line for summary in shown for line in summary["failures"]]
    assert f"a client actor on node {federation.engine.nodes[0]} died" in told
    assert set(tables.read(federation.folder, "clients")["status"].to_pylist()) == {"ok"}


def test_actors_killed_between_training_and_reduction(tmp_path, warm_ray, monkeypatch):
    """Models that died with their host are trained again; once a round here, by the kill in the plan."""

    class Assassin(Weighting):
        """Kills the process that trained the first client."""

        def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
            kill(int((tmp_path / f"pid-{cohort.clients[0]}").read_text()))
            return prior

    changes = METHODS["fedlws"] | {"rounds": {"total": 2}}
    expected = undisturbed(changes, tmp_path / "undisturbed")
    monkeypatch.setitem(WEIGHTINGS, "assassin", Assassin)
    changes = with_client(changes, "tells", folder=str(tmp_path)) | {"weighting": ["assassin"]}
    assert play(tiny(**changes, engine=PAIR), tmp_path / "killed", make_engine=warm_ray).sha256() == expected


@pytest.mark.parametrize("engine", ["local", PAIR], ids=["local", "ray"])
@pytest.mark.parametrize("name", ["fedavg", "fedlws", "scaffold"])
def test_failed_clients_are_left_out(name, engine, tmp_path, request):
    """A client that raises and one that diverges leave the same gap, with the same weights around it."""
    make_engine = local_engine if engine == "local" else request.getfixturevalue("warm_ray")
    hashes = []
    for how, reason in (("raises", "cannot count"), ("diverges", "not finite")):
        changes = with_client(METHODS[name], "fails", how=how, client=cohort()[1])
        federation = Federation(tiny(**changes, engine=engine), tmp_path / how, make_engine=make_engine)
        first = federation.step()
        while federation.step():
            pass
        federation.finish()
        federation.close()
        hashes.append(federation.sha256())
        assert (first["clients_ok"], first["clients_failed"]) == (2, 1)
        [failure] = first["failures"]
        assert failure.startswith(f"client {cohort()[1]}, round 1, node ")
        assert reason in failure
        rows = clients_of_round_0(federation.folder)
        left_out = rows.pop(cohort()[1])
        assert reason in left_out["status"]
        assert left_out["weight"] is None
        assert {row["status"] for row in rows.values()} == {"ok"}
        sizes = np.array([1 if name == "scaffold" else row["samples"] for row in rows.values()])
        assert [row["weight"] for row in rows.values()] == pytest.approx(sizes / sizes.sum())
    assert hashes[0] == hashes[1]
    assert hashes[0] != undisturbed(METHODS[name], tmp_path / "undisturbed")


def cohort() -> tuple[int, ...]:
    """The clients of round 0."""
    config = tiny()
    return sample(config.seed, 0, 8, config.rounds.cohort_size(8))


def clients_of_round_0(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["client"]: row for row in tables.read(folder, "clients").to_pylist() if row["round"] == 0}


def test_client_that_kills_its_process_is_left_out(tmp_path, warm_ray):
    """Again and again; what it trains beside is not. The result is that of a client that raises."""
    hashes = []
    for how, reason in (("dies", "died again and again"), ("raises", "cannot count")):
        changes = with_client({"rounds": {"total": 1}}, "fails", how=how, client=cohort()[1])
        federation = play(tiny(**changes, engine=PAIR), tmp_path / how, make_engine=warm_ray)
        rows = clients_of_round_0(federation.folder)
        assert reason in rows.pop(cohort()[1])["status"]
        assert {row["status"] for row in rows.values()} == {"ok"}
        hashes.append(federation.sha256())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("engine", ["local", PAIR], ids=["local", "ray"])
def test_run_stops_where_every_client_raises(engine, tmp_path, request):
    make_engine = local_engine if engine == "local" else request.getfixturevalue("warm_ray")
    config = tiny(**with_client({}, "fails", how="raises", t=1), engine=engine)
    federation = Federation(config, tmp_path, make_engine=make_engine)
    assert federation.step()["clients_ok"] == 3
    with pytest.raises(RoundFailed, match=r"every client of round 2 failed:\nclient .*, node .*Traceback") as stop:
        federation.step()
    assert "cannot count" in str(stop.value)
    federation.close()


def test_command_line_shows_the_clients_traceback_and_no_other(tmp_path):
    (tmp_path / "run.yaml").write_text(to_yaml(tiny(**with_client({}, "fails", how="raises"))))
    shown = CliRunner().invoke(app, ["run", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run")])
    assert shown.exit_code == 1
    first = f"raysim: every client of round 1 failed:\nclient {cohort()[0]}, round 1, node local: Traceback"
    assert shown.stderr.startswith(first)
    assert shown.stderr.count("Traceback") == 1
    assert "cannot count" in shown.stderr


def test_round_without_models_leaves_the_server_as_it_is(tmp_path):
    """Every client diverges."""
    federation = Federation(tiny(**with_client({}, "fails", how="diverges", t=1)), tmp_path)
    federation.step()
    before = federation.server.value.clone()
    assert federation.step()["clients_ok"] == 0
    assert federation.server.value.equal(before)
    federation.close()


def test_driver_killed(tmp_path, cluster):
    changes = METHODS["scaffold"] | {"rounds": {"total": 4, "checkpoint_every": 2}}
    expected = undisturbed(changes, tmp_path / "undisturbed")
    engine = {"ray": {"clients_per_actor": 3}}
    config = tiny(**changes, engine=engine)
    federation = RemoteFederation(Federation, config, tmp_path / "killed", False, prepare(config))
    rounds = [federation.step()["round"] for _ in range(3)]
    kill(pid_of(federation._driver))
    while (shown := federation.step()) is not None:
        rounds.append(shown["round"])
    assert rounds == [0, 1, 2, 2, 3]  # from the checkpoint after round 1 on
    assert federation.finish()["sha256"] == expected
    federation.close()
    assert tables.read(tmp_path / "killed", "rounds")["round"].to_pylist() == [0, 1, 2, 3]


def test_hosts_take_over_where_there_is_no_room(tmp_path, warm_ray, no_room):
    """Two of three hosts die in turn and cannot be replaced; then the last one."""
    changes = METHODS["scaffold"]
    expected = undisturbed(changes, tmp_path / "undisturbed")
    federation = Federation(tiny(**changes, engine=EACH), tmp_path / "killed", make_engine=warm_ray)
    no_room()
    for _ in range(3):
        federation.step()
        kill(pid_of(federation.engine.hosts[0]))
    federation.finish()
    assert federation.sha256() == expected
    with pytest.raises(PlacementError, match="no room for new ones"):
        evaluate(federation.engine, federation.partition.server_test)
    federation.close()


def test_client_that_kills_every_process_it_gets(tmp_path, warm_ray, no_room, monkeypatch):
    """It takes two of three hosts with it; the others' clients are trained again on the last one."""
    monkeypatch.setattr(scheduler, "ATTEMPTS", 2)
    changes = {"rounds": {"total": 1}}
    expected = undisturbed(with_client(changes, "fails", how="raises", client=cohort()[1]), tmp_path / "raises")
    config = tiny(**with_client(changes, "fails", how="dies", client=cohort()[1]), engine=EACH)
    federation = Federation(config, tmp_path / "dies", make_engine=warm_ray)
    no_room()
    assert federation.step()["clients_ok"] == 2
    assert federation.sha256() == expected
    federation.close()


@pytest.fixture
def no_room(monkeypatch) -> Callable[[], None]:
    """From the call on, every new host asks for more than the cluster has."""

    def greedy(engine: RayEngine) -> tuple[Any, Any]:
        actor = ray.remote(HostActor).options(num_cpus=10**6).remote()
        return actor, actor.become.remote(engine.spec, None, None)

    def start() -> None:
        monkeypatch.setattr(raysim.engine.ray.engine, "START_SECONDS", 0.2)
        monkeypatch.setattr(RayEngine, "_new_host", greedy)

    return start


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def test_work_that_brings_down_every_host_ends(tmp_path):
    """With the number of attempts and the machine, after each loss was made good."""
    federation = Federation(tiny(), tmp_path)
    engine, restored = federation.engine, []
    engine.replace = lambda hosts: None  # type: ignore[method-assign]

    def fatal() -> None:
        raise HostLost({0})

    with pytest.raises(RuntimeError, match="died 10 times at the same work, the last on node local"):
        engine.retry_after_loss(fatal, restored.append)
    assert restored == [{0}] * 10
    federation.close()
