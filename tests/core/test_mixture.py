"""The plan as data: columns, uploads and the server's own share, by hand."""

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture

NET = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 1, bias=False))
LAYERS = LayerMap.of(NET)  # units "0.0" (4 parameter tensors, 3 buffers) and "1" (1 tensor)
T, TENSORS = 5, 8
FIRST, SECOND = [True] * 4 + [False] + [True] * 3, [False] * 4 + [True] + [False] * 3  # the tensors of each unit


def weights(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_everybody_sends_everything():
    mixture = Mixture.of(torch.tensor([10, 30, 60]), LAYERS)
    assert mixture.weights.equal(weights([0.1] * T, [0.3] * T, [0.6] * T))
    assert mixture.buffers.equal(weights([0.1] * 3, [0.3] * 3, [0.6] * 3))
    assert mixture.weights.dtype == torch.float64
    assert mixture.sent.all()
    assert not mixture.own.any()
    assert mixture.server_coefficient.tolist() == pytest.approx([1] * TENSORS)  # θ + Σ w Δ
    assert mixture.per_client().tolist() == pytest.approx([0.1, 0.3, 0.6])


def test_selection_renormalises_over_the_uploaders():
    """A layer nobody sent stays the server's, statistics with it. Weights of zero are no selection."""
    mixture = Mixture.of(torch.tensor([1.0, 3.0, 4.0]), LAYERS).select(torch.tensor([FIRST, FIRST, [False] * TENSORS]))
    assert mixture.base.equal(weights([0.25] * 4 + [0] + [0.25] * 3, [0.75] * 4 + [0] + [0.75] * 3, [0] * TENSORS))
    assert mixture.own.tolist() == [0, 0, 0, 0, 1]
    assert mixture.server_coefficient.tolist() == [1] * TENSORS
    assert not mixture.sent[2].any()
    again = mixture.select(torch.tensor([True, False, True]))  # what is not sent stays unsent
    assert again.sent.tolist() == [FIRST, [False] * TENSORS, [False] * TENSORS]
    zero = Mixture.of(torch.tensor([0.0, 1.0]), LAYERS)
    assert zero.sent.all()
    assert zero.support().weights.equal(torch.full((2, T), 0.5).double())
    assert mixture.support().base[:, 0].tolist() == [0.5, 0.5, 0]
    kept = mixture.keep(torch.tensor([False, True, True]))  # dropped by a robust rule: it sends, and nothing counts it
    assert kept.sent.equal(mixture.sent)
    assert kept.base[:, 0].tolist() == kept.support().base[:, 0].tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="differs between layers"):
        Mixture.of(torch.ones(2), LAYERS).select(torch.tensor([FIRST, SECOND])).per_client()


def test_selection_of_zero_weights_keeps_the_servers_layer():
    """Where the weights of all uploaders are zero there is nothing to average."""
    mixture = Mixture.of(torch.tensor([0.0, 1.0]), LAYERS).select(torch.tensor([FIRST, SECOND]))
    assert mixture.base.sum(0).tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert mixture.own.tolist() == [1, 1, 1, 1, 0]


def test_factors_scale_parameters_and_leave_statistics_convex():
    mixture = Mixture.of(torch.tensor([1.0, 1.0]), LAYERS).scaled(torch.tensor([[2.0], [-1.0]]))
    assert mixture.weights.equal(weights([1.0] * T, [-0.5] * T))
    assert mixture.buffers.equal(weights([0.5] * 3, [0.5] * 3))
    assert mixture.server_coefficient.tolist() == [0.5] * T + [1] * 3
    twice = mixture.scaled(torch.tensor(3.0), anchor=torch.full((T,), 0.25).double())
    assert twice.weights.equal(mixture.weights * 3)
    assert twice.own.tolist() == [0.25] * T
    assert twice.server_coefficient.tolist() == [1.75] * T + [1] * 3
    every = mixture.scaled(torch.full((2, TENSORS), 0.5))
    assert every.buffers.equal(weights([0.25] * 3, [0.25] * 3))


