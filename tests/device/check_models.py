"""Every model of the catalogue on the emulated device: one step of training gives what the CPU gives."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from device import emulated
from models.test_model_behaviour import INPUTS, batch
from torch import Tensor

from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.layout import keep_frozen
from raysim.core.optim import OptimizerSpec
from raysim.models import MODELS, build

emulated.install()
DEEP = {"resnet110", "densenet121"}  # whose rounding grows from layer to layer


@pytest.mark.parametrize("name", sorted(MODELS))
def test_one_step(name: str) -> None:
    inputs, results = INPUTS[name], []
    torch.manual_seed(1)
    x = batch(inputs)
    y = torch.randint(inputs.classes, (len(x),))
    built = build(name, inputs)
    for module in built.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # what it draws is the device's
    for device, model in (("cuda", deepcopy(built)), ("cpu", built)):
        flat = FlatModel(model, LayerMap.of(model), device)
        model.train()
        outputs = model(x.to(device))
        loss = torch.nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1])[: len(y)], y.to(device))
        flat.backward(loss)
        OptimizerSpec(momentum=0.9).build(flat.params, flat.grad, 0.1).step()
        assert flat.value.device.type == device
        results.append(flat.value.cpu())
    torch.testing.assert_close(*results, rtol=0, atol=1e-3 if name in DEEP else 1e-5)


def test_batch_normalisation_runs_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has no cuDNN; with it, views of a vector at odd places are misaligned addresses."""
    used = list[bool]()

    def batch_norm(x: Tensor, *rest: Any) -> Tensor:
        used.append(rest[-1])
        return x

    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    monkeypatch.setattr(torch, "batch_norm", batch_norm)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    flat = FlatModel(model, LayerMap.of(model, channels_last=True), "cuda")
    flat.forward_from(0, torch.ones(5, 3, 2, 2, device="cuda"))
    assert used == [False]
    assert torch.backends.cudnn.enabled


def test_what_is_frozen() -> None:
    """A frozen body is on the device, and training leaves it as it was."""
    torch.manual_seed(1)
    built = build("tiny_bn_cnn", INPUTS["tiny_bn_cnn"])
    for module in [*built.children()][:-1]:
        module.requires_grad_(False)
    keep_frozen(built)
    x, results = batch(INPUTS["tiny_bn_cnn"]), []
    for device, model in (("cuda", deepcopy(built)), ("cpu", built)):
        flat = FlatModel(model, LayerMap.of(model), device)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.train()
        flat.backward(model(x.to(device)).square().mean())
        OptimizerSpec(momentum=0.9).build(flat.params, flat.grad, 0.1).step()
        state = model.state_dict()
        assert {tensor.device.type for tensor in state.values()} == {device}
        moved = {name for name, tensor in state.items() if not torch.equal(tensor, before[name])}
        assert moved == {"head.weight", "head.bias"}
        results.append(flat.value.cpu())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
