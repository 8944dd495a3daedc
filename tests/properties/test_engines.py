"""The same bits with any packing of clients into Ray's actors, for a method of each kind. Of every method: test_case.py."""

from typing import Any

import pytest
from conftest import play, tiny

import raysim.engine.sums
from raysim.federation import Federation
from raysim.store import tables

# A method for each kind of state. Five clients a round, so that the tree of additions is lopsided.
FIVE = {
    "data": {"partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 8, "min_size": 4}}},
    "rounds": {"participation": 0.6},
}
MATRIX = {
    "fedavg": {},
    "fedlws": {"server": ["fedlws"]},
    "fedldf": {"weighting": [{"fedldf": {"top_n": 2}}]},
    "scaffold": {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
    "fedala": {"client": [{"fedala": {"layers": 2}}]},
    "fedamp": {
        "client": [{"fedamp": {"alpha": 1.0, "sigma": 2.0}}], "rounds": {"participation": 1.0},
        "data": {"partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 5, "min_size": 4}}},
    },
}  # fmt: skip
PACKINGS = {  # actors: clients_per_actor and fan_in
    "1 actor": (5, 4),
    "2 actors": (3, 2),
    "3 actors, fan-in 2": (2, 2),
    "3 actors, fan-in 8": (2, 8),
    "one actor a client, fan-in 2": (1, 2),
    "one actor a client, fan-in 8": (1, 8),
}


def outcome(federation: Federation) -> dict[str, Any]:
    """A finished run's hash, and what was measured on the way."""
    rounds, clients = (tables.read(federation.folder, name) for name in ("rounds", "clients"))
    assert set(clients["status"].to_pylist()) == {"ok"}
    return {
        "sha256": federation.sha256(),
        "rounds": rounds.select(["accuracy", "loss", "train_loss", "bytes_up", "bytes_down"]).to_pydict(),
        "clients": clients.select(["client", "steps", "loss_first", "loss_last", "weight"]).to_pydict(),
    }


def test_reduction_in_pieces(tmp_path, warm_ray, monkeypatch):
    """A model that travels in many messages is the same model."""
    changes = {**FIVE, **MATRIX["fedldf"]}
    whole = outcome(play(tiny(**changes), tmp_path / "whole"))
    monkeypatch.setattr(raysim.engine.sums, "CHUNK", 100)
    on_ray = tiny(**changes, engine={"ray": {"clients_per_actor": 2, "fan_in": 2}})
    assert outcome(play(on_ray, tmp_path / "pieces", make_engine=warm_ray)) == whole


@pytest.mark.parametrize("name", MATRIX)
def test_packing_and_fan_in(name, subtests, tmp_path, warm_ray):
    changes = {**FIVE, **MATRIX[name]}
    local = outcome(play(tiny(**changes), tmp_path / "local"))
    assert local["sha256"] != play(tiny(**changes, seed=4), tmp_path / "seed").sha256()
    for packing, (clients_per_actor, fan_in) in PACKINGS.items():
        with subtests.test(packing):
            engine = {"ray": {"clients_per_actor": clients_per_actor, "fan_in": fan_in}}
            assert outcome(play(tiny(**changes, engine=engine), tmp_path / packing, make_engine=warm_ray)) == local
