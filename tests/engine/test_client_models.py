"""Models go from client to client by reference, and the run is the same one wherever they rest and whoever dies."""

from typing import Any

import numpy as np
import pytest
import ray
import sabotage
from conftest import simulate, table, tiny
from ray import cloudpickle
from sabotage import Fails, Stalls, ending, kill
from test_recovery import pid_of

from raysim.engine import dispatcher
from raysim.engine.model_store import HostedModels
from raysim.engine.ray.engine import RayEngine
from raysim.federation import Federation, MakeEngine
from raysim.host import distances
from raysim.methods import CLIENTS
from raysim.store import tables

PAIR = {"ray": {"clients_per_actor": 4}}  # two hosts for eight clients
ALL = {"participation": 1.0}
METHODS = {
    "fedamp": {"client": [{"fedamp": {"alpha": 1.0, "sigma": 2.0}}], "rounds": ALL},
    "fedfomo": {
        "client": [{"fedfomo": {"models": 3}}],
        "data": {"client_val_frac": 0.2},
        "rounds": {"participation": 0.75},
    },
    "apple": {"client": ["apple"], "rounds": ALL},
}


@pytest.fixture(autouse=True)
def mischief(monkeypatch):
    cloudpickle.register_pickle_by_value(sabotage)  # no process but this one can import it
    for method in (Stalls, Fails):
        monkeypatch.setitem(CLIENTS, method.__name__.lower(), method)


def merged(changes: dict[str, Any], rounds: dict[str, Any]) -> dict[str, Any]:
    return {**changes, "rounds": {**changes["rounds"], **rounds}}


def test_distances_are_measured_by_all_hosts(tmp_path, warm_ray, ran):
    """[8, 8] of the parameters alone, in float64 and to the same bits as in one process."""
    local = ran(**METHODS["fedamp"])
    remote = Federation(tiny(**METHODS["fedamp"], engine=PAIR), tmp_path / "ray", make_engine=warm_ray)
    while remote.step():
        pass
    found, expected = (HostedModels(f.engine).distances(range(8)) for f in (remote, local))
    assert found.numpy().tobytes() == expected.numpy().tobytes()
    engine, P = local.engine, local.server.layers.P
    models = np.stack([engine.value_of(engine.client_models[c])["value"][:P] for c in range(8)]).astype(np.float64)
    np.testing.assert_allclose(expected, ((models[:, None] - models) ** 2).sum(2), rtol=1e-12)
    assert sorted({span.host for span in remote.engine.spans if span.phase == "distances"}) == [0, 1]
    subset = HostedModels(local.engine).distances((6, 1))
    np.testing.assert_allclose(subset, [[0, expected[1, 6]], [expected[1, 6], 0]], rtol=1e-12)
    remote.close()


@pytest.mark.parametrize("held", [1, 5, 12, 1000])
def test_distances_of_many_models(held, tmp_path, monkeypatch):
    """More than a host holds at once; blocks to the same bits, whatever other blocks a host has."""
    [host] = simulate(tiny(rounds={"total": 1}), tmp_path).engine.hosts
    monkeypatch.setattr(distances, "GROUP_BYTES", held * 8 * host.layers.P)
    near = 1 + 1e-3 * np.random.default_rng(0).standard_normal(
        (50, host.layers.S)
    )  # of which products alone know little
    models = [{"value": model} for model in near.astype(np.float32)]
    blocks = distances.blocks_of(50, host.layers.P)
    assert [i for block in blocks for i in block] == [*range(50)]
    params = near.astype(np.float32)[:, : host.layers.P].astype(np.float64)
    whole = host.distances(blocks, *models)
    for block, found in zip(blocks, whole, strict=True):
        expected = ((params[block.start : block.stop, None] - params[block.start :]) ** 2).sum(2)
        np.testing.assert_allclose(np.triu(found, 1), np.triu(expected, 1), rtol=1e-12)
    for i in range(3):
        for found, same in zip(host.distances(blocks[i::3], *models), whole[i::3], strict=True):
            assert np.triu(found, 1).tobytes() == np.triu(same, 1).tobytes()


@pytest.mark.parametrize("name", METHODS)
def test_no_model_passes_the_driver(name, tmp_path, warm_ray, monkeypatch):
    """It holds references; what it fetches and sends in rounds of peers is smaller than one model a client."""
    fetched = []
    fetch = RayEngine.fetch

    def watched(engine, calls, **options):
        values = fetch(engine, calls, **options)
        fetched.extend(values)
        return values

    def refused(engine, handle):
        raise AssertionError("the driver reads a client's model")

    monkeypatch.setattr(RayEngine, "fetch", watched)
    monkeypatch.setattr(RayEngine, "value_of", refused)
    federation = Federation(tiny(**METHODS[name], engine=PAIR), tmp_path, make_engine=warm_ray)
    federation.step()
    fetched.clear()
    federation.step()
    assert all(isinstance(handle, ray.ObjectRef) for handle in federation.engine.client_models.values())
    arrays = [a for v in fetched for a in (v.values() if isinstance(v, dict) else [v]) if isinstance(a, np.ndarray)]
    assert sum(a.size >= federation.server.layers.P for a in arrays) <= 1  # the aggregate
    federation.close()


@pytest.mark.parametrize("name", METHODS)
def test_actor_killed_while_it_trains(name, tmp_path, warm_ray, ran):
    changes = {**METHODS[name], "client": [*METHODS[name]["client"], {"stalls": {"folder": str(tmp_path), "t": 2}}]}
    with ending(tmp_path):
        federation = simulate(tiny(**changes, engine=PAIR), tmp_path / "killed", make_engine=warm_ray)
    assert federation.sha256() == ran(**METHODS[name]).sha256()


