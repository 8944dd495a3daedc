"""AWD on the server."""

import pytest
import torch
from toy import ToyCohort, applied, toy_server

from raysim.methods.awd import AWD


def test_golden_numbers():
    cohort = ToyCohort(toy_server())
    assert applied(AWD(0.1), cohort).tolist() == pytest.approx([3.2073093, 3.1930790], abs=1e-7)
    assert cohort.server.memory["awd"] == pytest.approx(0.0142302, abs=1e-7)


def test_strength_0_is_the_base_method():
    cohort = ToyCohort(toy_server())
    assert torch.equal(applied(AWD(0.0), cohort), cohort.reduce(cohort.by_size()))


def test_a_constant_ratio_is_reached():
    """λ̄ tends to s times the ratio of update and model, 0.1581 here, faster the less of it is kept."""
    for smoothing, after_two in ((0.1, 0.99), (0.5, 0.75)):
        server = toy_server()
        for _ in range(2):
            applied(AWD(0.2, smoothing), ToyCohort(server))
        assert server.memory["awd"] == pytest.approx(after_two * 0.2 * 0.7905694150 / 5)


def test_it_is_regularisation_alone():
    """The same as FedLWS's ŵ − (1 − γ) w with 1 − γ = λ̄, on a model that is not zero; a zero one has no ratio."""
    cohort = ToyCohort(toy_server())
    result, mean = applied(AWD(0.1), cohort), cohort.reduce(cohort.by_size())
    torch.testing.assert_close(result, mean - cohort.server.memory["awd"] * cohort.server.value, rtol=1e-12, atol=0)
    zero = ToyCohort(toy_server(value=[0.0, 0.0]))
    assert torch.equal(applied(AWD(0.1), zero), zero.reduce(zero.by_size()))
