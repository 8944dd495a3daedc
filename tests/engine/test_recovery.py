"""Processes die and clients fail: the run goes on, to the same bits wherever that can be."""

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray
import sabotage
from clocks import ManualClock
from conftest import simulate, tiny
from ray import cloudpickle
from sabotage import Fails, FailsInTests, Tells, kill
from typer.testing import CliRunner

import raysim.engine.ray.engine
import raysim.federation.round
from raysim.cli.app import app
from raysim.config import to_yaml
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting
from raysim.engine import dispatcher
from raysim.engine.base import Call, Engine, Handle, HostLost, MachineFailure
from raysim.engine.evaluation import evaluate
from raysim.engine.local import LocalEngine
from raysim.engine.ray.driver import RemoteFederation, stored
from raysim.engine.ray.engine import RayEngine
from raysim.engine.ray.heartbeat import HeartbeatMonitor
from raysim.engine.ray.pool import Pool
from raysim.federation import Federation, RoundFailed, prepare, sample
from raysim.methods import CLIENTS, WEIGHTINGS
from raysim.models import MODELS
from raysim.store import tables

PAIR = {"ray": {"clients_per_actor": 2}}  # three clients a round: one host trains two of them
EACH = {"ray": {"clients_per_actor": 1}}
ONE = {"ray": {"clients_per_actor": 3}}
IMPATIENT = {"ray": {"clients_per_actor": 2, "client_timeout": 0.4}}
HANGS = "did not get on for 0.4 s (engine.ray.client_timeout)"
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
    for method in (Fails, FailsInTests, Tells):
        monkeypatch.setitem(CLIENTS, method.__name__.lower(), method)


def with_client(changes: dict[str, Any], method: str, **fields: Any) -> dict[str, Any]:
    return {**changes, "client": [*changes.get("client", []), {method: fields}]}


@pytest.fixture
def only_the_hung_age(tmp_path, monkeypatch) -> None:
    """Time passes for the actor whose number is in `hung`, and for no other: one that is slow must not be taken to hang."""
    clock, ages = ManualClock(), Counter[str]()

    class Patient(HeartbeatMonitor):
        def listen(self, actor_id: str, limit: float) -> tuple[bool, bool]:
            hangs = (tmp_path / "hung").exists() and (tmp_path / "hung").read_text() == actor_id
            ages[actor_id] += limit * hangs
            clock.seconds = ages[actor_id]
            return super().listen(actor_id, limit)

    monkeypatch.setattr(raysim.engine.ray.engine, "HeartbeatMonitor", lambda _: Patient(clock))


def test_actors_lost_between_training_and_reduction(tmp_path, warm_ray, ran, only_the_hung_age, monkeypatch):
    """Models that were lost with their host are trained again. One is killed in the plan of the first round, one stopped in
    that of the second: it is found out although the engine asks another, which waits for it."""
    signals = iter([signal.SIGKILL, signal.SIGSTOP])

    class Assassin(Weighting):
        """Kills or stops the process that trained the last client."""

        def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
            pid, actor = (tmp_path / f"host-{cohort.clients[-1]}").read_text().split()
            os.kill(int(pid), how := next(signals))
            if how == signal.SIGSTOP:
                (tmp_path / "hung").write_text(actor)
            return prior

    changes = METHODS["fedlws"] | {"rounds": {"total": 2}}
    monkeypatch.setitem(WEIGHTINGS, "assassin", Assassin)
    lost = with_client(changes, "tells", folder=str(tmp_path)) | {"weighting": ["assassin"], "engine": IMPATIENT}
    run = simulate(tiny(**lost), tmp_path / "lost", make_engine=warm_ray)
    assert run.sha256() == ran(**changes).sha256()
    messages = tables.read(run.folder, "events")["message"].to_pylist()
    assert len(messages) == 2, "\n".join(messages)  # one host a round, and the right one
    assert "its process ended" in messages[0]
    assert HANGS in messages[1]


class LosesTheFirstSum(LocalEngine):
    """Its host dies once, with the sum that it made while training: that cannot be fetched any more."""

    gone: Handle = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.process = object()

    @property
    def hosts(self) -> list[Any]:
        return [self.process]

    def fetch(self, calls: Sequence[tuple[int, Handle]]) -> list[Any]:
        for _, handle in calls:
            if self.gone is None and isinstance(handle, dict) and (0, 3) in handle:
                self.gone = handle
            if handle is self.gone is not None:
                raise HostLost({0})
        return super().fetch(calls)

    def replace(self, lost: HostLost) -> str:
        self.process = object()
        return "another takes its place"


