"""Fixed weight shrinking."""

import pytest
import torch
from conftest import tiny
from torch import nn
from toy import ToyCohort, applied, noted, toy_server

from raysim.config import ConfigError
from raysim.core.layers import LayerMap
from raysim.federation import prepare
from raysim.methods.fixed_shrink import FixedShrink

FIVE = LayerMap.of(nn.Sequential(*(nn.Linear(1, 1) for _ in range(5))))


def test_the_layer_wise_form_runs_from_1_to_096():
    cohort = ToyCohort(toy_server(FIVE, [1.0] * 10), [[1.0] * 10] * 3)
    result = applied(FixedShrink(1.0, decrement=0.01), cohort)
    assert result.tolist() == pytest.approx([2 * g for g in (1, 1, 0.99, 0.99, 0.98, 0.98, 0.97, 0.97, 0.96, 0.96)])
    assert noted(cohort.server, "gamma").tolist() == pytest.approx([1, 0.99, 0.98, 0.97, 0.96])


def test_one_gamma():
    cohort = ToyCohort(toy_server())
    assert torch.equal(applied(FixedShrink(1.0), cohort), cohort.reduce(cohort.by_size()))
    assert applied(FixedShrink(0.9), cohort).tolist() == pytest.approx([0.9 * 3.25] * 2)


def test_gamma_is_positive_in_every_layer():
    """The tiny network has three layers."""
    prepare(tiny(server=[{"fixed_shrink": {"gamma": 0.5, "decrement": 0.24}}]))
    with pytest.raises(ConfigError, match=r"server\.0\.fixed_shrink: gamma of the last of 3 layers would be -0\.02"):
        prepare(tiny(server=[{"fixed_shrink": {"gamma": 0.5, "decrement": 0.26}}]))
