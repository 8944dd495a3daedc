"""SGDM."""

import pytest
import torch
from conftest import tiny
from quadratics import Quadratics

from raysim.config import ConfigError
from raysim.methods.sgdm import SGDM

A, B = [[1.0], [4.0]], [[0.0], [1.0]]  # two clients, curvatures and optima


def by_hand(a: float, b: float, w: float, d: float, rho: float, steps: int, lr: float = 0.1) -> tuple[float, float]:
    """d ← ρ d + a (w − b), w ← w − η d."""
    for _ in range(steps):
        d = rho * d + a * (w - b)
        w -= lr * d
    return w, d


def test_mfl_averages_models_and_momenta_with_the_same_weights():
    federation = Quadratics([SGDM("mfl", 0.5)], A, B, steps=3, sizes=[1, 3], start=[3.0])
    w, d = 3.0, 0.0
    for _ in range(3):
        (w0, d0), (w1, d1) = (by_hand(a, b, w, d, 0.5, 3) for [a], [b] in zip(A, B, strict=True))
        w, d = 0.25 * w0 + 0.75 * w1, 0.25 * d0 + 0.75 * d1
        assert federation.round().item() == pytest.approx(w)
        assert federation.server.shared["sgdm"].item() == pytest.approx(d)


def test_local_starts_every_round_at_rest():
    federation, w = Quadratics([SGDM("local", 0.5)], A, B, steps=3, start=[3.0]), 3.0
    for _ in range(3):
        w = sum(by_hand(a, b, w, 0.0, 0.5, 3)[0] for [a], [b] in zip(A, B, strict=True)) / 2
        assert federation.round().item() == pytest.approx(w)
    assert federation.server.shared == {}


def test_local_is_the_optimisers_momentum(ran):
    ours = ran(client=[{"sgdm": {"rho": 0.9}}], local={"momentum": 0.0})
    assert torch.equal(ours.server.value, ran().server.value)
    mfl = ran(client=[{"sgdm": "mfl"}], local={"momentum": 0.0})
    assert not torch.equal(ours.server.value, mfl.server.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "leave out local.momentum, which is 0.9"),
        ({"local": {"optimizer": "adam", "momentum": 0.0}}, "local.optimizer is adam"),
        ({"local": {"momentum": 0.0, "state": "persist"}, "client": [{"sgdm": "mfl"}]}, "persist"),
        ({"local": {"momentum": 0.0}, "client": [{"sgdm": {"rho": 1.0}}]}, r"sgdm\.rho: .* < 1, but is 1"),
    ],
)
def test_contradictions_are_refused(changes, why):
    with pytest.raises(ConfigError, match=why):
        tiny(**{"client": ["sgdm"], **changes})
