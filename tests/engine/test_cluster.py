"""Three nodes on this machine: three raylets with an object store each. The same bits, also when one of them is lost.
And a cluster that raysim starts, which nobody else can use."""

import fcntl
import http.client
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import ray
import sabotage
from conftest import simulate, tiny
from ray import cloudpickle
from ray._private.node import Node as RayNode
from ray.cluster_utils import Cluster
from sabotage import Stalls, ending

import raysim.engine.ray.cluster
import raysim.engine.ray.private
from raysim.config import ConfigError
from raysim.engine import dispatcher
from raysim.engine.ray.actors import new_actor
from raysim.engine.ray.cluster import cluster as joined_or_started
from raysim.engine.ray.cluster import own_cluster
from raysim.engine.ray.engine import ray_engine
from raysim.engine.ray.placement import Node, Resources
from raysim.engine.ray.pool import PING_SECONDS, Pool
from raysim.engine.ray.private import persistent_cluster, private
from raysim.federation import Federation, MakeEngine
from raysim.federation.resume import RunCheckpoints
from raysim.machine import FULL_AT
from raysim.methods import CLIENTS
from raysim.store import tables
from raysim.store.manifest import read_manifest

SETTING = {
    # Clients' states, and models, of more than 100 kB: Ray would keep smaller ones in the driver's memory.
    "model": {"name": "mlp", "options": {"hidden": [400]}},
    "client": ["scaffold"],
    "server": ["fedlws"],
    "local": {"momentum": 0.0, "weight_decay": 0.0},
    "rounds": {"total": 4, "participation": 1.0},
}
THREE = {"ray": {"clients_per_actor": 3, "fan_in": 2}}  # eight clients: a host on each node


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    return simulate(tiny(**SETTING), tmp_path_factory.mktemp("undisturbed")).sha256()


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[dict[str, RayNode]]:
    """All but the head, by id."""
    added = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20, wait=False) for _ in range(2)]
    cluster.wait_for_nodes()
    yield {node.node_id: node for node in added}
    for node in cluster.list_all_nodes():
        if node in added:
            cluster.remove_node(node)


@pytest.fixture(scope="module")
def make_engine(cluster: Cluster) -> Iterator[MakeEngine]:
    pool = Pool()
    yield partial(ray_engine, pool=pool)
    pool.clear()


def test_three_nodes(tmp_path, nodes, make_engine, expected):
    federation = simulate(tiny(**SETTING, engine=THREE), tmp_path, make_engine=make_engine)
    assert len(set(federation.engine.nodes)) == 3
    assert federation.sha256() == expected


def test_node_lost_during_a_round(tmp_path, cluster, nodes, make_engine, expected, monkeypatch):
    """Round 3. The states that the node held are lost: rounds are repeated from the last checkpoint on."""
    cloudpickle.register_pickle_by_value(sabotage)
    # Always the same client on the same host: else a copy of its state might be elsewhere, and nothing be lost.
    monkeypatch.setattr(dispatcher, "shares", lambda engine, groups: [sum(groups[i : i + 3], ()) for i in (0, 3, 6)])
    monkeypatch.setitem(CLIENTS, "stalls", Stalls)
    restored, restore = [], RunCheckpoints.restore
    monkeypatch.setattr(RunCheckpoints, "restore", lambda run: restored.append(restore(run)) or restored[-1])
    lost = next(iter(nodes))
    stalls = {"folder": str(tmp_path), "t": 3, "node": lost}
    rounds = {**SETTING["rounds"], "checkpoint_every": 2}
    changes = {**SETTING, "client": ["scaffold", {"stalls": stalls}], "rounds": rounds}
    with ending(tmp_path, lambda _: cluster.remove_node(nodes[lost], allow_graceful=False)):
        federation = simulate(tiny(**changes, engine=THREE), tmp_path / "lost", make_engine=make_engine)
    assert federation.sha256() == expected
    assert [t for t, _ in restored] == [2]
    assert tables.read(federation.folder, "rounds")["round"].to_pylist() == [0, 1, 2, 3]
    assert set(tables.read(federation.folder, "clients")["status"].to_pylist()) == {"ok"}


