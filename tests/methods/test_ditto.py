"""Ditto."""

from dataclasses import replace

import pytest
import torch
from conftest import simulate, table, tiny
from quadratics import Quadratics, quadratics
from reference import forward, inputs, tensors

from raysim.core.client import ClientMethod
from raysim.methods.ditto import Ditto

A, B = [[1.0], [4.0]], [[0.0], [1.0]]  # two clients, curvatures and optima


def personal(federation: Quadratics, client: int) -> torch.Tensor:
    return federation.states[client].methods["ditto"].v


@pytest.mark.parametrize("lam", [0.0, 0.5, 2.0])
def test_ends_at_its_closed_form(lam):
    """v = (a b + λ w)/(a + λ) around the w that was received; the global track does not notice."""
    federation = Quadratics([Ditto(lam, epochs=200)], A, B, lr=0.15, start=[3.0])
    value = federation.simulate(1)
    for k, (a, b) in enumerate([(1.0, 0.0), (4.0, 1.0)]):
        assert personal(federation, k).item() == pytest.approx((a * b + lam * 3.0) / (a + lam), abs=1e-9)
    assert torch.equal(value, Quadratics([], A, B, lr=0.15, start=[3.0]).simulate(1))


def test_an_infinite_spring_holds_v_at_the_global_model():
    federation = Quadratics([Ditto(1e9, epochs=5)], A, B, lr=1e-9, start=[3.0])
    federation.simulate(1)
    assert abs(personal(federation, 1) - 3.0) < 1e-6


def test_v_goes_on_from_where_it_was_around_what_is_received_now():
    lam, lr = 0.5, 0.1
    federation = Quadratics([Ditto(lam, epochs=1)], A, B, lr=lr, start=[3.0])
    v = 3.0  # the first model received
    for _ in range(3):
        w = federation.server.value.item()
        v -= lr * (4.0 * (v - 1.0) + lam * (v - w))
        federation.round()
        assert personal(federation, 1).item() == pytest.approx(v, abs=1e-12)


def test_in_the_reversed_order_the_spring_is_fixed_to_the_trained_model():
    """v starts where it received its first model; the global track does not notice."""
    lam, lr, usual = 0.5, 0.1, Quadratics([Ditto(0.5, epochs=1)], A, B, lr=0.1, start=[3.0])
    federation = Quadratics([Ditto(lam, epochs=1, first="global")], A, B, lr=lr, start=[3.0])
    v = 3.0
    for _ in range(3):
        w = federation.server.value.item()
        trained = w - lr * 4.0 * (w - 1.0)
        v -= lr * (4.0 * (v - 1.0) + lam * (v - trained))
        assert torch.equal(federation.round(), usual.round())
        assert personal(federation, 1).item() == pytest.approx(v, abs=1e-12)
        assert personal(usual, 1).item() != pytest.approx(v, abs=1e-3)


@quadratics()
def test_the_spring_is_fixed_where_training_starts():
    """Beside a method that initialises: ALA's mix takes the place of the download."""

    class Elsewhere(ClientMethod):
        def start(self, run):
            run.params.fill_(5.0)

    federation = Quadratics([Elsewhere(), Ditto(2.0, epochs=300)], A, B, lr=0.1, start=[3.0])
    federation.visit(federation.run(1))
    assert personal(federation, 1).item() == pytest.approx((4.0 * 1.0 + 2.0 * 5.0) / 6.0)


def test_global_track_is_fedavg(ran):
    assert torch.equal(ran(client=["ditto"]).server.value, ran().server.value)


def test_what_layers_draw_aside_is_not_taken_from_training():
    """Else dropout in v's passes would change the masks of the global track."""
    run = Quadratics([Ditto()], A, B).run(0)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with run.aside("ditto"):
        aside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(aside, expected)


def test_official_sgd_has_no_momentum_and_no_decay():
    momentum = {"momentum": 0.9, "weight_decay": 0.1}
    plain, official, usual = (
        Quadratics([Ditto(0.5, epochs=3, official_sgd=official)], A, B, start=[3.0], steps=2, **optimizer)
        for official, optimizer in ((False, {}), (True, momentum), (False, momentum))
    )
    values = [federation.simulate(1) for federation in (plain, official, usual)]
    assert torch.equal(personal(official, 1), personal(plain, 1))
    assert not torch.equal(personal(official, 1), personal(usual, 1))
    assert torch.equal(values[1], values[2])  # the global track keeps them
    assert not torch.equal(values[1], values[0])


