"""pFedMe."""

import warnings

import pytest
import torch
from conftest import tiny
from quadratics import Quadratics, quadratics
from toy import vector

from raysim.config import ConfigError
from raysim.methods.pfedme import pFedMe

A, B = [[1.0], [4.0]], [[0.0], [1.0]]  # two clients, curvatures and optima
SOLVED = {"eta": 0.2, "inner_steps": 30}  # θ is at its optimum after every batch


def test_step_follows_the_gradient_of_the_moreau_envelope():
    """∇ of min_θ F(θ) + λ/2 ‖θ − w‖² at w is λ (w − θ*) = a λ/(a + λ) (w − b)."""
    lam, lr, w = 2.0, 0.1, 3.0
    federation = Quadratics([pFedMe(lam=lam, mu=0.0, **SOLVED)], A, B, lr=lr, start=[w])
    upload = federation.visit(federation.run(1))
    gradient = 4.0 * lam / (4.0 + lam) * (w - 1.0)
    torch.testing.assert_close(upload.value, vector([w - lr * gradient]), rtol=0, atol=1e-9)
    theta = federation.states[1].methods["pfedme"].theta
    torch.testing.assert_close(theta, vector([(4.0 * 1.0 + lam * w) / (4.0 + lam)]), rtol=0, atol=1e-9)


def test_mu_pulls_theta_to_zero():
    federation = Quadratics([pFedMe(lam=2.0, mu=0.5, **SOLVED)], A, B, start=[3.0])
    federation.visit(federation.run(1))
    assert federation.states[1].methods["pfedme"].theta.item() == pytest.approx((4.0 + 2.0 * 3.0) / (4.0 + 2.0 + 0.5))


@pytest.mark.parametrize(("beta", "rounds"), [(1.0, 15), (0.5, 40)])  # it closes in by 0.9 β of the way a round
def test_federation_ends_where_the_envelopes_balance(beta, rounds):
    """Σ c_k (w − b_k) = 0 with c_k = a_k λ/(a_k + λ), not at the mean of the optima, whatever the server's step."""
    lam = 2.0
    c = [a * lam / (a + lam) for a in (1.0, 4.0)]
    value = Quadratics([pFedMe(lam=lam, mu=0.0, beta=beta, **SOLVED)], A, B, lr=0.9, start=[5.0]).simulate(rounds)
    torch.testing.assert_close(value, vector([c[1] / sum(c)]), rtol=0, atol=1e-8)


def test_server_moves_by_beta():
    def moved(beta: float) -> float:
        return Quadratics([pFedMe(beta=beta)], A, B, start=[3.0]).simulate(1).item() - 3.0

    assert moved(0.25) == pytest.approx(0.25 * moved(1.0))
    assert moved(1.0) != 0


def test_theta_goes_on_from_batch_to_batch():
    """Two epochs of one batch each, by hand."""
    eta, lam, lr, w, theta = 0.1, 2.0, 0.05, 3.0, 3.0
    for _ in range(2):
        theta -= eta * (4.0 * (theta - 1.0) + lam * (theta - w))
        w -= lr * lam * (w - theta)
    federation = Quadratics([pFedMe(eta, lam, 1, 0.0)], A, B, lr=lr, steps=2, start=[3.0])
    assert federation.visit(federation.run(1)).value.item() == pytest.approx(w, abs=1e-12)
    assert federation.states[1].methods["pfedme"].theta.item() == pytest.approx(theta, abs=1e-12)


def test_without_inner_steps_or_spring_w_stays():
    """In a configuration no inner steps are refused."""
    for method in (pFedMe(inner_steps=0), pFedMe(lam=0.0)):
        assert Quadratics([method], A, B, start=[3.0]).simulate(2).item() == 3.0
    with pytest.raises(ConfigError, match=r"pfedme\.inner_steps: must be a whole number > 0"):
        tiny(client=[{"pfedme": {"inner_steps": 0}}])


def test_momentum_and_decay_of_local_training_are_not_used():
    def trained(**optimizer: float) -> torch.Tensor:
        return Quadratics([pFedMe()], A, B, steps=3, start=[3.0], **optimizer).simulate(2)

    assert torch.equal(trained(), trained(momentum=0.9, weight_decay=0.1))


@pytest.mark.parametrize(
    ("local", "client", "named"),
    [
        ({"optimizer": "adam", "momentum": 0.0}, [], "local.optimizer: sgd"),
        ({"optimizer": "adamw", "momentum": 0.0}, [], "local.optimizer: sgd"),
        ({"state": "persist"}, [], "local.state: reset"),
        ({"momentum": 0.0}, ["sgdm"], "the momentum that sgdm brings"),
    ],
)
def test_optimisers_that_its_steps_would_leave_out_are_refused(local, client, named):
    with pytest.raises(ConfigError, match=rf"client\.0\.pfedme: .*{named}"):
        tiny(client=["pfedme", *client], local={"lr": 0.05, **local})


def test_warns_where_w_overshoots_theta():
    with pytest.warns(UserWarning, match=r"local.lr times lam is 1.5"):
        tiny(client=["pfedme"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny(client=[{"pfedme": {"lam": 10.0}}])


@quadratics()
def test_tested_is_theta_or_the_local_model():
    for evaluate in ("theta", "w"):
        federation = Quadratics([pFedMe(evaluate=evaluate)], A, B, start=[3.0])
        newcomer, after = federation.run(1), federation.run(1)
        federation.stack.personal(newcomer)
        assert newcomer.params.item() == 3.0
        w = federation.visit(after).value.item()
        theta = federation.states[1].methods["pfedme"].theta.item()
        assert w != theta
        federation.stack.personal(after)
        assert after.params.item() == (theta if evaluate == "theta" else w)
        later = federation.run(1, [7.0])
        federation.stack.personal(later)
        assert later.params.item() == (theta if evaluate == "theta" else 7.0)