def test_mixed_cluster(tmp_path, cluster, warm_ray):
    """A head without a GPU and a node with one: all actors are on that node, or, without a share of it, nobody uses it."""
    node = cluster.add_node(num_cpus=2, num_gpus=1)
    try:
        for share in (0.5, 0):
            engine = {"ray": {"gpu_per_client": share, "clients_per_actor": 1}}
            config = tiny(engine=engine, rounds={"total": 1, "participation": 0.25})  # two clients
            make_engine = ray_engine if share else warm_ray
            federation = Federation(config, tmp_path / str(share), make_engine=make_engine)
            found = set(federation.engine.nodes), federation.engine.spec.device
            federation.close()
            assert found[1] == ("auto" if share else "cpu")
            assert not share or found[0] == {node.node_id}
    finally:
        cluster.remove_node(node)


def test_nodes_whose_environments_differ_are_named_at_the_start(tmp_path, cluster):
    """The environment of a node's processes counts, and not that of the command line."""
    node = cluster.add_node(num_cpus=1, env_vars={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    try:
        here = ray.get_runtime_context().get_node_id()
        two = Resources((Node(here, 1.0), Node(node.node_id, 1.0)))
        config = tiny(engine={"ray": {"clients_per_actor": 2}}, rounds={"total": 1})
        with pytest.warns(UserWarning, match=r"compute with \(ONEDNN_MAX_CPU_ISA: (AVX2, not set|not set, AVX2)\)"):
            federation = Federation(config, tmp_path, make_engine=partial(ray_engine, resources=two))
        federation.close()
        known = read_manifest(tmp_path)
        assert "ONEDNN_MAX_CPU_ISA" not in known["numerics"] and known["numerics"]["MKL_CBWR"] is None
        assert known["hardware"]["switches"]["ONEDNN_MAX_CPU_ISA"] is None
    finally:
        cluster.remove_node(node)


def test_a_cluster_that_grows(tmp_path, cluster):
    """What becomes free while the run runs gets actors, to the same bits."""
    changes = {**SETTING, "rounds": {"total": 4, "participation": 0.25}}  # two clients
    expected = simulate(tiny(**changes), tmp_path / "undisturbed").sha256()
    one = Resources((Node(ray.get_runtime_context().get_node_id(), 1.0),))
    config = tiny(**changes, engine={"ray": {"elastic": True}})
    federation = Federation(config, tmp_path / "grown", make_engine=partial(ray_engine, resources=one))
    federation.step()
    assert len(federation.engine.hosts) == 1
    ray.wait([*federation.engine._coming], timeout=None)
    assert [message for message in federation.step()["messages"] if "has joined" in message]
    while federation.step():
        pass
    federation.finish()
    federation.close()
    assert len(federation.engine.hosts) == 2
    assert federation.sha256() == expected
    assert {row["host"] for row in tables.read(federation.folder, "clients").to_pylist() if row["round"] > 0} == {0, 1}


def test_later_actors_are_planned_with_what_the_first_took(tmp_path, warm_ray, monkeypatch):
    monkeypatch.setattr("raysim.engine.ray.placement.HOST_BYTES", 1)
    federation = simulate(tiny(engine={"ray": {"clients_per_actor": 2}}), tmp_path, make_engine=warm_ray)
    assert federation.engine.placement.memory > 50 << 20  # of its own, with PyTorch
    (event,) = tables.read(tmp_path, "events").to_pylist()
    assert "of memory, and 0.0 were planned: new actors will reserve that much" in event["message"]


def test_a_pool_waits_once_for_all_actors_that_have_not_started(cluster, monkeypatch):
    """And hands them out: new ones would start no sooner. In the place of a dead one there is none."""
    here, share, pool = ray.get_runtime_context().get_node_id(), (16, 0), Pool()  # all of the node's CPUs
    waiting, dead = [new_actor(here, *share) for _ in range(4)], new_actor("a" * 56, *share)
    for actor in (*waiting, dead):
        pool.give(here, actor, *share)
    waits, wait = [], ray.wait

    def once_the_dead_is_known(asked: list[Any], num_returns: int, timeout: float) -> Any:
        waits.append((len(asked), timeout))
        wait(asked[-1:], timeout=None)
        return wait(asked, num_returns=num_returns, timeout=0)

    monkeypatch.setattr(ray, "wait", once_the_dead_is_known)
    assert pool.take([here] * 6, *share) == [*waiting, None, None]
    assert waits == [(5, PING_SECONDS)]
    for actor in waiting:
        ray.kill(actor)


def test_a_node_that_is_gone_before_the_first_actor_starts(tmp_path, warm_ray):
    """... and that the cluster still counts: its actors start elsewhere."""
    here, gone = ray.get_runtime_context().get_node_id(), "a" * 56
    resources = Resources((Node(here, 1.0), Node(gone, 1.0)))
    config = tiny(engine={"ray": {"clients_per_actor": 2}})
    federation = simulate(config, tmp_path, make_engine=partial(warm_ray, resources=resources))
    assert federation.engine.nodes == [here, here]
    assert federation.sha256() == simulate(tiny(), tmp_path / "undisturbed").sha256()
    (event,) = tables.read(tmp_path, "events").to_pylist()
    assert (event["of"], event["node"]) == ("actor", gone)
    assert "could not start: its node is gone; another was started" in event["message"]


# ---- a cluster that raysim starts


OWN = """
import json, os, sys, ray
from raysim import machine
from raysim.engine.ray.cluster import cluster
machine.cpus = lambda: 1  # and so one worker, which takes seconds to start
with cluster(None, 100 << 20) as address:
    facts = {
        "address": address,
        "store": int(ray.cluster_resources()["object_store_memory"]),
        "token": os.environ["RAY_AUTH_TOKEN_PATH"],
        "sockets": ray._private.worker._global_node.get_session_dir_path() + "/sockets",
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.read()
print([name for name in os.environ if name.startswith("RAY_AUTH")], os.path.exists(os.path.dirname(facts["token"])))
"""

# What somebody else would try: to read the token, to open the sockets, to ask without a token or with another.
KNOCK = """
import contextlib, json, os, socket, sys, grpc
facts, tried = json.loads(sys.argv[1]), {}
def attempt(name, action):
    try:
        tried[name] = action() and "ok"
    except grpc.RpcError as error:
        tried[name] = error.code().name
    except OSError as error:
        tried[name] = type(error).__name__
def ask(*metadata):
    with grpc.insecure_channel(facts["address"]) as channel:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", metadata=metadata)
    return True
def connect(name):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as end:
        end.connect(facts["sockets"] + "/" + name)
    return True
attempt("without", ask)  # which imports what is needed, and may lie where another user cannot look
if len(sys.argv) > 2:
    os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
attempt("token", lambda: open(facts["token"]).read())
attempt("raylet", lambda: connect("raylet"))
attempt("store", lambda: connect("plasma_store"))
attempt("without", ask)
attempt("wrong", lambda: ask(("authorization", "Bearer " + "0" * 64)))
attempt("right", lambda: ask(("authorization", "Bearer " + open(facts["token"]).read())))
print(json.dumps(tried))
"""

LISTENING = """
import contextlib, json, sys, time, ray, psutil
found = []
while len(found) < 4:  # the driver, the control store, the raylet's two
    first, found = psutil.Process(int(sys.argv[1])), []
    for process in (first, *first.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended meanwhile listens no more
            found += [[*c.laddr] for c in process.net_connections("tcp") if c.status == "LISTEN"]
    time.sleep(0.1)
print(json.dumps(found))
"""


def without_address(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | more


@pytest.fixture(scope="module")
def own() -> Iterator[dict[str, Any]]:
    """What a process tells of a cluster of its own, and that process's number."""
    command, pipes = [sys.executable, "-c", OWN], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=without_address(RAY_AUTH_TOKEN="a stranger's"), **pipes) as process:
        facts = json.loads(process.stdout.readline())
        yield facts | {"pid": process.pid}
        rest, _ = process.communicate("")
    assert rest == "['RAY_AUTH_TOKEN'] False\n"  # all is as before, and nothing is left behind


def knock(facts: dict[str, Any], *user: int) -> dict[str, str]:
    command = [sys.executable, "-c", KNOCK, json.dumps(facts), *map(str, user)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def listening(facts: dict[str, Any]) -> list[list[Any]]:
    """Address and port of everything that listens in the cluster's processes."""
    command = [sys.executable, "-c", LISTENING, str(facts["pid"])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_object_store_of_the_size_asked_for(own, monkeypatch):
    """On a cluster of its own; one that is joined has its own size, so there the setting is refused."""
    assert own["store"] == 100 << 20
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    refused = pytest.raises(ConfigError, match="the cluster at somewhere:6379 has its own object store")
    with refused, joined_or_started("somewhere:6379", 100 << 20):
        pass


def test_nothing_of_it_listens_to_other_machines(own):
    assert {ip.removeprefix("::ffff:") for ip, _ in listening(own)} == {"127.0.0.1"}


def test_only_who_has_the_token_is_let_in(own):
    assert stat.S_IMODE(os.stat(own["token"]).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(Path(own["token"]).parent).st_mode) == 0o700
    assert knock(own) == {
        "token": "ok", "raylet": "ok", "store": "ok", "without": "UNAUTHENTICATED", "wrong": "UNAUTHENTICATED",
        "right": "ok",
    }  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_let_in(own):
    assert knock(own, 65534) == {
        "token": "PermissionError", "raylet": "PermissionError", "store": "PermissionError",
        "without": "UNAUTHENTICATED", "wrong": "UNAUTHENTICATED", "right": "PermissionError",
    }  # fmt: skip


def test_no_metrics_for_anybody(own):
    for _, port in listening(own):
        for path in ("/metrics", "/"):
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                connection.request("GET", path)
                try:
                    status = connection.getresponse().status
                except (ConnectionError, http.client.HTTPException):
                    continue  # it speaks no HTTP/1
                assert status in (401, 403, 404), port


def test_it_has_no_agents_and_nothing_of_it_is_left():
    command, pipes = [sys.executable, "-c", OWN], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=without_address(), **pipes) as process:
        process.stdout.readline()
        processes = {child: child.cmdline() for child in psutil.Process(process.pid).children(recursive=True)}
        assert not [words for words in processes.values() if "Agent" in words[0] or "agent" in " ".join(words[:3])]
        idle = [child for child, words in processes.items() if words[0] == "tail"]
        [raylet] = [child for child, words in processes.items() if words[0].endswith("raylet")]
        assert len(idle) == 2
        raylet.kill()
        process.kill()  # or the raylet stays a zombie, which counts as a process
        psutil.wait_procs(processes)


def test_a_cluster_that_does_not_come_up_is_started_again_with_all_of_ray(monkeypatch):
    tried: list[tuple[str, bool]] = []

    def busy(**settings: Any) -> None:
        tried.append((settings["address"], RayNode.start_monitor is monitor))
        raise Exception("the raylet did not come up")

    monitor = RayNode.start_monitor
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", busy)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ConnectionError, match="did not start on this machine: the raylet did not come up"),
        joined_or_started(),
    ):
        pass
    assert tried == [("local", False), ("local", True)]


def test_a_disk_that_is_too_full_is_named_before_the_start(monkeypatch):
    """Ray would start, and then store nothing."""

    def used(percent: int) -> Any:
        return lambda _: Mock(total=100 << 30, free=(100 - percent) << 30)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", Mock(side_effect=Exception("it was started")))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for percent, most, said in (
        (94, None, "Ray did not start on this machine: it was started"),
        (
            96,
            None,
            "Ray cannot start: the disk of .*raysim-.* is 96.0 % full, and Ray stores nothing more on one above 95 %",
        ),
        (96, "0.99", "it was started"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", used(percent))
        if most:
            monkeypatch.setenv(FULL_AT[0], most)
        with pytest.raises(ConnectionError, match=said), joined_or_started():
            pass


def test_ctrl_c_while_ray_starts_leaves_nothing_of_it(monkeypatch):
    stopped = Mock()
    monkeypatch.setattr(raysim.engine.ray.cluster, "_start", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(ray, "shutdown", stopped)
    with pytest.raises(KeyboardInterrupt), own_cluster():
        pass
    stopped.assert_called_once_with()


def test_a_folder_that_is_being_made_is_not_taken_for_that_of_a_dead_process(monkeypatch, tmp_path):
    """Two commands that start at once: one looks for dead folders whenever the other is about to lock its own."""
    monkeypatch.setattr(raysim.engine.ray.private, "get_default_system_temp_dir", lambda: str(tmp_path))
    lock = fcntl.flock

    def looked_at(file: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            assert persistent_cluster() is None
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", looked_at)
    with private() as folder:
        assert folder.is_dir()


def test_folders_of_killed_processes_are_removed(monkeypatch, tmp_path):
    """And those of the living are not."""
    monkeypatch.setattr(raysim.engine.ray.private, "get_default_system_temp_dir", lambda: str(tmp_path))
    code = "import sys, raysim.engine.ray.private as p; p.get_default_system_temp_dir = lambda: sys.argv[1]\n"
    code += "with p.private(): print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    living, killed = (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=without_address())
        for _ in range(2)
    )
    try:
        assert living.stdout.readline() == killed.stdout.readline() == b"1\n"
        killed.kill()
        killed.wait()
        with private():
            assert len(list(tmp_path.iterdir())) == 2
    finally:
        living.communicate()
    assert not list(tmp_path.iterdir())
