"""FedNova."""

import numpy as np
import pytest
import torch
from case import Traced
from conftest import simulate, table, tiny
from toy import TWO_LAYERS, ToyCohort, planned, toy_server

from raysim.config import ConfigError
from raysim.core.optim import OptimizerSpec
from raysim.methods.feddisco import FedDisco
from raysim.methods.fedldf import FedLDF
from raysim.methods.fednova import FedNova, Normaliser


def cohort(applied, effective=None, **fields) -> ToyCohort:
    stats = torch.tensor([applied, effective or applied]).T.tolist()
    return ToyCohort(toy_server(**fields), stats={Normaliser(): stats})


def test_golden_numbers():
    toy = cohort([1.0, 2.0, 4.0])
    mixture = FedNova().plan(toy, toy.server, toy.by_size())
    assert mixture.weights[:, 0].tolist() == pytest.approx([0.6875, 0.34375, 0.34375], abs=1e-12)
    assert toy.reduce(mixture).tolist() == pytest.approx([3.6875, 3.65625], abs=1e-12)


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, [1, 2, 4]), (0.9, [1, 2.9, 9.049])])
def test_normaliser_in_closed_form(momentum, expected):
    for steps, applied in zip((1, 2, 4), expected, strict=True):
        assert moved(steps, momentum=momentum)[1] == pytest.approx(applied)


def moved(steps: int, proximal: float = 0.0, **spec) -> tuple[float, float]:
    """How far `steps` steps go where the gradient is 1 everywhere, in units of the learning rate; the normaliser."""
    params, grad = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    optimizer = OptimizerSpec("sgd", **spec).build(params, grad, 0.1)
    optimizer.proximal = proximal
    for _ in range(steps):
        grad.copy_(1 + proximal * params)
        optimizer.step()
    return -params.item() / 0.1, optimizer.normaliser


@pytest.mark.parametrize("spec", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"proximal": 0.5}])
def test_normaliser_is_what_a_constant_gradient_has_moved(spec):
    distance, normaliser = moved(7, **spec)
    assert normaliser == pytest.approx(distance, rel=1e-12)


def test_of_adam_steps_are_counted():
    optimizer = OptimizerSpec("adam").build(torch.zeros(1), torch.ones(1), 0.1)
    for _ in range(3):
        optimizer.step()
    assert optimizer.normaliser == 3


@pytest.mark.parametrize(("local", "beside"), [({}, []), ({"optimizer": "adam", "momentum": 0}, []), ({}, ["fedprox"])])
def test_steps_of_heads_that_clients_keep_do_not_count(local, beside, tmp_path):
    """Of n steps of the body, the i-th gradient is applied (1 − 0.9ⁿ⁺¹⁻ⁱ) / (1 − 0.9) times."""
    changes = {"client": [{"fedrep": {"head_epochs": 5}}, *beside], "local": local, "record": {"traces": [1]}}
    federation = simulate(tiny(weighting=["fednova"], rounds={"total": 1}, **changes), tmp_path)
    round_ = Traced(tmp_path, 0, federation)
    steps = np.ceil(round_.sizes / 8)
    applied = steps if local else (steps - 9 * (1 - 0.9**steps)) * 10
    assert round_.note("fednova", "tau_eff") == pytest.approx(round_.p @ (steps if beside else applied))
    if not beside:
        assert round_.note("fednova", "normaliser") == pytest.approx(applied)


def test_equal_normalisers_are_fedavg():
    toy = cohort([2.5, 2.5, 2.5])
    torch.testing.assert_close(planned(FedNova(), toy), toy.reduce(toy.by_size()), rtol=0, atol=1e-12)
    near = cohort([2.5, 2.5, 2.6])
    assert not torch.allclose(planned(FedNova(), near), toy.reduce(toy.by_size()), atol=1e-3)


