"""Actors with a share of an emulated device: their sums, and one whose device breaks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray
from conftest import one_node, simulate, table, tiny
from device import emulated
from device.breaks import Breaks

import raysim.engine.ray.engine
from raysim.engine.ray.placement import Node, Resources
from raysim.federation import Federation, MakeEngine
from raysim.methods import CLIENTS
from raysim.store.manifest import read_manifest

LOCAL, RAY = {"local": {"device": "cuda"}}, {"ray": {"clients_per_actor": 2, "gpu_per_client": 0.3}}


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One node that says it has a GPU."""
    with one_node(num_cpus=3, num_gpus=1, object_store_memory=128 << 20):
        yield


@pytest.fixture(autouse=True)
def method(monkeypatch: pytest.MonkeyPatch) -> None:
    """What brings the device along into the actors."""
    monkeypatch.setitem(CLIENTS, "breaks", Breaks)


def test_what_the_first_clients_took_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_ray: MakeEngine
) -> None:
    """First, because a process does not tell what it took for one run of what it took for all."""
    monkeypatch.setattr(raysim.engine.ray.engine, "training_bytes", lambda *_: 0)
    monkeypatch.setattr(raysim.engine.ray.engine, "GPU_BYTES", 1)
    changes = {"client": [{"breaks": {"folder": str(tmp_path)}}]}
    federation = simulate(tiny(**changes, engine=RAY), tmp_path / "ray", make_engine=warm_ray)
    model = 4 * federation.server.layers.S
    assert federation.engine.training_bytes > model  # there were its gradient and activations, too
    [message] = table(tmp_path / "ray", "events")["message"]
    assert "of memory, and 0.0 were planned" in message


def test_actors_are_no_more_than_their_gpu_has_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_ray: MakeEngine
) -> None:
    changes = {"client": [{"breaks": {"folder": str(tmp_path)}}]}
    expected = simulate(tiny(**changes, engine=LOCAL), tmp_path / "local").sha256()
    monkeypatch.setattr(raysim.engine.ray.engine, "training_bytes", lambda *_: emulated.MEMORY // 2)
    federation = simulate(tiny(**changes, engine=RAY), tmp_path / "ray", make_engine=warm_ray)
    assert federation.sha256() == expected
    assert federation.engine.hosts[0] is federation.engine.hosts[1]
    [message] = table(tmp_path / "ray", "events")["message"]
    assert "has memory for 1 of its 2 actors: a client takes about 8.0 GiB. The remaining actors take over" in message


def test_an_actor_joins_only_where_its_gpu_has_memory(tmp_path: Path, warm_ray: MakeEngine) -> None:
    """One a round, so that the next one sees what that has taken."""
    changes = {"client": [{"breaks": {"folder": str(tmp_path)}}], "rounds": {"total": 2}}
    one = Resources((Node(ray.get_runtime_context().get_node_id(), 1.0, 0.3),))  # room for one of three actors
    config = tiny(**changes, engine={"ray": {"gpu_per_client": 0.3, "elastic": True}})
    federation = Federation(config, tmp_path / "ray", make_engine=partial(warm_ray, resources=one))
    federation.step()
    engine = federation.engine
    assert len(ray.wait([*engine._coming], num_returns=2)[0]) == 2
    engine.grow()
    assert (len(engine.hosts), len(engine._coming)) == (2, 1)
    engine.training_bytes = emulated.MEMORY
    engine.grow()
    engine.grow()  # the node is not tried again
    joined, refused = federation.step()["messages"]
    assert "has joined" in joined
    assert "could not join" in refused and "too little memory" in refused
    assert (len(engine.hosts), len(engine._coming)) == (2, 0)
    federation.close()


def test_actors_give_the_bits_of_one_process_even_if_a_device_breaks(tmp_path: Path, warm_ray: MakeEngine) -> None:
    """FedLWS sums layer by layer and measures distances; the client that breaks the device trains again elsewhere."""
    changes = {"client": [{"breaks": {"folder": str(tmp_path), "t": 1}}], "server": ["fedlws"]}
    (tmp_path / "broken").mkdir()
    expected = simulate(tiny(**changes, engine=LOCAL), tmp_path / "local").sha256()
    (tmp_path / "broken").rmdir()
    federation = simulate(tiny(**changes, engine=RAY), tmp_path / "ray", make_engine=warm_ray)
    assert read_manifest(tmp_path / "ray")["device"] == "cuda"
    assert federation.sha256() == expected
    assert set(table(tmp_path / "ray", "clients")["status"]) == {"ok"}
    [message] = [text for text in table(tmp_path / "ray", "events")["message"] if "actor" in text]
    assert "its process ended" in message
