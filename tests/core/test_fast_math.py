"""`engine.fast_math`: steps that subtract the gradient while it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import simulate, tiny
from torch import Tensor, nn

from raysim.analysis import INSTRUMENTS, Instrument
from raysim.config import ConfigError
from raysim.config.identity import check_unchanged, fingerprint
from raysim.core.client import ClientMethod, LocalRun
from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.probe import Probe
from raysim.core.tape import Tapes
from raysim.core.task import TASKS
from raysim.methods import CLIENTS
from raysim.models import Inputs, build

PLAIN: dict[str, Any] = {"model": {"name": "mlp"}, "local": {"momentum": 0.0, "weight_decay": 0.0}}
FAST: dict[str, Any] = {**PLAIN, "engine": {"local": {"fast_math": True}}}
RATE = 0.3


def gamma(n: int) -> float:
    """How far a sum that is rounded n times can be off, in parts of the sum of its terms' sizes (Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, 3.1)."""
    return n * 2.0**-24 / (1 - n * 2.0**-24)


@pytest.mark.parametrize(("name", "rounds"), [("mlp", 1), ("fedavg_cnn", 1), ("tiny_bn_cnn", 1), ("char_gru", 0)])
def test_only_matrices_of_linear_layers_round_otherwise_and_within_the_bound(name: str, rounds: bool) -> None:
    """W − r Σ a·b of n products is within γ(n + 3) (|W| + r Σ |a·b|) of the exact one, as one sum or as two."""
    inputs = Inputs((12,), 50, 50) if name == "char_gru" else Inputs((1, 28, 28), 10)
    task = TASKS["next_token" if name == "char_gru" else "classification"]
    torch.manual_seed(0)
    x = torch.randint(50, (11, 12)) if inputs.vocab else torch.randn(11, 1, 28, 28)
    y = torch.randint(50, (11, 12)) if inputs.vocab else torch.randint(10, (11,))
    fast, plain = (
        FlatModel(model, LayerMap.of(model, "module", (), channels_last=True)) for model in models(name, inputs)
    )
    tapes, factors = Tapes(fast.storage, (fast.params, fast.grad)), dict[str, tuple[Tensor, Tensor]]()
    for path, module in plain.model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(noted(factors, f"{path}.weight"))

    def step(x: Tensor, y: Tensor, flat: FlatModel = fast) -> tuple[Tensor, None, None]:
        loss = task.loss(flat.forward_from(0, x)[1], y)
        flat.backward(loss)
        return loss.detach(), None, None

    different = 0
    for part in (slice(0, 4), slice(4, 8), slice(8, 11)) * 2:
        plain.value.copy_(fast.value)
        before = plain.value.clone()
        loss = step(x[part], y[part], plain)[0]
        assert tapes.run(step, None, x[part], y[part], rate=RATE)[0].equal(loss)
        plain.params.add_(plain.grad, alpha=-RATE)
        for spec in plain.layers.tensors:
            made, expected = spec.view(fast.value), spec.view(plain.value)
            if spec.name in factors:
                a, b = factors[spec.name]
                sizes = spec.view(before).abs() + RATE * (a.abs().T @ b.abs())
                assert ((made - expected).abs() <= 2 * gamma(len(a) + 3) * sizes).all(), spec.name
                different += int((made != expected).sum())
            else:
                assert made.equal(expected), spec.name
    assert bool(different) == bool(rounds)
    assert not tapes.refusals


def models(name: str, inputs: Inputs) -> list[nn.Module]:
    """Two with the same weights."""
    pair = [build(name, inputs).train() for _ in range(2)]
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


def noted(factors: dict[str, tuple[Tensor, Tensor]], name: str) -> Any:
    """A hook that keeps of what a linear layer's gradient is the product, [n, out] and [n, in]."""

    def hook(module: nn.Module, args: tuple[Tensor], outputs: Tensor) -> None:
        def backward(grad: Tensor) -> None:
            factors[name] = grad.flatten(0, -2), args[0].detach().flatten(0, -2)

        outputs.register_hook(backward)

    return hook


