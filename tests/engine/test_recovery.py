"""Processes die and clients fail: the run goes on, to the same bits wherever that can be."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray
import sabotage
from conftest import play, tiny
from ray import cloudpickle
from sabotage import Fails, FailsInTests, Stalls, Tells, ending, kill
from typer.testing import CliRunner

import raysim.engine.ray.engine
import raysim.federation.round
from raysim.cli.app import app
from raysim.config import to_yaml
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting
from raysim.engine import scheduler
from raysim.engine.base import Call, Engine, Handle, HostLost, MachineFailure
from raysim.engine.evaluation import evaluate
from raysim.engine.ray.actors import new_actor
from raysim.engine.ray.driver import RemoteFederation, stored
from raysim.engine.ray.engine import RayEngine
from raysim.engine.ray.pool import Pool
from raysim.federation import Federation, RoundFailed, local_engine, prepare, sample
from raysim.methods import CLIENTS, WEIGHTINGS
from raysim.models import MODELS
from raysim.store import tables

PAIR = {"ray": {"clients_per_actor": 2}}  # three clients a round: one host trains two of them
EACH = {"ray": {"clients_per_actor": 1}}
METHODS = {
    "fedavg": {},
    "fedlws": {"server": ["fedlws"]},
    "scaffold": {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
    "fedala": {"client": ["fedala"]},
}

GATHERED = {  # FedLAW gives each row of a matrix of all updates a weight of its own
    "weighting": [{"fedlaw": {"epochs": 2}}], "data": {"proxy": {"samples": 8}}, "model": {"bn_stats": "recalibrate"}
}  # fmt: skip


@pytest.fixture(autouse=True)
def mischief(monkeypatch):
    cloudpickle.register_pickle_by_value(sabotage)  # no process but this one can import it
    for method in (Stalls, Fails, FailsInTests, Tells):
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
    told = [line for summary in shown for line in summary["messages"]]
    assert len(told) == 1
    assert f"a client actor on node {federation.engine.nodes[0]} died" in told[0]
    assert set(tables.read(federation.folder, "clients")["status"].to_pylist()) == {"ok"}


@pytest.mark.parametrize(("how", "rounds"), [(signal.SIGKILL, 2), (signal.SIGSTOP, 1)], ids=["killed", "hanging"])
def test_actors_lost_between_training_and_reduction(how, rounds, tmp_path, warm_ray, monkeypatch):
    """Models that died with their host are trained again; once a round here, by the signal in the plan. A host that hangs
    is found out although the engine asks another, which waits for it."""

    class Assassin(Weighting):
        """Kills or stops the process that trained the last client."""

        def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
            os.kill(int((tmp_path / f"pid-{cohort.clients[-1]}").read_text()), how)
            return prior

    changes = METHODS["fedlws"] | {"rounds": {"total": rounds}}
    expected = undisturbed(changes, tmp_path / "undisturbed")
    monkeypatch.setitem(WEIGHTINGS, "assassin", Assassin)
    changes = with_client(changes, "tells", folder=str(tmp_path)) | {"weighting": ["assassin"]}
    engine = {"ray": {"clients_per_actor": 2, "client_timeout": 2}}
    run = play(tiny(**changes, engine=engine), tmp_path / "lost", make_engine=warm_ray)
    assert run.sha256() == expected
    messages = tables.read(run.folder, "events")["message"].to_pylist()
    assert len(messages) == rounds  # one host a round, and the right one
    assert all(("did not get on for 2 s" in message) == (how == signal.SIGSTOP) for message in messages)


@pytest.mark.parametrize("server", [["fedlws"], []], ids=["kept", "summed"])
def test_an_actor_lost_while_clients_that_do_not_train_initialise(server, tmp_path, warm_ray, monkeypatch):
    """Its models, or sums, are of clients that trained before: they train again."""

    def initialize(engine: Engine, *args: Any) -> Any:
        kill(pid_of(engine.hosts[1]))
        return scheduler.initialize(engine, *args)

    monkeypatch.setattr(scheduler, "VISIT_BYTES", 1)  # two visits a host: sums are asked for once all have trained
    rounds = {"total": 1, "participation": 0.5, "evaluate_every": 1}
    changes = {"client": [{"fedala": {"clients": "all"}}], "server": server, "rounds": rounds}
    expected = undisturbed(changes, tmp_path / "undisturbed")
    monkeypatch.setattr(raysim.federation.round, "initialize", initialize)
    run = play(tiny(**changes, engine=PAIR), tmp_path / "lost", make_engine=warm_ray)
    assert run.sha256() == expected
    assert len(tables.read(run.folder, "events")) == 1


def test_after_a_loss_a_visit_brings_no_more_than_before(tmp_path, warm_ray, monkeypatch):
    """A host dies in its third visit: those of the first two are not trained again in one."""
    visits: list[tuple[int, ...]] = []

    class Notes(RayEngine):
        def train(self, call: Call) -> list[Handle]:
            visits.append(call.args[0].clients)
            return super().train(call)

    monkeypatch.setattr(raysim.engine.ray.engine, "RayEngine", Notes)
    monkeypatch.setattr(scheduler, "VISIT_BYTES", 1)
    a, b, c = cohort()
    changes = with_client({"rounds": {"total": 1}}, "fails", how="dies", client=c, times=1, folder=str(tmp_path))
    play(tiny(**changes, engine={"ray": {"clients_per_actor": 3}}), tmp_path / "dies", make_engine=warm_ray)
    assert sorted(visits) == sorted([(a,), (b,), (c,)] * 2)


@pytest.mark.parametrize("engine", ["local", PAIR], ids=["local", "ray"])
@pytest.mark.parametrize("name", ["fedavg", "fedlws", "scaffold"])
def test_failed_clients_are_left_out(name, engine, tmp_path, request):
    """A client that refuses and one that diverges leave the same gap, with the same weights around it."""
    make_engine = local_engine if engine == "local" else request.getfixturevalue("warm_ray")
    hashes = []
    for how, reason in (("refuses", "holds no sense"), ("diverges", "not finite")):
        changes = with_client(METHODS[name], "fails", how=how, client=cohort()[1])
        federation = Federation(tiny(**changes, engine=engine), tmp_path / how, make_engine=make_engine)
        first = federation.step()
        while federation.step():
            pass
        federation.finish()
        federation.close()
        hashes.append(federation.sha256())
        assert (first["clients_ok"], first["clients_failed"]) == (2, 1)
        [failure] = first["messages"]
        assert failure.startswith(f"client {cohort()[1]}, round 1, node ")
        assert reason in failure
        event = tables.read(federation.folder, "events").to_pylist()[0]
        assert (event["round"], event["of"], event["client"], event["message"]) == (0, "client", cohort()[1], failure)
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


def test_actor_that_dies_as_it_starts_ends_the_run(tmp_path, warm_ray, monkeypatch):
    monkeypatch.setitem(MODELS, "kills_actors", sabotage.kills_actors)
    with pytest.raises(MachineFailure, match="a client actor could not start: its process ended"):
        Federation(tiny(model={"name": "kills_actors"}, engine=PAIR), tmp_path, make_engine=warm_ray)


def test_client_that_kills_its_process_ends_the_run(tmp_path, warm_ray):
    """After three attempts, the last of which it has to itself; the run can go on once it does not."""
    changes = with_client({"rounds": {"total": 3, "checkpoint_every": 1}}, "fails", how="dies", client=cohort()[1], t=0)
    federation = Federation(tiny(**changes, engine=PAIR), tmp_path / "dies", make_engine=warm_ray)
    with pytest.raises(RoundFailed, match=rf"client {cohort()[1]}, round 1, node .* died 3 times: its process ended\n"):
        federation.step()
    federation.close()
    *deaths, end = tables.read(tmp_path / "dies", "events").to_pylist()
    assert [event["of"] for event in deaths] == ["actor"] * 3
    assert (end["of"], "lacks what a client needs" in end["message"]) == ("run", True)


@pytest.mark.parametrize("method", [{}, METHODS["fedlws"], GATHERED], ids=["summed", "kept", "gathered"])
@pytest.mark.parametrize("engine", ["local", PAIR], ids=["local", "ray"])
@pytest.mark.parametrize(("how", "policy"), [("lacks_memory", "drop"), ("refuses", "retry")])
def test_client_that_fails_twice_trains_again(how, policy, engine, method, tmp_path, request):
    """To the same bits, whether hosts sum models while they train, keep them, or one of them learns on all."""
    make_engine = local_engine if engine == "local" else request.getfixturevalue("warm_ray")
    expected = undisturbed(method, tmp_path / "undisturbed")
    rounds = {"on_client_failure": policy}
    changes = with_client(method, "fails", how=how, client=cohort()[1], times=2, folder=str(tmp_path))
    run = play(tiny(**changes, rounds=rounds, engine=engine), tmp_path / "fails", make_engine=make_engine)
    assert run.sha256() == expected
    events = tables.read(run.folder, "events").to_pylist()
    assert [(e["round"], e["of"], e["client"]) for e in events] == [(0, "client", cohort()[1])] * 2
    assert all("trains again" in e["message"] for e in events)


TESTED: dict[str, Any] = {
    "data": {"client_test_frac": 0.25},
    "evaluate": {"personal": "after_train"},
    "rounds": {"evaluate_every": 1},
}


def test_client_that_lacks_memory_when_it_is_tested_trains_again(tmp_path, monkeypatch):
    """To the same bits. So do those after it on the same host, whose models are kept and not trained again."""
    changes = TESTED | METHODS["fedlws"]
    expected = play(tiny(**changes), tmp_path / "undisturbed")
    monkeypatch.setitem(MODELS, "forgetful", sabotage.lacks_memory_in_tests)
    run = play(tiny(**changes, model={"name": "forgetful"}), tmp_path / "fails")
    assert run.sha256() == expected.sha256()
    tested = [tables.read(folder, "personal") for folder in (run.folder, expected.folder)]
    assert tested[0].equals(tested[1])
    [event] = tables.read(run.folder, "events").to_pylist()
    assert re.search("no room to test", event["message"])


@pytest.mark.parametrize(
    ("how", "message"),
    [("refuses", r"on_client_failure is stop.\nclient \d"), ("raises", "error in a client's code.*cannot count")],
)
def test_client_that_fails_when_it_is_tested_ends_a_run_as_one_that_fails_in_training(how, message, tmp_path):
    changes = with_client(TESTED, "failsintests", how=how)
    changes["rounds"] = {**TESTED["rounds"], "on_client_failure": "stop"}
    federation = Federation(tiny(**changes), tmp_path)
    with pytest.raises(RoundFailed, match=re.compile(message, re.DOTALL)):
        federation.step()
    federation.close()


@pytest.mark.parametrize(
    ("how", "rounds", "message"),
    [
        ("raises", {}, "error in a client's code ends the run.\nclient C, round 2, .*Traceback.*C cannot count"),
        ("lacks_memory", {}, "lacks what a client needs.\nclient C, round 2, .*MemoryError: no room for 3 num.*resume"),
        ("diverges", {"on_client_failure": "stop"}, "on_client_failure is stop.\nclient C, round 2, .*not finite"),
        (
            "refuses",
            {"min_clients": 3},
            "2 of the 3 clients of round 2 .*min_clients is 3.\nclient C, .*holds no sense",
        ),
        ("diverges", {"all": True}, "0 of the 3 clients of round 2 .*min_clients is 1.\nclient .*not finite"),
    ],
)
def test_failures_that_end_a_run(how, rounds, message, tmp_path):
    """With the round before it kept, and the reason in `events`."""
    [client] = [c for c in sample(3, 1, 8, 3) if c not in cohort()][:1]
    who = -1 if rounds.pop("all", False) else client
    federation = Federation(tiny(**with_client({}, "fails", how=how, client=who, t=1), rounds=rounds), tmp_path)
    assert federation.step()["clients_ok"] == 3
    with pytest.raises(RoundFailed, match=re.compile(message.replace("C", str(client)), re.DOTALL)) as stop:
        federation.step()
    federation.close()
    assert tables.read(tmp_path, "rounds")["round"].to_pylist() == [0]
    assert tables.read(tmp_path, "events").to_pylist()[-1]["message"] == str(stop.value)


def test_command_line_shows_the_clients_traceback_and_no_other(tmp_path):
    (tmp_path / "run.yaml").write_text(to_yaml(tiny(**with_client({}, "fails", how="raises"))))
    shown = CliRunner().invoke(app, ["run", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run")])
    assert shown.exit_code == 1
    first = "raysim: an error in a client's code ends the run.\n"
    assert shown.stderr.startswith(f"{first}client {cohort()[0]}, round 1, node local: Traceback")
    assert shown.stderr.count("Traceback") == 1
    assert "cannot count" in shown.stderr


def test_hanging_host_is_replaced(tmp_path, warm_ray):
    expected = undisturbed(METHODS["scaffold"], tmp_path / "undisturbed")
    folder = str(tmp_path)
    changes = with_client(METHODS["scaffold"], "fails", how="hangs", client=cohort()[1], times=1, folder=folder)
    engine = {"ray": {"clients_per_actor": 2, "client_timeout": 1.5}}
    run = play(tiny(**changes, engine=engine), tmp_path / "hangs", make_engine=warm_ray)
    assert run.sha256() == expected
    [event] = tables.read(run.folder, "events").to_pylist()
    assert "did not get on for 1.5 s (engine.ray.client_timeout)" in event["message"]


def test_host_that_hangs_in_a_test_is_replaced(tmp_path, warm_ray, monkeypatch):
    monkeypatch.setitem(MODELS, "hangs_in_tests", sabotage.hangs_in_tests)
    (tmp_path / "hung").mkdir()  # and so it does not again
    changes = {"model": {"name": "hangs_in_tests", "options": {"folder": str(tmp_path)}}}
    expected = undisturbed(changes, tmp_path / "undisturbed")
    (tmp_path / "hung").rmdir()
    engine = {"ray": {"clients_per_actor": 2, "client_timeout": 1.5}}
    run = play(tiny(**changes, engine=engine), tmp_path / "hangs", make_engine=warm_ray)
    assert run.sha256() == expected
    [message] = tables.read(run.folder, "events")["message"].to_pylist()
    assert "did not get on for 1.5 s (engine.ray.client_timeout)" in message


class Dying:
    """Builds a federation, after so many processes that died of it."""

    def __init__(self, deaths: int, folder: Path):
        self.deaths, self.folder = deaths, folder

    def __call__(self, *args: Any) -> Federation:
        for i in range(self.deaths):
            if not (marker := self.folder / f"died-{i}").exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return Federation(*args)


def test_driver_that_always_dies_ends_the_run(tmp_path, cluster):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = tiny(engine={"ray": {"clients_per_actor": 3}})
    with pytest.raises(MachineFailure, match="driver died 3 times before a round was played: its process ended"):
        RemoteFederation(Dying(9, tmp_path), config, tmp_path / "run", False, stored(prepare(config)))


def test_driver_killed(tmp_path, cluster):
    """While it builds, and between rounds."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    changes = METHODS["scaffold"] | {"rounds": {"total": 4, "checkpoint_every": 2}}
    expected = undisturbed(changes, tmp_path / "undisturbed")
    engine = {"ray": {"clients_per_actor": 3}}
    config = tiny(**changes, engine=engine)
    federation = RemoteFederation(Dying(1, tmp_path), config, tmp_path / "killed", False, stored(prepare(config)))
    rounds = [federation.step()["round"] for _ in range(3)]
    kill(pid_of(federation._driver))
    while (shown := federation.step()) is not None:
        rounds.append(shown["round"])
    assert rounds == [0, 1, 2, 2, 3]  # from the checkpoint after round 1 on
    assert federation.finish()["sha256"] == expected
    federation.close()
    assert tables.read(tmp_path / "killed", "rounds")["round"].to_pylist() == [0, 1, 2, 3]
    events = tables.read(tmp_path / "killed", "events").to_pylist()
    assert [(event["round"], event["of"]) for event in events] == [(0, "driver"), (2, "driver")]


