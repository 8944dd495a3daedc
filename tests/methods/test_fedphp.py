"""FedPHP."""

import math

import pytest
import torch
from conftest import tiny
from quadratics import Quadratics, quadratics
from toy import vector

from raysim.config import ConfigError
from raysim.methods.fedphp import FedPHP, mmd

A, B = [[1.0], [4.0]], [[0.0], [1.0]]  # two clients, curvatures and optima


def test_mmd_of_like_samples_is_zero():
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert mmd(x, x.detach()).item() == pytest.approx(0.0, abs=1e-12)
    [gradient] = torch.autograd.grad(mmd(x, x.detach()), x)
    assert gradient.abs().max() < 1e-12


def test_mmd_of_two_points():
    """4 + 4 − 2 Σ exp(−d²/(2a)) with d² = 25."""
    expected = 8 - 2 * sum(math.exp(-25 / (2 * a)) for a in (10, 15, 20, 50))
    assert mmd(vector([[0.0, 0.0]]), vector([[3.0, 4.0]])).item() == pytest.approx(expected, abs=1e-12)


def test_mmd_of_samples_averages_over_all_pairs():
    x, y = vector([[0.0], [1.0]]), vector([[2.0], [5.0]])

    def k(a: float, b: float) -> float:
        return sum(math.exp(-((a - b) ** 2) / (2 * width)) for width in (10, 15, 20, 50))

    pairs = [(x[i].item(), x[j].item(), y[i].item(), y[j].item()) for i in range(2) for j in range(2)]
    expected = sum(k(a, b) + k(c, d) - 2 * k(a, d) for a, b, c, d in pairs) / 4
    assert mmd(x, y).item() == pytest.approx(expected, abs=1e-12)


def test_private_model_inherits():
    """q ← (1 − μ_t) w + μ_t q, μ_t = μ t/T with T = 10: after the first round it is w."""
    federation = Quadratics([FedPHP(mu=0.9, lam=0.0)], A, B, start=[3.0])
    q = 3.0
    for t in range(4):
        w = federation.visit(federation.run(1)).value.item()
        q = (1 - 0.9 * t / 10) * w + 0.9 * t / 10 * q
        assert federation.states[1].methods["fedphp"].q.item() == pytest.approx(q, abs=1e-12)
        assert (t == 0) == (q == w)
        federation.round([0])


def test_lam_weighs_the_cross_entropy_down():
    """Where latents cannot differ (the net's only stage is its head) the MMD is 0: a step of (1 − λ) the length."""

    def moved(lam: float) -> float:
        federation = Quadratics([FedPHP(lam=lam)], A, B, start=[3.0])
        return federation.visit(federation.run(1)).value.item() - 3.0

    assert moved(0.25) == pytest.approx(0.75 * moved(0.0))


@quadratics()
def test_tested_is_the_local_or_the_private_model():
    for evaluate in ("local", "private"):
        federation = Quadratics([FedPHP(mu=1.0, evaluate=evaluate)], A, B, start=[3.0])
        federation.t = 5
        after = federation.run(1)
        w = federation.visit(after).value.item()
        q = federation.states[1].methods["fedphp"].q.item()
        assert q == pytest.approx((w + 3.0) / 2)
        federation.stack.personal(after)
        assert after.params.item() == (w if evaluate == "local" else q)
        later = federation.run(1, [7.0])
        federation.stack.personal(later)
        assert later.params.item() == (7.0 if evaluate == "local" else q)


def test_mu_beyond_one_is_refused():
    with pytest.raises(ConfigError, match=r"fedphp\.mu: .* <= 1, but is 1\.5"):
        tiny(client=[{"fedphp": {"mu": 1.5}}])