def test_a_sum_lost_with_its_host(tmp_path, ran):
    """Another is made of the clients that train again; the first is not waited for."""
    run = simulate(tiny(), tmp_path, make_engine=lambda _, *args: LosesTheFirstSum(*args[:3]))
    assert run.sha256() == ran().sha256()
    assert len(tables.read(tmp_path, "events")) == 1


@pytest.mark.parametrize("server", [["fedlws"], []], ids=["kept", "summed"])
def test_an_actor_lost_while_clients_that_do_not_train_initialise(server, tmp_path, warm_ray, ran, monkeypatch):
    """Its models, or sums, are of clients that trained before: they train again."""

    def initialize(engine: Engine, *args: Any) -> Any:
        kill(pid_of(engine.hosts[1]))
        return dispatcher.initialize(engine, *args)

    monkeypatch.setattr(dispatcher, "WORK_UNIT_BYTES", 1)  # two visits a host: sums are asked for once all have trained
    rounds = {"total": 1, "participation": 0.5, "evaluate_every": 1}
    changes = {"client": [{"fedala": {"clients": "all"}}], "server": server, "rounds": rounds}
    expected = ran(**changes).sha256()
    monkeypatch.setattr(raysim.federation.round, "initialize", initialize)
    run = simulate(tiny(**changes, engine=PAIR), tmp_path / "lost", make_engine=warm_ray)
    assert run.sha256() == expected
    assert len(tables.read(run.folder, "events")) == 1


def test_actor_killed_while_it_trains(tmp_path, warm_ray, ran, monkeypatch):
    """In the third visit of a round: clients start again from the states that they had, and those of the first two visits
    are not trained again in one."""
    visits: list[tuple[int, ...]] = []

    class Notes(RayEngine):
        def train(self, call: Call) -> list[Handle]:
            visits.append(call.args[0].clients)
            return super().train(call)

    monkeypatch.setattr(raysim.engine.ray.engine, "RayEngine", Notes)
    monkeypatch.setattr(dispatcher, "WORK_UNIT_BYTES", 1)
    client = [{"scaffold": {"c_update": "mean_grad"}}, "fedala"]
    changes = {"client": client, "local": {"momentum": 0.0, "weight_decay": 0.0}}
    a, b, c = cohort(t=1)
    dies = with_client(changes, "fails", how="dies", client=c, t=1, times=1, folder=str(tmp_path))
    run = simulate(tiny(**dies, engine=ONE), tmp_path / "dies", make_engine=warm_ray)
    assert run.sha256() == ran(**changes).sha256()
    assert sorted(visits[3:9]) == sorted([(a,), (b,), (c,)] * 2)
    [message] = tables.read(run.folder, "events")["message"].to_pylist()
    assert f"a client actor on node {run.engine.nodes[0]} died: its process ended" in message
    assert set(tables.read(run.folder, "clients")["status"].to_pylist()) == {"ok"}


@pytest.mark.parametrize("engine", ["local", PAIR], ids=["local", "ray"])
@pytest.mark.parametrize("name", ["fedavg", "fedlws", "scaffold"])
def test_failed_clients_are_left_out(name, engine, tmp_path, ran, request):
    """A client that refuses and one that diverges leave the same gap, with the same weights around it."""
    make_engine = None if engine == "local" else request.getfixturevalue("warm_ray")
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
    assert hashes[0] != ran(**METHODS[name]).sha256()


def cohort(t: int = 0) -> tuple[int, ...]:
    """The clients of round t."""
    config = tiny()
    return sample(config.seed, t, 8, config.rounds.cohort_size(8))


def clients_of_round_0(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["client"]: row for row in tables.read(folder, "clients").to_pylist() if row["round"] == 0}


def test_actor_that_dies_as_it_starts_ends_the_run(tmp_path, warm_ray, monkeypatch):
    monkeypatch.setitem(MODELS, "kills_actors", sabotage.kills_actors)
    with pytest.raises(MachineFailure, match="a client actor could not start: its process ended"):
        Federation(tiny(model={"name": "kills_actors"}, engine=ONE), tmp_path, make_engine=warm_ray)


