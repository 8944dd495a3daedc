"""AdaDecay on the server."""

from math import exp

import pytest
import torch
from torch import nn
from toy import ToyCohort, applied, toy_server

from raysim.core.layers import LayerMap
from raysim.methods.adadecay import AdaDecay

PAIRS = LayerMap.of(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)))


def decays(update, layers=PAIRS, alpha=4.0) -> list[float]:
    """θ_j of every parameter, from models that all moved by `update`."""
    cohort = ToyCohort(toy_server(layers, [1.0, 2.0, -3.0, 4.0]), [update] * 2, [1, 3])
    lost = cohort.reduce(cohort.by_size()) - applied(AdaDecay(0.1, alpha), cohort)
    return (lost / (0.1 * cohort.server.value)).tolist()


def test_by_hand():
    """Of two parameters the one that moved more is one standard deviation above the mean, the other below."""
    high, low = 2 / (1 + exp(-4)), 2 / (1 + exp(4))
    assert decays([0.5, -0.25, 0.0, 2.0]) == pytest.approx([high, low, low, high], abs=1e-9)
    assert high + low == pytest.approx(2)


def test_alpha_0_and_equal_movement_decay_plainly():
    assert decays([0.5, -0.25, 0.0, 2.0], alpha=0) == pytest.approx([1] * 4)
    assert decays([0.5, -0.5, 2.0, 2.0]) == pytest.approx([1] * 4)


def test_layers_are_standardised_alone():
    together = decays([0.5, -0.25, 0.0, 2.0], LayerMap.of(nn.Linear(4, 1, bias=False)))
    assert together[0] < 1 < together[3]


def test_strength_0_is_the_base_method():
    cohort = ToyCohort(toy_server())
    assert torch.equal(applied(AdaDecay(0.0), cohort), cohort.reduce(cohort.by_size()))
