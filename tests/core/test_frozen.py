"""Parameters that are frozen: what is done with them, and above all what is not."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from conftest import simulate, table, tiny
from ray import cloudpickle
from reference import drawn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import raysim
from raysim.config import ConfigError
from raysim.core.layout import frozen_in
from raysim.federation import Federation
from raysim.host.host import ClientHost
from raysim.registry import REGISTRY


class Body(nn.Module):
    """A convolution and a norm that are frozen, and a head that is not."""

    def __init__(self, inputs: Any, tie: bool = False, all_frozen: bool = False, other_way: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(inputs.shape[0], 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.twin = self.conv if tie else None
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)
        self.head = nn.Linear(6, inputs.classes)
        if all_frozen:
            self.requires_grad_(False)
        if other_way:
            for parameter in self.parameters():
                parameter.requires_grad_(not parameter.requires_grad)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.fixture(autouse=True)
def body() -> Any:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # it travels to actors, as from a script
    REGISTRY.adopt(())
    REGISTRY.add("model", "frozen_body")(Body)
    yield
    del REGISTRY.table("model")["frozen_body"]


FROZEN = {
    "conv.weight",
    "conv.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
}
MODEL = {"name": "frozen_body"}


def saved(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_resnet18_with_a_new_head(tmp_path: Path) -> None:
    """Of 44.7 MB a client sends the head's 20,520 bytes, and a checkpoint has no more."""

    @raysim.model(head="fc")
    def new_head(inputs: raysim.Inputs) -> nn.Module:
        model = torchvision.models.resnet18()
        model.requires_grad_(False)
        model.fc = nn.Linear(512, 10)
        return model

    try:
        config = tiny(
            data={
                "name": {"synthetic": {"samples": 40, "shape": [3, 32, 32], "classes": 10}},
                "partition": {"iid_equal": {"clients": 4}},
            },
            model={"name": "new_head"}, rounds={"total": 1, "participation": 1.0}, local={"state": "persist"}, client=["ditto"],
        )  # fmt: skip
        run = simulate(config, tmp_path)
        traffic = table(tmp_path, "traffic")
        assert traffic["bytes"].tolist() == [2 * 20520] * 4
        assert run.server.layers.S == run.server.layers.P == 5130
        assert run.server.layers.frozen == 11_176_512 + 9_600
        stored = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*") if path.is_file())
        assert stored < 30 * 20520
        assert saved(tmp_path).keys() == torchvision.models.resnet18(num_classes=10).state_dict().keys()
    finally:
        del REGISTRY.table("model")["new_head"]


def test_it_is_held_once(tmp_path: Path) -> None:
    run = Federation(tiny(model=MODEL), tmp_path)
    layers = run.spec.layers
    assert {*layers.constants} == FROZEN
    hosts = [ClientHost(run.spec, run.data, run.partition) for _ in range(2)]
    for host in hosts:
        state = host.flat.model.state_dict(keep_vars=True)
        assert {state[name].data_ptr() for name in FROZEN} == {
            tensor.data_ptr() for _, tensor in layers.constants.values()
        }
    run.close()


def test_training_is_that_of_the_head_on_fixed_features(tmp_path: Path) -> None:
    """A federation of nn.Linear, by hand, on what the body makes of all samples in eval mode."""
    run = simulate(tiny(model=MODEL, rounds={"total": 2, "participation": 1.0}), tmp_path)
    host = ClientHost(run.spec, run.data, run.partition)
    body, (x, y) = host.flat.model.eval(), host.samples.rows(np.arange(len(run.data.y)))
    with torch.no_grad():
        features = body.features(x)  # type: ignore[operator]
    start = run.spec.network()[0].head
    value = [parameter.detach().double() for parameter in start.parameters()]  # type: ignore[union-attr]
    sizes = run.partition.sizes / run.partition.sizes.sum()
    for t in range(2):
        ends = []
        for client in range(8):
            weight, bias = (tensor.clone().requires_grad_() for tensor in value)
            sgd = torch.optim.SGD([weight, bias], lr=0.1 * 0.9**t, momentum=0.9, weight_decay=1e-4)
            for batch in torch.tensor(drawn(run, t, client, "batches")).split(8):
                sgd.zero_grad()
                logits = features[batch].double() @ weight.T + bias
                nn.functional.cross_entropy(logits, y[batch]).backward()
                sgd.step()
            ends.append((weight.detach(), bias.detach()))
        value = [sum(share * end[i] for share, end in zip(sizes, ends, strict=True)) for i in range(2)]
    for name, wanted in zip(("head.weight", "head.bias"), value, strict=True):
        torch.testing.assert_close(saved(tmp_path)[name].double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"preset": "official_000", "server": ["fedlws"]}, {"client": ["fedala"]},
        {"server": [{"fedlws": {"beta": 0.05, "shrink_buffers": True}}]},
    ],
    ids=["fedavg", "official", "fedala", "shrinking"],
)  # fmt: skip
def test_nothing_changes_it_on_any_engine(changes: dict[str, Any], tmp_path: Path, warm_ray: Any) -> None:
    start = Federation(tiny(model=MODEL, **changes), tmp_path / "start")
    before = start.server.layers.state_dict(start.server.value)
    start.close()
    local = simulate(tiny(model=MODEL, **changes), tmp_path / "local")
    after = saved(tmp_path / "local")
    for name in FROZEN:
        assert torch.equal(after[name], before[name]), name
    assert not torch.equal(after["head.weight"], before["head.weight"])
    on_ray = tiny(model=MODEL, **changes, engine={"ray": {"clients_per_actor": 2}})
    assert simulate(on_ray, tmp_path / "ray", make_engine=warm_ray).sha256() == local.sha256()


