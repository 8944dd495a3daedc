"""Random layer selection."""

import torch
from toy import TWO_LAYERS, ToyCohort, noted, toy_server

from raysim.methods.random_layer import RandomLayer


def drawn(n: int, t: int = 0, seed: int = 0) -> torch.Tensor:
    """Who sends what, bool [K, L], of six clients and two layers."""
    cohort = ToyCohort(toy_server(TWO_LAYERS, t=t, seed=seed), [[1.0, 1.0]] * 6, [1] * 6)
    sent = RandomLayer(n).plan(cohort, cohort.server, cohort.by_size()).sent
    assert torch.equal(noted(cohort.server, "uploads").bool(), sent)
    return sent


def test_n_of_k_for_every_layer_anew():
    draws = torch.stack([drawn(2, t) for t in range(400)])  # [T, K, L]
    assert (draws.sum(1) == 2).all()
    share = draws.double().mean(0)
    assert (share - 1 / 3).abs().max() < 0.1  # its standard deviation is 0.024
    alike = (draws[..., 0] == draws[..., 1]).all(1).double().mean()
    assert abs(alike - 1 / 15) < 0.06  # layers draw independently: 15 pairs of clients


def test_the_seed_decides():
    assert torch.equal(drawn(2), drawn(2))
    assert not all(torch.equal(drawn(2, t), drawn(2, t, seed=1)) for t in range(5))


def test_n_at_least_k_is_everybody():
    assert drawn(6).all()
    assert drawn(7).all()
    assert not drawn(5).all()
