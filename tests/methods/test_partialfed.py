"""PartialFed."""

import math
from collections.abc import Sequence

import pytest
import torch
from conftest import simulate, tiny
from quadratics import Quadratics, quadratics
from toy import vector

from raysim.config import ConfigError
from raysim.methods.partialfed import PartialFed

A, B = [[1.0, 2.0]], [[0.5, -1.0]]  # one client, one layer of two parameters
GLOBAL, LOCAL = (1e6, 0.0), (0.0, 1e6)


def test_local_logits_are_local_training(tmp_path):
    """And so the server's weights do not matter; FedFomo with one model, each client's own, trains locally too."""
    alone = {"data": {"client_val_frac": 0.2}, "rounds": {"participation": 1.0}}
    partialfed = simulate(
        tiny(client=[{"partialfed": {"logits": LOCAL, "choice_batches": 0}}], **alone), tmp_path / "partialfed"
    )
    fedfomo = simulate(tiny(client=[{"fedfomo": {"models": 1}}], **alone), tmp_path / "fedfomo")
    for client in range(8):
        kept = partialfed.engine.value_of(partialfed.engine.client_states[client])["previous"]
        assert (kept == fedfomo.engine.value_of(fedfomo.engine.client_models[client])["value"]).all()


def pair(values: Sequence[float], change: float, at: int) -> list[float]:
    """Two values, one of them changed."""
    return [value + change * (i == at) for i, value in enumerate(values)]


@quadratics()
@pytest.mark.parametrize("t", [0, 3])
def test_gradient_of_the_logits(t):
    """Straight through: the derivative of L(Σ_k (hard_k + soft_k(logits) − soft_k) copy_k), by central differences."""
    start, rate = (0.2, -0.1), 0.3
    method = PartialFed(model_batches=1, choice_batches=1, tau=2.0, tau_decay=0.9, choice_lr=rate, logits=start)
    tau, received, local = 2.0 * 0.9**t, vector([3.0, 1.0]), vector([-2.0, 4.0])
    federation = Quadratics([method], A, B, lr=0.05)
    federation.t, federation.states[0].previous = t, local
    run = federation.run(0, received)
    federation.stack.start(run)
    run.scratch["partialfed"] = torch.stack([run.value, local])
    run.steps = 1  # the second batch is for the logits
    method.step(run, *run.data.train)

    stream = federation.run(0).generator("partialfed")
    noise = [-math.log(e) for e in torch.empty(1, 2).double().exponential_(generator=stream)[0]]

    def soft(logits: Sequence[float]) -> list[float]:
        raised = [math.exp((x + n) / tau) for x, n in zip(logits, noise, strict=True)]
        return [r / sum(raised) for r in raised]

    now = soft(start)
    hard = [float(now[0] >= now[1]), float(now[0] < now[1])]

    def loss(logits: Sequence[float]) -> float:
        a = [h + s - s0 for h, s, s0 in zip(hard, soft(logits), now, strict=True)]
        w = [a[0] * received[j].item() + a[1] * local[j].item() for j in range(2)]
        return sum(0.5 * a * (x - b) ** 2 for a, x, b in zip(A[0], w, B[0], strict=True))

    h = 1e-6
    slopes = [(loss(pair(start, h, i)) - loss(pair(start, -h, i))) / (2 * h) for i in (0, 1)]
    expected = [x - rate * slope for x, slope in zip(start, slopes, strict=True)]
    assert run.state(method).logits[0].tolist() == pytest.approx(expected, abs=1e-7)
    assert torch.equal(run.scratch["partialfed"], torch.stack([received, local]))  # weights do not move


@quadratics()
def test_a_batch_trains_the_copy_it_was_taken_from():
    for logits, which in ((GLOBAL, 0), (LOCAL, 1)):
        method = PartialFed(logits=logits)
        federation = Quadratics([method], A, B)
        federation.states[0].previous = vector([-2.0, 4.0])
        run = federation.run(0, [3.0, 1.0])
        upload = federation.visit(run)
        start = ([3.0, 1.0], [-2.0, 4.0])[which]
        expected = [x - 0.1 * a * (x - b) for x, a, b in zip(start, A[0], B[0], strict=True)]
        assert run.scratch["partialfed"][which].tolist() == pytest.approx(expected)
        assert run.scratch["partialfed"][1 - which].tolist() == ([-2.0, 4.0], [3.0, 1.0])[which]
        assert upload.value.tolist() == pytest.approx(expected)  # the layer with the larger logit


def test_without_choice_batches_the_policy_is_fixed_and_random():
    method = PartialFed(choice_batches=0, logits=(0.3, 0.3))
    federation = Quadratics([method], A, B, steps=50)
    federation.simulate(2)
    run = federation.run(0)
    assert run.state(method).logits.tolist() == [[0.3, 0.3]]
    moved = Quadratics([PartialFed(model_batches=1, choice_batches=1, logits=(0.3, 0.3))], A, B, steps=50)
    moved.simulate(2)
    assert moved.run(0).state(PartialFed()).logits.tolist() != [[0.3, 0.3]]


def test_temperature_falls_round_by_round():
    """Which copy a draw takes does not depend on it, but how far a choice batch moves the logits does."""

    @quadratics()
    def change(t: int, decay: float) -> torch.Tensor:
        method = PartialFed(model_batches=1, choice_batches=1, tau_decay=decay)
        federation = Quadratics([method], A, B)
        federation.t, federation.states[0].previous = t, vector([-2.0, 4.0])
        run = federation.run(0, [3.0, 1.0])
        federation.stack.start(run)
        run.scratch["partialfed"] = torch.stack([run.value, run.previous])
        run.steps = 1
        method.step(run, *run.data.train)
        return run.state(method).logits

    assert torch.equal(change(0, 0.5), change(0, 1.0))
    assert not torch.equal(change(2, 0.5), change(2, 1.0))


@quadratics()
def test_tested_is_the_choice_of_the_larger_logits():
    for logits, expected in ((LOCAL, [-2.0, 4.0]), (GLOBAL, [3.0, 1.0]), ((0.0, 0.0), [3.0, 1.0])):
        federation = Quadratics([PartialFed(logits=logits)], A, B)
        federation.states[0].previous = vector([-2.0, 4.0])
        run = federation.run(0, [3.0, 1.0])
        federation.stack.personal(run)
        assert run.params.tolist() == expected
        upload = federation.visit(run).value.clone()
        federation.stack.personal(run)
        assert torch.equal(run.params, upload)  # right after training: what was sent


@pytest.mark.parametrize("field", ["model_batches", "tau"])
def test_refused(field):
    with pytest.raises(ConfigError, match=rf"partialfed\.{field}: must be a .* > 0"):
        tiny(client=[{"partialfed": {field: 0}}])
