"""Steps repeated from a tape have the bits of steps that are not, and what cannot be repeated is not recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case import cases
from conftest import simulate, table, tiny
from torch import Tensor, nn

from raysim.core.client import ClientMethod, LocalRun
from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.tape import Tapes, known
from raysim.core.task import TASKS
from raysim.methods import CLIENTS
from raysim.models import MODELS, Inputs, build

IMAGES = Inputs((3, 32, 32), 10)
SHAPES = {  # of what the others are made for
    "amazon_mlp": Inputs((50,), 10),
    "fasttext": Inputs((12,), 10, 50),
    "text_cnn": Inputs((12,), 10, 50),
    "char_gru": Inputs((12,), 50, 50),
}
LARGE = {  # made of parts that others have, too
    *("alexnet", "densenet121", "resnet18", "resnet18_imagenet", "resnet56", "resnet110", "vgg9", "vgg16", "wrn56_4")
}
SETTINGS: list[dict[str, Any]] = [
    {"local": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "grad_clip": 0.5}},
    {"local": {"optimizer": "adamw", "momentum": 0.0, "label_smoothing": 0.1, "class_weights": [1, 2, 3, 4]}},
    {"local": {"batch_size": 4, "accumulate": 3, "state": "persist"}},
    {"local": {"precision": "bf16"}, "model": {"name": "mlp"}},
    {"model": {"name": "tiny_bn_cnn", "bn_stats": "local"}},
]


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every pass that might be recorded: whether it was repeated from a tape."""
    seen: list[bool] = []
    run = Tapes.run

    def watched(self: Tapes, step: Any, *args: Any, **rate: Any) -> Any:
        called: list[None] = []

        def noticed(*inputs: Tensor) -> Any:
            called.append(None)
            return step(*inputs)

        made = run(self, noticed, *args, **rate)
        seen.append(not called)
        return made

    monkeypatch.setattr(Tapes, "run", watched)
    return seen


@pytest.mark.parametrize("name", sorted({*MODELS} - LARGE))
def test_every_model_takes_the_same_steps_from_its_tape(name: str) -> None:
    """With dropout, statistics and short batches: three steps of 4, 4 and 3 samples, and again."""
    inputs = SHAPES.get(name, IMAGES)
    task = TASKS["next_token" if name == "char_gru" else "classification"]
    torch.manual_seed(1)
    x = torch.randint(50, (11, *inputs.shape)) if inputs.vocab else torch.randn(11, *inputs.shape)
    y = torch.randint(inputs.classes, (11, 12) if name == "char_gru" else (11,))
    ends = []
    for recorded in (True, False):
        torch.manual_seed(0)
        model = build(name, inputs).train()
        flat = FlatModel(model, LayerMap.of(model, "module", (), channels_last=True))
        tapes = Tapes(flat.storage) if recorded else None
        assert known(model, task)

        def step(x: Tensor, y: Tensor, flat: FlatModel = flat) -> tuple[Tensor, Tensor]:
            z, outputs = flat.forward_from(0, x)
            loss = task.loss(outputs, y)
            flat.backward(loss)
            return loss.detach(), z.detach()

        seen = []
        for part in (slice(0, 4), slice(4, 8), slice(8, 11)) * 2:
            made = tapes.run(step, None, x[part], y[part]) if tapes else step(x[part], y[part])
            flat.params.add_(flat.grad, alpha=-0.01)
            seen += [*made, flat.grad.clone(), flat.value.clone()]
        ends.append(torch.cat([tensor.flatten() for tensor in seen]))
        if tapes:
            assert not tapes.refusals
    assert torch.equal(ends[0].view(torch.int32), ends[1].view(torch.int32))


def test_every_method_and_setting_has_the_same_bits_with_tapes_and_without(
    tmp_path: Path, repeated: list[bool]
) -> None:
    settings = {name: case.changes for name, case in cases().items()} | {str(s): s for s in SETTINGS}
    different, idle = [], []
    for i, (name, given) in enumerate(settings.items()):
        repeated.clear()
        changes = {**given, "rounds": {**given.get("rounds", {}), "total": 2}}
        auto = simulate(tiny(**changes), tmp_path / f"{i}-auto").sha256()
        if not any(repeated):
            idle.append(name)
        changes["engine"] = {"local": {**given.get("engine", {}).get("local", {}), "tape": "never"}}
        if auto != simulate(tiny(**changes), tmp_path / f"{i}-never").sha256():
            different.append(name)
    assert not different
    assert not idle, "these must use their tapes"


