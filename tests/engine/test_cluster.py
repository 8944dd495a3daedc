"""Four nodes on this machine: four raylets with an object store each. The same bits, also when one of them is lost."""

from collections.abc import Iterator
from functools import partial

import pytest
import ray
import sabotage
from conftest import play, tiny
from ray import cloudpickle
from ray._private.node import Node
from ray.cluster_utils import Cluster
from sabotage import Stalls, ending

from raysim.config import ConfigError
from raysim.engine import scheduler
from raysim.engine.ray.cluster import cluster as joined_or_started
from raysim.engine.ray.engine import ray_engine
from raysim.engine.ray.pool import Pool
from raysim.federation import MakeEngine
from raysim.federation.resume import RunCheckpoints
from raysim.methods import CLIENTS
from raysim.store import tables

SETTING = {
    # Clients' states, and models, of more than 100 kB: Ray would keep smaller ones in the driver's memory.
    "model": {"name": "mlp", "options": {"hidden": [400]}},
    "client": ["scaffold"],
    "server": ["fedlws"],
    "local": {"momentum": 0.0, "weight_decay": 0.0},
    "rounds": {"total": 4, "participation": 1.0},
}
FOUR = {"ray": {"clients_per_actor": 2, "fan_in": 2}}  # eight clients: a host on each node


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    return play(tiny(**SETTING), tmp_path_factory.mktemp("undisturbed")).sha256()


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[dict[str, Node]]:
    """All but the head, by id."""
    added = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20, wait=False) for _ in range(3)]
    cluster.wait_for_nodes()
    yield {node.node_id: node for node in added}
    for node in cluster.list_all_nodes():
        if node in added:
            cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def make_engine(cluster: Cluster) -> Iterator[MakeEngine]:
    pool = Pool()
    yield partial(ray_engine, pool=pool)
    pool.clear()


def test_four_nodes(tmp_path, nodes, make_engine, expected):
    federation = play(tiny(**SETTING, engine=FOUR), tmp_path, make_engine=make_engine)
    assert len(set(federation.engine.nodes)) == 4
    assert federation.sha256() == expected


def test_node_lost_during_a_round(tmp_path, cluster, nodes, make_engine, expected, monkeypatch):
    """Round 3. The states that the node held are lost: rounds are played again from the last checkpoint on."""
    cloudpickle.register_pickle_by_value(sabotage)
    # Always the same client on the same host: else a copy of its state might be elsewhere, and nothing be lost.
    monkeypatch.setattr(scheduler, "shares", lambda engine, clients: [tuple(clients[i : i + 2]) for i in (0, 2, 4, 6)])
    monkeypatch.setitem(CLIENTS, "stalls", Stalls)
    restored, restore = [], RunCheckpoints.restore
    monkeypatch.setattr(RunCheckpoints, "restore", lambda run: restored.append(restore(run)) or restored[-1])
    stalls = {"folder": str(tmp_path), "t": 3, "spared_node": ray.get_runtime_context().get_node_id()}
    rounds = {**SETTING["rounds"], "checkpoint_every": 2}
    changes = {**SETTING, "client": ["scaffold", {"stalls": stalls}], "rounds": rounds}
    with ending(tmp_path, lambda pid, node: cluster.remove_node(nodes[node], allow_graceful=False)):
        federation = play(tiny(**changes, engine=FOUR), tmp_path / "lost", make_engine=make_engine)
    assert federation.sha256() == expected
    assert [t for t, _ in restored] == [2]
    assert tables.read(federation.folder, "rounds")["round"].to_pylist() == [0, 1, 2, 3]
    assert set(tables.read(federation.folder, "clients")["status"].to_pylist()) == {"ok"}


def test_an_object_store_is_asked_for_where_a_cluster_is_joined(monkeypatch):
    """It has its own size. What a run's own cluster does with the size is seen in test_state_store.py."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    refused = pytest.raises(ConfigError, match="the cluster at somewhere:6379 has its own object store")
    with refused, joined_or_started("somewhere:6379", 100 << 20):
        pass
