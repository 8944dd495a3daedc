"""Every method where its quotients are 0/0 and its means are over nobody: all there is stays a number."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case import Case, cases
from conftest import simulate, table, tiny
from sabotage import HardTimes
from safetensors.torch import save_file

from raysim.config import ConfigError
from raysim.methods import CLIENTS
from raysim.models import Inputs, build

CASES = cases()
DEAD = "conv2"  # a layer that is zero and, behind its own ReLU, stays so: latents are zero, too
LOST = 5


def changed(case: Case, client: list[Any] = (), **sections: dict[str, Any]) -> dict[str, Any]:
    """The case with other sections, and further client methods."""
    changes = dict(case.changes)
    for name, section in sections.items():
        changes[name] = {**changes.get(name, {}), **section}
    return changes | {"client": [*changes.get("client", []), *client]}


@pytest.fixture(scope="module")
def dead_layer(tmp_path_factory) -> str:
    """A file with initial parameters."""
    torch.manual_seed(0)
    model = build("tiny_bn_cnn", Inputs((1, 8, 8), 4))
    for name, parameter in model.named_parameters():
        if name.startswith(DEAD):
            torch.nn.init.zeros_(parameter)
    file = tmp_path_factory.mktemp("init") / "dead.safetensors"
    save_file(model.state_dict(), file)
    return str(file)


def noted(folder: Path) -> np.ndarray:
    """What methods recorded, if they did."""
    return table(folder, "notes")["value"] if (folder / "notes").exists() else np.empty(0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_hard_times(case: Case, dead_layer, monkeypatch, tmp_path):
    """A client without samples and two with one, a layer of norm zero; then a round in which nobody moves, so that all
    are alike; then one from which a client does not come back."""
    monkeypatch.setitem(CLIENTS, "hardtimes", HardTimes)
    partition = {"dirichlet_counts": {"alpha": 0.1, "clients": 8, "min_size": 0}}
    config = tiny(
        **changed(
            case, [{"hardtimes": LOST}], data={"partition": partition, "allow_empty_clients": True},
            model={"init": dead_layer}, rounds={"total": 3, "participation": 1.0}, local={"batch_size": 32},
        )
    )  # fmt: skip
    federation = simulate(config, tmp_path)
    sizes = federation.partition.sizes
    assert (sizes == 0).sum() == 1
    assert table(tmp_path, "rounds")["clients_ok"].tolist() == [7, 7, 6]
    server = federation.server
    dead = [tensor for name, tensor in server.layers.state_dict(server.params).items() if name.startswith(DEAD)]
    assert len(dead) >= 3  # the convolution (with or without a bias) and its norm
    assert not any(tensor.any() for tensor in dead)
    assert server.value.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in server.shared.values())
    assert np.isfinite(noted(tmp_path)).all()
    for client, handle in (*federation.engine.client_states.items(), *federation.engine.client_models.items()):
        assert all(np.isfinite(array).all() for array in federation.engine.value_of(handle).values()), client


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_alone(case: Case, tmp_path):
    """Of one client the weight is 1."""
    if case.method in ("hdfl", "random_layer"):  # their cases ask for two senders
        case = replace(case, changes={"weighting": [{case.method: 1}]})
    if case.method == "trimmed_mean":  # its case cuts one on each side
        case = replace(case, changes={"weighting": [{case.method: 0}]})
    partition = {"dirichlet_counts": {"alpha": 0.8, "clients": 1}}
    name = {"synthetic": {"samples": 60, "shape": [1, 8, 8], "classes": 4}}
    rounds = {"total": 2, "participation": 1.0}
    changes = changed(case, data={"name": name, "partition": partition}, rounds=rounds)
    if case.method == "multi_krum":
        with pytest.raises(ConfigError, match="needs rounds of 5 clients"):
            simulate(tiny(**changes), tmp_path)
        return
    federation = simulate(tiny(**changes), tmp_path)
    assert federation.server.value.isfinite().all()
    assert table(tmp_path, "clients")["weight"].tolist() == [1.0, 1.0]
    assert np.isfinite(noted(tmp_path)).all()
