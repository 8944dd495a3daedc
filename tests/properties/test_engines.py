"""The same bits with any packing of clients into Ray's actors, for a method of each kind. Of every method: test_case.py."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import simulate, tiny
from ray import cloudpickle
from torch import Tensor, nn

import raysim.engine.sums
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting
from raysim.federation import Federation
from raysim.methods import CLIENTS, WEIGHTINGS
from raysim.models import MODELS, Inputs
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
    whole = outcome(simulate(tiny(**changes), tmp_path / "whole"))
    monkeypatch.setattr(raysim.engine.sums, "CHUNK", 100)
    on_ray = tiny(**changes, engine={"ray": {"clients_per_actor": 2, "fan_in": 2}})
    assert outcome(simulate(on_ray, tmp_path / "pieces", make_engine=warm_ray)) == whole


@pytest.mark.parametrize("name", MATRIX)
def test_packing_and_fan_in(name, subtests, tmp_path, warm_ray):
    changes = {**FIVE, **MATRIX[name]}
    local = outcome(simulate(tiny(**changes), tmp_path / "local"))
    assert local["sha256"] != simulate(tiny(**changes, seed=4), tmp_path / "seed").sha256()
    for packing, (clients_per_actor, fan_in) in PACKINGS.items():
        with subtests.test(packing):
            engine = {"ray": {"clients_per_actor": clients_per_actor, "fan_in": fan_in}}
            assert outcome(simulate(tiny(**changes, engine=engine), tmp_path / packing, make_engine=warm_ray)) == local


def numbers(client: int, t: int, size: int) -> Tensor:
    """[size] whole numbers of at most six bits."""
    return (7 * torch.arange(size) + 31 * client + 13 * t) % 64 - 32.0


@dataclass(frozen=True)
class Sends(ClientMethod):
    """Every client sends such numbers, whatever it has trained."""

    def finish(self, run: LocalRun, upload: Upload) -> None:
        upload.value.copy_(numbers(run.client, run.t, run.layers.S))


class Looks(Weighting):
    """Plans when the models are there, so that hosts keep them and do not add them while they train."""

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        return prior


def zeros(inputs: Inputs) -> nn.Module:
    linear = nn.Linear(int(np.prod(inputs.shape)), inputs.classes)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), linear)


@pytest.mark.parametrize("weighting", [["fedavg"], ["fedavg", "looks"]], ids=["summed", "kept"])
def test_a_mean_whose_terms_are_exact_is_exact(weighting, subtests, tmp_path, warm_ray, monkeypatch):
    """Weights 1/2, 1/4, 1/8, 1/8 of small whole numbers: no bit is rounded away, in whatever order they are added."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no process but this one can import it
    for registry, name, entry in ((CLIENTS, "sends", Sends), (WEIGHTINGS, "looks", Looks), (MODELS, "zeros", zeros)):
        monkeypatch.setitem(registry, name, entry)
    owner = np.repeat(np.arange(4), [8, 4, 2, 2])
    x, y = np.zeros((16, 1, 4, 4), np.uint8), np.arange(16) % 4
    np.savez(tmp_path / "toy.npz", x_train=x, y_train=y, client_train=owner, x_test=x, y_test=y)
    for name, engine in {
        "local": "local",
        "one host": {"ray": {"clients_per_actor": 4}},
        "merged twice": {"ray": {"clients_per_actor": 1, "fan_in": 2}},
    }.items():
        with subtests.test(name):
            config = tiny(
                data={"name": {"npz": "toy.npz"}, "partition": "natural", "root": str(tmp_path)}, engine=engine,
                model={"name": "zeros"}, client=["sends"], weighting=weighting, rounds={"participation": 1.0},
            )  # fmt: skip
            federation = simulate(config, tmp_path / name, make_engine=None if engine == "local" else warm_ray)
            sent = [numbers(client, 2, 4 * 17) for client in range(4)]
            expected = sent[0] / 2 + sent[1] / 4 + sent[2] / 8 + sent[3] / 8
            assert federation.server.value.tolist() == expected.tolist()
