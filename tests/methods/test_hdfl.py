"""HDFL's client dropout."""

import numpy as np
import pytest
import torch
from conftest import simulate, table, tiny
from toy import ToyCohort, noted, planned, toy_server

from raysim.methods.hdfl import HDFL, LastLoss


def test_size_weights_among_those_kept():
    cohort = ToyCohort(toy_server(), stats={LastLoss(): [0.5, 3.0, 2.0]})
    result = planned(HDFL(2, "by_loss"), cohort)  # clients 2 and 3 have the greater losses, sizes 1 and 2
    assert result.tolist() == pytest.approx([3.0, 4.0 + 1 / 3 - 4 / 3])
    assert noted(cohort.server, "uploads").tolist() == [0, 1, 1]


def test_random_draws_are_uniform():
    draws = torch.stack(
        [HDFL(2).plan(c, c.server, c.by_size()).sent[:, 0] for c in (ToyCohort(toy_server(t=t)) for t in range(300))]
    )
    assert (draws.sum(1) == 2).all()
    assert (draws.double().mean(0) - 2 / 3).abs().max() < 0.12  # its standard deviation is 0.027


def test_n_at_least_k_is_fedavg():
    for n in (3, 4):
        cohort = ToyCohort(toy_server())
        assert torch.equal(planned(HDFL(n), cohort), cohort.reduce(cohort.by_size()))


def test_the_others_send_nothing(tmp_path):
    federation = simulate(tiny(weighting=[{"hdfl": {"n": 1, "select": "by_loss"}}]), tmp_path)
    traffic, loss = table(tmp_path, "traffic"), table(tmp_path, "clients")["loss_last"].reshape(3, 3)  # [rounds, K]
    whole = np.arange(3) == loss.argmax(1)[:, None]
    assert (traffic["up_params"].reshape(3, 3) == whole * federation.server.layers.P * 4).all()
    assert (traffic["up_scalars"] == 4).all()  # every client reports its loss
    assert (traffic["down_masks"] == 1).all()  # and is told whether to send


def test_weights_are_those_of_the_clients_that_send(tmp_path):
    simulate(tiny(weighting=[{"hdfl": 2}, "ccn"]), tmp_path)
    weight, notes = table(tmp_path, "clients")["weight"].reshape(3, 3), table(tmp_path, "notes")
    sent = notes["value"][notes["name"] == "uploads"].reshape(3, 3) == 1
    assert (~np.isnan(weight) == sent).all()
    np.testing.assert_allclose(np.nansum(weight, 1), 1)
