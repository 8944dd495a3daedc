"""MOON."""

import math

import pytest
import torch
import torch.nn.functional as F
from case import Traced
from conftest import simulate, tiny
from runs import local_run, perceptron

from raysim.config import ConfigError
from raysim.core.local_run import ClientState
from raysim.methods.moon import MOON


def latents(value, x):
    w = perceptron().layers.unflatten(value)
    for stage in ("fc1", "fc2"):
        x = torch.relu(x @ w[f"{stage}.linear.weight"].T + w[f"{stage}.linear.bias"])
    return x


def test_the_term_is_the_papers():
    mu, tau = 1.5, 0.4
    previous = perceptron(seed=7).value.clone()
    run = local_run([MOON(mu, tau)], state=ClientState(previous=previous))
    run.receive()
    run.params.add_(0.05)
    x, y = run.data.train
    z, z_g, z_p = (latents(value, x) for value in (run.params, run.received, previous))
    up, down = (torch.exp(F.cosine_similarity(z, other) / tau) for other in (z_g, z_p))
    expected = -mu * torch.log(up / (up + down)).mean()
    assert run.stack.penalties[0](run, x, y, z, torch.tensor(0.0)).item() == pytest.approx(expected.item())


def test_between_equal_models_there_is_no_pull():
    """z_prev = z_g, as in the first round: the term is ln 2 and has no gradient."""
    run = local_run([MOON(3.0)], state=ClientState(previous=local_run([]).received))
    run.receive()
    run.params.add_(0.05)
    x, y = run.data.train
    z = latents(run.params, x).requires_grad_()
    term = run.stack.penalties[0](run, x, y, z, torch.tensor(0.0))
    assert term.item() == pytest.approx(3.0 * math.log(2))
    assert torch.autograd.grad(term, z)[0].abs().max() < 1e-15


def test_a_newcomers_last_model_is_the_initial_one(tmp_path):
    """In the third round, too; who has been there has its own."""
    federation = simulate(tiny(client=["moon"], record={"traces": [1, 2, 3]}), tmp_path)
    initial = Traced(tmp_path, 0, federation).before
    clients = {(t, c.id): c for t in range(3) for c in Traced(tmp_path, t, federation).clients}
    seen = {}
    for (t, k), client in sorted(clients.items()):
        expected = seen.get(k, initial)
        assert all((client.before[f"previous.{n}"] == expected[n]).all() for n in initial), (t, k)
        seen[k] = client.model
    assert any(t == 2 and (t - 1, k) not in clients and (0, k) not in clients for t, k in clients)


def test_a_temperature_is_positive():
    with pytest.raises(ConfigError, match=r"moon\.tau: must be a number > 0"):
        tiny(client=[{"moon": {"tau": 0.0}}])