def test_driver_that_was_not_waited_for_goes_on(tmp_path, cluster, monkeypatch):
    """As where Ctrl-C comes while a loop asks for the model."""
    config = tiny(engine={"ray": {"clients_per_actor": 3}})
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    federation = RemoteFederation(Dying(0, tmp_path), config, tmp_path / "run", False, stored(prepare(config)))
    assert federation.step()["round"] == 0
    with monkeypatch.context() as patched:
        patched.setattr(ray, "get", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            federation.model()
    assert federation.step()["round"] == 1  # which no checkpoint knows
    federation.close()


def test_neighbours_take_over_where_memory_ran_out(tmp_path, warm_ray):
    """One process fewer then: a new one would bring down the next."""
    changes = METHODS["scaffold"]
    expected = undisturbed(changes, tmp_path / "undisturbed")
    federation = Federation(tiny(**changes, engine=PAIR), tmp_path / "killed", make_engine=warm_ray)
    federation.step()
    lost = HostLost({1}, "its node ran out of memory", out_of_memory=True)
    federation.engine.replace_lost(lost)
    assert federation.engine.hosts[1] is federation.engine.hosts[0]
    [message] = federation.step()["messages"]
    assert "its node ran out of memory; the other actors of its node do its work" in message
    federation.step()
    federation.finish()
    assert federation.sha256() == expected
    federation.close()


@pytest.fixture
def no_room(monkeypatch) -> Callable[[], None]:
    """From the call on, every new host asks for more than the cluster has."""

    def start() -> None:
        monkeypatch.setattr(Pool, "take", lambda _, nodes, *share: [None] * len(nodes))
        monkeypatch.setattr(raysim.engine.ray.engine, "START_SECONDS", 0.2)
        monkeypatch.setattr(raysim.engine.ray.engine, "new_actor", lambda node, _, gpus: new_actor(node, 10**6, gpus))

    return start


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
    with pytest.raises(MachineFailure, match="no room for new ones"):
        evaluate(federation.engine, federation.partition.server_test)
    federation.close()


def test_the_living_share_the_work_of_all_that_died_together(tmp_path, warm_ray, no_room):
    """Each of a node's actors is buried by itself; none takes over who is dead, too."""
    changes = METHODS["scaffold"] | {"rounds": {"participation": 0.5}}
    expected = undisturbed(changes, tmp_path / "undisturbed")
    federation = Federation(tiny(**changes, engine=EACH), tmp_path / "killed", make_engine=warm_ray)
    federation.step()
    no_room()
    engine = federation.engine
    *dead, third, fourth = engine.hosts
    for pid in [pid_of(actor) for actor in dead]:
        kill(pid)
    for i in range(2):
        engine.replace_lost(HostLost({i}))
    assert set(engine.hosts[:2]) == {third, fourth} == set(engine.hosts[2:])
    while federation.step():
        pass
    federation.finish()
    federation.close()
    assert federation.sha256() == expected


def test_one_new_host_does_the_work_of_all_where_there_is_room_for_one(tmp_path, warm_ray, monkeypatch):
    federation = Federation(tiny(engine=PAIR), tmp_path, make_engine=warm_ray)
    engine, room = federation.engine, iter([1])
    monkeypatch.setattr(Pool, "take", lambda _, nodes, *share: [None] * len(nodes))
    start = raysim.engine.ray.engine.new_actor
    monkeypatch.setattr(
        raysim.engine.ray.engine, "new_actor", lambda node, *share: start(node if next(room, 0) else "a" * 56, *share)
    )
    engine.replace_lost(HostLost({0, 1}))
    assert engine.hosts[0] is engine.hosts[1]
    assert federation.step()["clients_ok"] == 3
    federation.close()


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def test_work_that_brings_down_its_host_ends(tmp_path):
    """After three attempts, with machine and reason; the two that were lost before were replaced."""
    federation = Federation(tiny(), tmp_path)
    engine, replaced = federation.engine, []
    engine.replace = lambda lost: replaced.append(lost.hosts) or "another was started"  # type: ignore[method-assign]

    def fatal() -> None:
        raise HostLost({0}, "its node ran out of memory")

    with pytest.raises(MachineFailure, match="node local died 3 times at the same work: its node ran out of memory"):
        engine.retry_after_loss(fatal)
    assert replaced == [{0}] * 2
    federation.close()