@pytest.mark.parametrize("persist", [False, True])
def test_the_momentum_of_v_outlives_a_round_where_the_optimisers_does(persist):
    """By hand."""
    lam, lr, rho, b = 0.5, 0.1, 0.9, 1.0
    federation = Quadratics([Ditto(lam, epochs=2)], A, B, lr=lr, start=[3.0], momentum=rho)
    federation.settings = replace(federation.settings, persist=persist)
    v, momentum = 3.0, 0.0
    for _ in range(3):
        w = federation.server.value.item()
        momentum *= persist
        for _ in range(2):
            momentum = rho * momentum + 4.0 * (v - b) + lam * (v - w)
            v -= lr * momentum
        federation.round()
        assert personal(federation, 1).item() == pytest.approx(v, abs=1e-12)


def test_a_run_keeps_the_optimiser_of_v(tmp_path):
    """v is trained by as many passes as w: both optimisers of a client have taken as many steps in all its rounds."""
    local = {"optimizer": "adam", "momentum": 0.0, "state": "persist"}
    federation = simulate(tiny(client=[{"ditto": {"epochs": 1}}], local=local, rounds={"total": 4}), tmp_path)
    states = [federation.engine.value_of(slot) for slot in federation.engine.client_states.values()]
    steps = [(state["ditto.optimizer/steps"].tolist(), state["optimizer.steps"].tolist()) for state in states]
    assert all(of_v == of_w for of_v, of_w in steps)
    assert len({of_v[0][2] for of_v, _ in steps}) > 1  # some have taken part more often


def test_plain_sgd_leaves_nothing_to_keep(tmp_path):
    local = {"momentum": 0.0, "state": "persist"}
    federation = simulate(tiny(client=["ditto"], local=local, rounds={"total": 1}), tmp_path)
    assert all({*federation.engine.value_of(slot)} == {"ditto.v"} for slot in federation.engine.client_states.values())


def test_gradients_of_v_are_clipped_with_the_spring_in_them():
    """At 3 the gradient is 8, at 2.8 it is 7.2 and the spring pulls back by 2: both steps have the length 2."""
    federation = Quadratics([Ditto(10.0, epochs=2)], A, B, lr=0.1, start=[3.0])
    federation.settings = replace(federation.settings, grad_clip=2.0)
    federation.simulate(1)
    assert personal(federation, 1).item() == pytest.approx(2.6, abs=1e-12)


@quadratics()
def test_tested_is_v():
    federation = Quadratics([Ditto(0.5)], A, B, start=[3.0])
    newcomer = federation.run(1)
    federation.stack.personal(newcomer)
    assert newcomer.params.item() == 3.0
    after = federation.run(1)
    federation.visit(after)
    v = personal(federation, 1).clone()
    assert v.item() != after.params.item()
    for run in (after, federation.run(1)):  # right after training, and before the next one
        federation.stack.personal(run)
        assert torch.equal(run.params, v)


@pytest.mark.parametrize("when", ["after_train", "after_init"])
def test_scores_are_those_of_v_on_the_clients_own_samples(when, tmp_path):
    changes = {"data": {"client_test_frac": 0.3}, "evaluate": {"personal": when}, "rounds": {"total": 1}}
    federation = simulate(tiny(client=["ditto"], **changes), tmp_path)
    scores, engine = table(tmp_path, "personal"), federation.engine
    assert len(scores["client"]) == (3 if when == "after_train" else 8)  # the cohort, or all
    for client, correct in zip(scores["client"], scores["correct"], strict=True):
        v = federation.server.value
        if client in engine.client_states:
            v = torch.from_numpy(engine.value_of(engine.client_states[client])["ditto.v"])
        x, y = inputs(federation, federation.partition.test[client])
        logits, _ = forward(tensors(federation.server.layers.state_dict(v)), x, False)
        assert (logits.argmax(1) == y).sum() == correct