def test_what_is_no_average_says_so():
    mixture = Mixture.of(torch.tensor([1.0, 3.0]), LAYERS)
    assert mixture.reweighted(torch.tensor([1.0, 1.0])).per_client().tolist() == [0.5, 0.5]
    assert mixture.fault() is None
    for bad, fault in {
        (0.0, 0.0): "whose sum is 0",
        (-3.0, 1.0): "whose sum is -2",
        (-1.0, 3.0): "of which one is -1",
        (nan, 1.0): "that are not finite (NaN or Inf)",
        (inf, 1.0): "that are not finite (NaN or Inf)",
        (inf, -inf): "that are not finite (NaN or Inf)",
    }.items():
        assert mixture.reweighted(torch.tensor(bad)).fault() == fault
    signed = mixture.scaled(torch.tensor([[-5.0], [1.0]]).double())
    assert signed.weights.sum() < 0 and signed.fault() is None  # as L-DAWA may: it need not be convex
    assert mixture.scaled(torch.tensor(nan)).fault() == "that are not finite (NaN or Inf)"
    assert mixture.scaled(torch.tensor(1.0), anchor=torch.full((T,), inf).double()).fault()


def test_buffers_of_one_client_or_of_none():
    """`bn_stats: first` and `local`."""
    mixture = Mixture.of(torch.tensor([1.0, 3.0]), LAYERS)
    assert mixture.with_first_buffers().buffers.equal(weights([1] * 3, [0] * 3))
    assert mixture.with_first_buffers().weights.equal(mixture.weights)
    assert mixture.select(torch.tensor([False, True])).with_first_buffers().buffers.equal(weights([0] * 3, [1] * 3))
    assert Mixture.of(torch.tensor([0.0, 2.0]), LAYERS).with_first_buffers().buffers.equal(weights([0] * 3, [1] * 3))
    local = mixture.without_buffers()
    assert not local.buffers.any()
    assert not local.sent[:, T:].any()
    assert local.server_coefficient.tolist() == [1] * TENSORS


def test_best_by_layer():
    """Ties go to the lower id; what was not offered is never chosen."""
    mixture = Mixture.of(torch.ones(3), LAYERS)
    score = torch.tensor([[1.0, 5.0], [3.0, 5.0], [2.0, 4.0]])
    assert mixture.best(score, 1).tolist() == [[False, True], [True, False], [False, False]]
    assert mixture.best(score, 2).tolist() == [[False, True], [True, True], [True, False]]
    assert mixture.best(score, 3).all()
    offered = mixture.select(torch.tensor([SECOND, FIRST, FIRST]))
    assert offered.best(score, 1).tolist() == [[False, True], [True, False], [False, False]]
    assert offered.best(score, 3).tolist() == [[False, True], [True, False], [True, False]]
    many = Mixture.of(torch.ones(100), LAYERS).best(torch.zeros(100, 2), 3)
    assert many.nonzero().tolist() == [[client, layer] for client in range(3) for layer in range(2)]


def test_what_a_client_counts():
    """By its weight, if it has sent anything at all."""
    mixture = Mixture.of(torch.tensor([1.0, 3.0, 4.0]), LAYERS).select(torch.tensor([FIRST, SECOND, [False] * TENSORS]))
    assert mixture.shares.tolist() == [0.25, 0.75, 0.0]


@given(st.data())
def test_columns_are_convex(data: st.DataObject):
    """Whatever was selected: over its uploaders a tensor's weights are lam, scaled to sum to one."""
    K = data.draw(st.integers(1, 6))
    lam = torch.tensor(data.draw(st.lists(st.floats(0.01, 1e6), min_size=K, max_size=K))).double()
    sent = torch.tensor([data.draw(st.lists(st.booleans(), min_size=TENSORS, max_size=TENSORS)) for _ in range(K)])
    mixture = Mixture.of(lam, LAYERS).select(sent)
    for column, uploaders in zip(mixture.base.T, sent.T, strict=True):
        expected = torch.zeros(K).double()
        if uploaders.any():
            expected[uploaders] = lam[uploaders] / lam[uploaders].sum()
        torch.testing.assert_close(column, expected)
    assert mixture.own.equal((~sent[:, :T].any(0)).double())
    torch.testing.assert_close(mixture.server_coefficient, torch.ones(TENSORS).double())