def test_a_tape_reads_what_each_pass_is_given() -> None:
    """Also where the first pass was given the same tensor twice: Σ x + y·a − b."""
    tapes, seen = Tapes([]), []

    def step(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, None]:
        seen.append(None)
        return (x + y * a - b).sum(), None

    x, y, one, four = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([4.0])
    for a, b, expected in [(one, one, 2.0), (four, four, 5.0), (one, four, -1.0), (four, one, 8.0)]:
        assert tapes.run(step, None, x, y, a, b)[0].item() == expected
    assert len(seen) == 2


# ---- what is not recorded


def test_a_batch_whose_gradient_is_asked_for_gets_it() -> None:
    """Of a loss Σ w·x it is w."""
    w = torch.arange(3.0, requires_grad=True)
    w.grad = torch.zeros_like(w)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = (w * x).sum()
        loss.backward()
        return loss.detach(), x.detach()

    tapes = Tapes([w, w.grad])
    for _ in range(3):
        x = torch.ones(3, requires_grad=True)
        for batch in (x, x.detach()):
            loss, _ = tapes.run(step, None, batch, torch.ones(3))
            assert not loss.requires_grad
        assert torch.equal(x.grad, w.detach())
    assert torch.equal(w.grad, torch.full([3], 6.0)) and not tapes.refusals


class Own(nn.Module):
    """A model that a user wrote; `forward` takes one of two ways."""

    way: Callable[[Tensor], bool]

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x if self.way(x) else -x)


class Chance(Own):
    def way(self, x: Tensor) -> bool:
        return random.random() < 0.5


class Value(Own):
    def way(self, x: Tensor) -> bool:
        return bool(x.sum() > 0)


class Scaled(Own):
    def way(self, x: Tensor) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(random.random())


class Straight(Own):
    def way(self, x: Tensor) -> bool:
        return True


def trained(model: type[nn.Module], tape: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(MODELS, "own", lambda inputs: model())
    return simulate(tiny(model={"name": "own"}, engine={"local": {"tape": tape}}), folder).sha256()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Value, "what aten._local_scalar_dense.default returns, or its shape, depends on values"),
        (Scaled, "a tensor [] is neither of the model nor made in the step"),
    ],
)
def test_what_another_step_may_do_otherwise_is_reported_once_and_trains_as_without(
    model: type[nn.Module], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: list[bool]
) -> None:
    always = trained(model, "always", tmp_path / "always", monkeypatch)
    assert repeated and not any(repeated)
    assert always == trained(model, "never", tmp_path / "never", monkeypatch)
    remarks = [line for line in table(tmp_path / "always", "events")["message"] if "recorded" in line]
    assert remarks == [f"round 1: steps are not recorded (engine.tape): {why}"]


def test_the_code_of_a_user_is_recorded_only_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: list[bool]
) -> None:
    """`random` decides what Chance does, and nothing would show it."""
    auto = trained(Chance, "auto", tmp_path / "chance-auto", monkeypatch)
    assert auto == trained(Chance, "never", tmp_path / "chance-never", monkeypatch)
    assert not repeated
    always = trained(Straight, "always", tmp_path / "always", monkeypatch)
    assert any(repeated)
    assert always == trained(Straight, "never", tmp_path / "never", monkeypatch)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 4))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def watched() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 4))
    model[0].weight.register_hook(lambda grad: 2 * grad)
    return model


def replaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 4))
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("model", [hooked, watched, replaced, Straight])
def test_the_code_of_a_user_is_known_as_such(model: Callable[[], nn.Module]) -> None:
    task = TASKS["classification"]
    assert known(nn.Sequential(nn.Linear(64, 4), nn.Dropout()), task)
    assert not known(model(), task)
    assert not known(nn.Sequential(model()), task)
    assert not known(nn.Linear(64, 4), type("Mine", (type(task),), {"__module__": __name__})())


class Thaws(ClientMethod):
    """Changes what the model does in the second epoch."""

    def correct_grad(self, run: LocalRun) -> None:
        run.model.conv2.norm.momentum = 0.5 if run.epoch else 0.1


def test_a_hook_that_has_the_model_may_change_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: list[bool]
) -> None:
    monkeypatch.setitem(CLIENTS, "thaws", Thaws)
    changes: dict[str, Any] = {"client": ["thaws"], "local": {"epochs": 2}}
    auto = simulate(tiny(**changes), tmp_path / "auto").sha256()
    assert not any(repeated)
    assert auto == simulate(tiny(**changes, engine={"local": {"tape": "never"}}), tmp_path / "never").sha256()