def test_client_that_kills_its_process_ends_the_run(tmp_path, warm_ray):
    """After three attempts, the last of which it has to itself; the run can go on once it does not."""
    changes = with_client({"rounds": {"total": 3, "checkpoint_every": 1}}, "fails", how="dies", client=cohort()[1], t=0)
    federation = Federation(tiny(**changes, engine=PAIR), tmp_path / "dies", make_engine=warm_ray)
    with pytest.raises(RoundFailed, match=rf"client {cohort()[1]}, round 1, node .* died 3 times: its process ended\n"):
        federation.step()
    federation.close()
    *deaths, end = tables.read(tmp_path / "dies", "events").to_pylist()
    assert [event["of"] for event in deaths] == ["actor"] * 3
    assert (end["of"], "out of resources" in end["message"]) == ("run", True)


@pytest.mark.parametrize("method", [{}, METHODS["fedlws"], GATHERED], ids=["summed", "kept", "gathered"])
@pytest.mark.parametrize("engine", ["local", PAIR], ids=["local", "ray"])
@pytest.mark.parametrize(("how", "policy"), [("lacks_memory", "drop"), ("refuses", "retry")])
def test_client_that_fails_twice_trains_again(how, policy, engine, method, tmp_path, ran, request):
    """To the same bits, whether hosts sum models while they train, keep them, or one of them learns on all."""
    make_engine = None if engine == "local" else request.getfixturevalue("warm_ray")
    rounds = {"on_client_failure": policy}
    changes = with_client(method, "fails", how=how, client=cohort()[1], times=2, folder=str(tmp_path))
    run = simulate(tiny(**changes, rounds=rounds, engine=engine), tmp_path / "fails", make_engine=make_engine)
    assert run.sha256() == ran(**method).sha256()
    events = [event for event in tables.read(run.folder, "events").to_pylist() if event["of"] != "run"]
    assert [(e["round"], e["of"], e["client"]) for e in events] == [(0, "client", cohort()[1])] * 2
    assert all("trains again" in e["message"] for e in events)
    first, second = ((tmp_path / f"failed-{i}/process").read_text() for i in range(2))
    assert (first == second) == (engine == "local")  # the next host tries again


TESTED: dict[str, Any] = {
    "data": {"client_test_frac": 0.25},
    "evaluate": {"personal": "after_train"},
    "rounds": {"evaluate_every": 1},
}


def test_client_that_lacks_memory_when_it_is_tested_trains_again(tmp_path, ran, monkeypatch):
    """To the same bits. So do those after it on the same host, whose models are kept and not trained again."""
    changes = TESTED | METHODS["fedlws"]
    expected = ran(**changes)
    monkeypatch.setitem(MODELS, "forgetful", sabotage.lacks_memory_in_tests)
    run = simulate(tiny(**changes, model={"name": "forgetful"}), tmp_path / "fails")
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
        (
            "lacks_memory",
            {},
            "out of resources .*\nclient C, round 2, .*MemoryError: no room for 3 num.*a smaller batch",
        ),
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
    [client] = [c for c in cohort(t=1) if c not in cohort()][:1]
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
    assert shown.stderr.startswith(f"{first}  client {cohort()[0]}, round 1, node local: Traceback")
    assert shown.stderr.count("Traceback") == 1
    assert "cannot count" in shown.stderr


def test_hanging_host_is_replaced(tmp_path, warm_ray, ran, only_the_hung_age):
    folder = str(tmp_path)
    changes = with_client(METHODS["scaffold"], "fails", how="hangs", client=cohort()[1], times=1, folder=folder)
    run = simulate(tiny(**changes, engine=IMPATIENT), tmp_path / "hangs", make_engine=warm_ray)
    assert run.sha256() == ran(**METHODS["scaffold"]).sha256()
    [message] = tables.read(run.folder, "events")["message"].to_pylist()
    assert HANGS in message


def test_host_that_hangs_in_a_test_is_replaced(tmp_path, warm_ray, only_the_hung_age, monkeypatch):
    monkeypatch.setitem(MODELS, "hangs_in_tests", sabotage.hangs_in_tests)
    (tmp_path / "once").mkdir()  # and so it does not again
    changes = {"model": {"name": "hangs_in_tests", "options": {"folder": str(tmp_path)}}}
    expected = simulate(tiny(**changes), tmp_path / "undisturbed").sha256()
    (tmp_path / "once").rmdir()
    run = simulate(tiny(**changes, engine=IMPATIENT), tmp_path / "hangs", make_engine=warm_ray)
    assert run.sha256() == expected
    [message] = tables.read(run.folder, "events")["message"].to_pylist()
    assert HANGS in message


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
    config = tiny(engine=ONE)
    with pytest.raises(MachineFailure, match="driver died 3 times before the first round: its process ended"):
        RemoteFederation(Dying(9, tmp_path), config, tmp_path / "run", False, stored(prepare(config)))