def test_a_file_brings_it(tmp_path: Path, warm_ray: Any) -> None:
    """The body of another model, which every actor then has; a run that is resumed has it, too."""
    torch.manual_seed(5)
    other = Body(raysim.Inputs((1, 8, 8), 4))
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    changes = {
        "model": {**MODEL, "init": str(tmp_path / "other.safetensors"), "init_except": ["head"]},
        "rounds": {"checkpoint_every": 1},
    }
    local = simulate(tiny(**changes), tmp_path / "local")
    for name, tensor in saved(tmp_path / "local").items():
        assert torch.equal(tensor, other.state_dict()[name]) == (name in FROZEN), name
    on_ray = tiny(**changes, engine={"ray": {"clients_per_actor": 2}})
    assert simulate(on_ray, tmp_path / "ray", make_engine=warm_ray).sha256() == local.sha256()
    begun = Federation(tiny(**changes), tmp_path / "parts")
    begun.step()
    begun.close()
    assert simulate(tiny(**changes), tmp_path / "parts", resume=True).sha256() == local.sha256()
    partial = {name: tensor for name, tensor in other.state_dict().items() if name != "conv.weight"}
    save_file(partial, tmp_path / "partial.safetensors")
    with pytest.raises(
        ConfigError, match=r"partial.safetensors: the frozen tensor conv.weight \[6, 1, 3, 3\] is missing"
    ):
        simulate(tiny(model={**MODEL, "init": str(tmp_path / "partial.safetensors")}), tmp_path / "none")


def test_one_tensor_of_two_names(tmp_path: Path) -> None:
    run = simulate(tiny(model={**MODEL, "options": {"tie": True}}), tmp_path)
    state = run.server.layers.state_dict(run.server.value)
    assert torch.equal(state["twin.weight"], state["conv.weight"])
    model = run.model()
    assert model.twin is model.conv


def test_nothing_to_train(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train: it has no parameters, or all are frozen"):
        simulate(tiny(model={**MODEL, "options": {"all_frozen": True}}), tmp_path)


def test_a_head_that_is_frozen(tmp_path: Path) -> None:
    """FedRep trains the head: without one it would take another layer for it. FedAvg needs none."""
    model = {**MODEL, "options": {"other_way": True}}
    with pytest.raises(
        ConfigError, match="fedrep: needs the parameters of the model's head, head, and they are frozen"
    ):
        simulate(tiny(model=model, client=["fedrep"]), tmp_path / "fedrep")
    run = simulate(tiny(model=model), tmp_path / "fedavg")
    assert {spec.name for spec in run.server.layers.tensors if spec.kind == "parameter"} == {
        *(f"{module}.{name}" for module in ("conv", "norm") for name in ("weight", "bias"))
    }


def test_who_is_frozen() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    assert frozen_in(model) == []
    model.layer1.requires_grad_(False)
    assert {type(module) for module in frozen_in(model)} == {nn.Conv2d, nn.BatchNorm2d}
    half = nn.Linear(2, 2)
    half.bias.requires_grad_(False)
    assert frozen_in(half) == []


def test_the_preview_says_so(tmp_path: Path) -> None:
    from raysim.api.preview import preview

    said = preview(tiny(model=MODEL))
    assert "frozen_body, 28 parameters in 1 layers; 84 numbers frozen" in said


def test_what_changes_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meddle(self: Any, run: Any) -> None:
        with torch.no_grad():
            run.model.conv.weight.mul_(2)

    monkeypatch.setattr("raysim.methods.fedprox.FedProx.begin", meddle, raising=False)
    with pytest.raises(
        RuntimeError, match=r"changed the model's tensor conv\.weight, which no client sends: it is frozen"
    ):
        simulate(tiny(model=MODEL, client=[{"fedprox": {"mu": 0.1}}]), tmp_path)