def test_one_client_is_taken_as_it_is():
    alone = ToyCohort(toy_server(), [[1.0, -2.0]], [3], stats={Normaliser(): [[7.0, 7.0]]})
    assert planned(FedNova(), alone).tolist() == pytest.approx([4, 2])


def test_twice_the_steps_in_the_same_direction_weigh_the_same_per_step():
    """Client 1 repeats its step: its direction stays, and only the common number of steps grows."""
    once, twice = [[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [0.0, 1.0]]
    a = ToyCohort(toy_server(), once, [1, 1], stats={Normaliser(): [[1.0, 1.0], [1.0, 1.0]]})
    b = ToyCohort(toy_server(), twice, [1, 1], stats={Normaliser(): [[2.0, 2.0], [1.0, 1.0]]})
    step_a, step_b = (planned(FedNova(), c) - c.server.value for c in (a, b))
    torch.testing.assert_close(step_b, 1.5 * step_a, rtol=1e-12, atol=0)


def test_with_a_proximal_term_steps_are_averaged():
    toy = cohort([1.0, 1.5, 2.0], [1.0, 2.0, 4.0])  # τ_eff = 2.75 where A is 1, 1.5, 2
    expected = [3 + 2.75 * 0.25, 4 + 2.75 * (0.25 / 1.5 - 2 * 0.5 / 2)]
    assert planned(FedNova(), toy).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_client_that_took_no_step_is_no_direction():
    toy = ToyCohort(toy_server(), [[1.0, 0.0], [0.0, 0.0]], [1, 1], stats={Normaliser(): [[2.0, 2.0], [0.0, 0.0]]})
    assert planned(FedNova(), toy).tolist() == pytest.approx([3 + 1.0 * 0.5 * 1 / 2, 4])


def test_base_weights_are_those_of_the_weighting_before():
    toy = ToyCohort(
        toy_server(labels=[[2, 2], [4, 0], [2, 6]]), sizes=[4, 4, 8], stats={Normaliser(): [[1, 1], [2, 2], [4, 4]]}
    )
    mixture = FedNova().plan(toy, toy.server, FedDisco(normalize_kl=False).plan(toy, toy.server, toy.by_size()))
    lam = torch.tensor([0.3941351, 0.0038585, 0.6020064]).double()
    expected = lam * (lam @ torch.tensor([1.0, 2, 4]).double()) / torch.tensor([1.0, 2, 4])
    torch.testing.assert_close(mixture.weights[:, 0], expected, rtol=0, atol=1e-6)


def test_after_a_selection_it_is_over_the_uploaders():
    """Layer 1 comes from clients 1, 2 and layer 2 from 2, 3: τ_eff is 1.5 and 10/3."""
    toy = ToyCohort(toy_server(TWO_LAYERS), stats={Normaliser(): [[1, 1], [2, 2], [4, 4]]})
    mixture = FedNova().plan(toy, toy.server, FedLDF(2).plan(toy, toy.server, toy.by_size()))
    expected = [3 + 1.5 * 0.5 * 1, 4 + 10 / 3 * (1 / 3 * 1 / 2 - 2 / 3 * 2 / 4)]
    assert toy.reduce(mixture).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("client", "numbers"), [([], 1), (["fedprox"], 2)])
def test_steps_are_sent_beside_a_proximal_term_only(client, numbers, tmp_path):
    simulate(tiny(client=client, weighting=["fednova"]), tmp_path)
    assert (table(tmp_path, "traffic")["up_scalars"] == 4 * numbers).all()


def test_momentum_must_start_anew():
    with pytest.raises(ConfigError, match="persist"):
        tiny(weighting=["fednova"], local={"state": "persist"})
    with pytest.raises(ConfigError, match="mfl"):
        tiny(weighting=["fednova"], local={"momentum": 0.0}, client=[{"sgdm": {"reading": "mfl"}}])
    tiny(weighting=["fednova"], local={"state": "persist", "momentum": 0.0})
