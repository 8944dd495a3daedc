"""FedProx."""

import pytest
import torch
from conftest import simulate, tiny
from quadratics import Quadratics, quadratics

from raysim.config import ConfigError
from raysim.methods.fedprox import FedProx

A, B = [[1.0], [4.0]], [[0.0], [1.0]]  # two clients, curvatures and optima


def test_ends_at_its_closed_form():
    """Clients that train to the end stop at (a b + μ w_g)/(a + μ); the federation at Σ s b / Σ s, s = a/(a + μ)."""
    federation = Quadratics([FedProx(2.0)], A, B, lr=0.2, steps=30, start=[4.0])
    assert federation.visit(federation.run(1)).value.item() == pytest.approx((4 * 1 + 2 * 4.0) / (4 + 2))
    end = (4 / 6) / (1 / 3 + 4 / 6)
    assert Quadratics([FedProx(2.0)], A, B, lr=0.2, steps=30, start=[end]).simulate(1).item() == pytest.approx(end)
    fedavg = Quadratics([FedProx(0.0)], A, B, lr=0.2, steps=100, start=[end]).simulate(1)
    assert fedavg.item() == pytest.approx(0.5)  # the mean of the clients' optima


@quadratics()
def test_one_step_of_unit_strength_starts_from_the_download():
    """μη = 1: w − η(∇F(w) + μ(w − w_g)) = w_g − η∇F(w), wherever w is."""
    run = Quadratics([FedProx(5.0)], A, B, lr=0.2).run(1, [3.0])
    run.params.fill_(-7.0)
    run.fit()
    assert run.params.item() == pytest.approx(3.0 - 0.2 * 4 * (-7.0 - 1.0))


def test_infinitely_strong_it_stays():
    assert Quadratics([FedProx(1e8)], A, B, lr=1e-8, steps=50).simulate(3).abs().item() < 1e-6


def test_official_sgd_has_no_momentum_and_no_decay(tmp_path):
    def value(**changes):
        return simulate(tiny(**changes), tmp_path / str(changes)[:80]).server.value

    official = value(client=[{"fedprox": {"mu": 0.1, "official_sgd": True}}])
    assert torch.equal(official, value(client=[{"fedprox": 0.1}], local={"momentum": 0.0, "weight_decay": 0.0}))
    assert not torch.equal(official, value(client=[{"fedprox": 0.1}]))


def test_fednova_is_told_of_the_spring():
    run = Quadratics([FedProx(0.3)], A, B).run(0)
    FedProx(0.3).begin(run)
    assert run.optimizer.proximal == 0.3


def test_a_negative_mu_is_refused():
    with pytest.raises(ConfigError, match=r"fedprox\.mu: must be a number >= 0, but is -1"):
        tiny(client=[{"fedprox": {"mu": -1.0}}])
