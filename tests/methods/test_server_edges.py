"""Where cohorts are degenerate, for switches of the methods that work on the server. See also properties/test_edges.py."""

import pytest
import torch
from conftest import simulate, table, tiny
from sabotage import Fails

from raysim.methods import CLIENTS

WEIGHTINGS: list = [
    "feddisco", {"ldawa": {"warmup": 0}}, "fednova", "ccn", {"fedldf": 1}, {"random_layer": 1}, {"hdfl": 1},
    {"hdfl": {"n": 1, "select": "by_loss"}},
]  # fmt: skip
STEPS: list = ["fedlws", "awd", "adadecay", "fedavgm", "fedadagrad", "fedadam", "fedyogi", {"fixed_shrink": 0.9}]
ALL = [
    *({"weighting": [w]} for w in WEIGHTINGS), *({"server": [s]} for s in STEPS), {"client": [{"fedadp": 0.5}]},
    {"server": [{"fedlws": {"lws_stats": "all", "shrink_buffers": True, "tau_stat": "rms"}}]},
]  # fmt: skip
ALONE = {"participation": 0.125, "total": 2}


@pytest.fixture(scope="module")
def one_client(tmp_path_factory) -> torch.Tensor:
    """The last client's model."""
    return simulate(tiny(rounds=ALONE), tmp_path_factory.mktemp("alone")).server.value


@pytest.mark.parametrize("changes", [c for c in ALL if c not in ({"weighting": [WEIGHTINGS[1]]}, *ALL[9:-1])], ids=str)
def test_one_client_is_taken_as_it_is(changes, one_client, tmp_path):
    """Its weight can only be 1, and it agrees with itself. (L-DAWA and decay shrink it, optimisers step otherwise.)"""
    value = simulate(tiny(**changes, rounds=ALONE), tmp_path).server.value
    torch.testing.assert_close(value, one_client, rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", [ALL[7], ALL[-1]], ids=str)
def test_a_client_that_returns_nan_is_left_out(changes, monkeypatch, tmp_path):
    monkeypatch.setitem(CLIENTS, "fails", Fails)
    fails = {"fails": {"how": "diverges", "client": 3, "t": 2}}  # clients 2, 3 and 4 are drawn in round 2
    federation = simulate(tiny(**{**changes, "client": [fails, *changes.get("client", [])]}), tmp_path)
    assert table(tmp_path, "rounds")["clients_failed"].tolist() == [0, 0, 1]
    assert federation.server.value.isfinite().all()