def test_driver_killed(tmp_path, cluster, ran, monkeypatch):
    """While it builds, and between rounds; before that it goes on although it was not waited for, as where Ctrl-C comes
    while a loop asks for the model."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    changes = METHODS["scaffold"] | {"rounds": {"total": 4, "checkpoint_every": 2}}
    config = tiny(**changes, engine=ONE)
    federation = RemoteFederation(Dying(1, tmp_path), config, tmp_path / "killed", False, stored(prepare(config)))
    rounds = [federation.step()["round"]]
    with monkeypatch.context() as patched:
        patched.setattr(ray, "get", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            federation.model()
    rounds.append(federation.step()["round"])  # which no checkpoint knows
    rounds.append(federation.step()["round"])
    kill(pid_of(federation._driver))
    while (shown := federation.step()) is not None:
        rounds.append(shown["round"])
    assert rounds == [0, 1, 2, 2, 3]  # from the checkpoint after round 1 on
    assert federation.finish()["sha256"] == ran(**changes).sha256()
    federation.close()
    assert tables.read(tmp_path / "killed", "rounds")["round"].to_pylist() == [0, 1, 2, 3]
    events = tables.read(tmp_path / "killed", "events").to_pylist()
    assert [(event["round"], event["of"]) for event in events] == [(0, "driver"), (2, "driver")]


def test_neighbours_take_over_where_memory_ran_out(tmp_path, warm_ray, ran):
    """One process fewer then: a new one would bring down the next."""
    changes = METHODS["scaffold"]
    federation = Federation(tiny(**changes, engine=PAIR), tmp_path / "killed", make_engine=warm_ray)
    federation.step()
    lost = HostLost({1}, "its node ran out of memory", out_of_memory=True)
    federation.engine.replace_lost(lost)
    assert federation.engine.hosts[1] is federation.engine.hosts[0]
    [message] = federation.step()["messages"]
    assert "its node ran out of memory; the other actors of its node do its work" in message
    federation.step()
    federation.finish()
    assert federation.sha256() == ran(**changes).sha256()
    federation.close()


def test_hosts_take_over_where_there_is_no_room(tmp_path, warm_ray, ran, monkeypatch):
    """Of four hosts two die together, and the others share their work. Then these die, and there is room for one new host:
    it does the work of all. Then that one dies."""
    changes = METHODS["scaffold"] | {"rounds": {"participation": 0.5}}
    federation = Federation(tiny(**changes, engine=EACH), tmp_path / "killed", make_engine=warm_ray)
    engine, module, start = federation.engine, raysim.engine.ray.engine, raysim.engine.ray.engine.new_actor
    monkeypatch.setattr(module, "PING_SECONDS", None)  # a dead actor answers, however busy the machine is
    monkeypatch.setattr(Pool, "take", lambda _, nodes, *share: [None] * len(nodes))

    federation.step()
    with monkeypatch.context() as no_room:  # a new host asks for more than the cluster has, and never starts
        no_room.setattr(module, "START_SECONDS", 0)
        no_room.setattr(module, "new_actor", lambda node, _, gpus: start(node, 10**6, gpus))
        *dead, third, fourth = engine.hosts
        for pid in [pid_of(actor) for actor in dead]:
            kill(pid)
        messages = federation.step()["messages"]
    assert len(messages) == 2  # each of the dead is buried by itself; none takes over who is dead, too
    assert all("no capacity for a replacement; the remaining actors take over" in message for message in messages)
    assert set(engine.hosts[:2]) == {third, fourth} == set(engine.hosts[2:])

    room = iter([1])  # a new host is sent to a node that is gone, except the first
    monkeypatch.setattr(module, "new_actor", lambda node, *share: start(node if next(room, 0) else "a" * 56, *share))
    engine.replace_lost(HostLost({0, 1, 2, 3}))
    [new] = set(engine.hosts)
    assert federation.step()["clients_ok"] == 4
    federation.finish()
    assert federation.sha256() == ran(**changes).sha256()

    kill(pid_of(new))
    with pytest.raises(MachineFailure, match="no capacity for new ones"):
        evaluate(engine, federation.partition.server_test, t=0)
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