def test_a_step_that_reads_what_has_moved_is_not_recorded() -> None:
    """The loss is w·x, and what is returned w·1 after its gradient is known: w must not have moved."""
    w = torch.ones(3)
    leaf = w.detach().requires_grad_()
    leaf.grad = torch.zeros(3)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, None]:
        leaf.grad.zero_()
        (leaf * x).sum().backward()
        return (leaf * y).sum().detach(), y, None

    tapes = Tapes([w, leaf.grad], (w, leaf.grad))
    x, y = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 1.0, 1.0])
    assert [tapes.run(step, None, x, y, rate=0.25)[0].item() for _ in range(3)] == [3.0, 1.25, -0.5]
    assert tapes.refusals == {"a step reads parameters whose gradient it has computed"}


def test_the_bits_are_the_same_on_any_actors_and_other_than_without(tmp_path: Path, warm_ray: Any) -> None:
    """Also where another client records the step, and with statistics of batches and short batches."""
    for i, model in enumerate(("mlp", "tiny_bn_cnn")):
        changes = {**FAST, "model": {"name": model}}
        alone = simulate(tiny(**changes), tmp_path / f"{i}-alone").sha256()
        assert alone != simulate(tiny(**PLAIN | {"model": {"name": model}}), tmp_path / f"{i}-plain").sha256()
        for clients in (1, 2):
            engine = {"ray": {"clients_per_actor": clients, "fast_math": True}}
            config = tiny(**{**changes, "engine": engine})
            assert simulate(config, tmp_path / f"{i}-{clients}", make_engine=warm_ray).sha256() == alone


@pytest.mark.parametrize(
    "changes",
    [
        {"local": {"momentum": 0.9}}, {"local": {"weight_decay": 0.1}}, {"local": {"grad_clip": 0.1}},
        {"local": {"optimizer": "adam"}}, {"local": {"batch_size": 4, "accumulate": 2}}, {"client": ["scaffold"]},
        {"client": [{"fedprox": {"mu": 1.0}}]},
    ],
)  # fmt: skip
def test_what_does_more_with_the_gradient_has_it(changes: dict[str, Any], tmp_path: Path) -> None:
    """Then the bits are those without."""
    changes = {key: {**PLAIN[key], **value} if key in PLAIN else value for key, value in changes.items()}
    plain, fast = PLAIN | changes, FAST | changes
    assert simulate(tiny(**fast), tmp_path / "fast").sha256() == simulate(tiny(**plain), tmp_path / "plain").sha256()


def test_it_is_part_of_the_fingerprint_and_a_run_keeps_it(tmp_path: Path) -> None:
    plain, fast = tiny(**PLAIN, rounds={"total": 1}), tiny(**FAST, rounds={"total": 1})
    assert fingerprint(fast) != fingerprint(plain)
    simulate(plain, tmp_path / "plain")
    simulate(fast, tmp_path / "fast")
    check_unchanged(fast, tmp_path / "fast")
    with pytest.raises(ConfigError, match=r"engine\.fast_math was false when the run began"):
        check_unchanged(fast, tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"engine\.fast_math was true when the run began"):
        check_unchanged(plain, tmp_path / "fast")
    always = tiny(**PLAIN, rounds={"total": 1}, engine={"local": {"fast_math": True, "tape": "always"}})
    with pytest.raises(ConfigError, match=r'engine\.tape was "auto" when the run began'):
        check_unchanged(always, tmp_path / "fast")


class Asks(ClientMethod):
    def begin(self, run: LocalRun) -> None:
        assert run.model


class Watches(Probe):
    def batch(self, run: LocalRun, z: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Watcher(Instrument):
    probes = (Watches(),)


def test_what_it_does_not_go_with_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENTS, "asks", Asks)
    monkeypatch.setitem(INSTRUMENTS, "watcher", Watcher)
    with pytest.raises(ConfigError, match=r"record\.instruments\.0\.watcher: sees the gradient of each step"):
        tiny(**FAST, record={"instruments": ["watcher"]})
    tiny(**PLAIN, record={"instruments": ["watcher"]})
    with pytest.raises(Exception, match=r"run\.model is not available with engine\.fast_math"):
        simulate(tiny(**FAST, client=["asks"]), tmp_path)