def test_actor_killed_just_before_it_is_asked(tmp_path, warm_ray, ran, monkeypatch):
    """For distances between models it trained, for their sum, and to evaluate with them: the models outlive it. The
    models are large enough to rest in Ray's object store, where smaller ones would travel in the messages."""
    changes = {
        **METHODS["fedamp"], "data": {"client_test_frac": 0.25}, "evaluate": {"personal": "after_init"},
        "server": ["fedlws"], "model": {"name": "mlp", "options": {"hidden": [300, 300]}},
    }  # fmt: skip
    federation = Federation(tiny(**changes, engine=PAIR), tmp_path / "killed", make_engine=warm_ray)
    federation.step()
    fatal = {"distances", "partial", "personal"}  # each once
    call = RayEngine.call

    def murderous(engine, asked):
        if asked.method in fatal:
            fatal.remove(asked.method)
            kill(pid_of(engine.hosts[0]))
        return call(engine, asked)

    monkeypatch.setattr(RayEngine, "call", murderous)
    while federation.step():
        pass
    federation.finish()
    federation.close()
    expected = ran(**changes)
    assert not fatal
    assert federation.sha256() == expected.sha256()
    assert len(tables.read(tmp_path / "killed", "events")) == 3
    ours, theirs = (tables.read(run.folder, "personal").to_pylist() for run in (federation, expected))
    assert ours == theirs
    assert len(ours) == 8


@pytest.mark.parametrize("engine", ["local", "ray"])
@pytest.mark.parametrize("name", METHODS)
def test_resumes_from_a_checkpoint(name, engine, tmp_path, ran, request):
    """Models, states and what the server remembers come back from disk, for the rounds after it."""
    make_engine: MakeEngine | None = None if engine == "local" else request.getfixturevalue("warm_ray")
    changes = merged(METHODS[name], {"total": 4, "checkpoint_every": 2})
    config = tiny(**changes, engine={"local": {"state_bytes": 20_000}} if engine == "local" else PAIR)
    federation = Federation(config, tmp_path / "killed", make_engine=make_engine)
    for _ in range(3):  # one round more than was saved
        federation.step()
    federation.engine.close()
    again = Federation(config, tmp_path / "killed", resume=True, make_engine=make_engine)
    assert again.t == 2
    assert len(again.engine.client_models) >= 6
    while again.step():
        pass
    again.finish()
    again.close()
    assert again.sha256() == ran(**changes).sha256()


def test_hash_counts_the_last_models(tmp_path):
    federation = simulate(tiny(**METHODS["fedamp"]), tmp_path)
    before = federation.sha256()
    value = federation.engine.value_of(federation.engine.client_models[5])["value"].copy()
    value[-1] += 1
    federation.engine.client_models[5] = federation.engine.store({"value": value})
    federation.saved.change(frozenset({5}))
    assert federation.sha256() != before


def test_failed_client_keeps_its_last_model(tmp_path):
    client = [*METHODS["fedamp"]["client"], {"fails": {"how": "refuses", "client": 3, "t": 1}}]
    federation = Federation(tiny(client=client, rounds=ALL), tmp_path)
    federation.step()
    before = federation.engine.value_of(federation.engine.client_models[3])["value"].copy()
    assert federation.step()["clients_ok"] == 7
    assert (federation.engine.value_of(federation.engine.client_models[3])["value"] == before).all()
    assert federation.step()["clients_ok"] == 7  # it still attracts the others
    federation.close()
    notes = table(tmp_path, "notes")
    sent = (notes["round"] == 2) & (notes["client"] == 0) & (notes["index"] == 3)
    assert (notes["value"][sent] > 0).all()
    assert sent.any()


@pytest.mark.parametrize("name", ["fedamp", "ditto"])
def test_many_small_visits_are_one(name, tmp_path, warm_ray, ran, monkeypatch):
    """Where states are large a host hands them back in several visits."""
    changes = METHODS.get(name, {"client": ["ditto"], "rounds": ALL})
    expected = ran(**changes).sha256()
    monkeypatch.setattr(dispatcher, "WORK_UNIT_BYTES", 1)
    asked = []
    train = RayEngine.train
    monkeypatch.setattr(RayEngine, "train", lambda engine, c: asked.append(c.method) or train(engine, c))
    remote = simulate(tiny(**changes, engine=PAIR), tmp_path / "ray", make_engine=warm_ray)
    assert asked.count("train") == 3 * 8
    assert remote.sha256() == expected
    assert simulate(tiny(**changes), tmp_path / "local").sha256() == expected


@pytest.mark.filterwarnings("ignore:pfedme")
@pytest.mark.parametrize("when", ["after_init", "before_train", "after_train"])
@pytest.mark.parametrize("name", ["pfedme", "ditto", "fedphp", "partialfed", *METHODS])
def test_evaluation_changes_nothing(name, when, tmp_path, ran):
    changes = METHODS.get(name, {"client": [name]})
    data = {**changes.get("data", {}), "client_test_frac": 0.25}
    changes = {**changes, "data": data}
    plain = ran(**changes).sha256()
    changes |= {"rounds": {**changes.get("rounds", {}), "evaluate_every": 1}, "evaluate": {"personal": when}}
    assert simulate(tiny(**changes), tmp_path / "tested").sha256() == plain
    assert not np.isnan(table(tmp_path / "tested", "rounds")["personal_accuracy_micro"]).any()
