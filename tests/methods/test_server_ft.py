"""Server-FT, and what all methods that train the aggregate on the server share."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import simulate, tiny
from toy import applied, noted
from toy_proxy import SAMPLES, ProxyCohort

from raysim.config import ConfigError
from raysim.core.optim import SGD, OptimizerSpec
from raysim.methods.server_ft import ServerFT

PROXY = {"data": {"proxy": {"samples": 16}}}


def test_without_epochs_it_is_the_aggregate():
    cohort = ProxyCohort()
    mean = cohort.reduce(cohort.by_size())
    assert torch.equal(applied(ServerFT(epochs=0), cohort), mean)
    assert cohort.server.scratch.notes == []
    assert not torch.allclose(applied(ServerFT(epochs=1), cohort), mean, atol=1e-4)


def test_training_is_torchs():
    cohort = ProxyCohort(norm=True)
    server_model, start = cohort.server_model(), cohort.reduce(cohort.by_size())
    server_model.load(start)
    model = server_model.flat.model
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))
    losses = []
    for _ in range(3):
        adam.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(cohort.x), cohort.y)  # whatever the order of the samples
        loss.backward()
        adam.step()
        losses.append(loss.item())
    expected = server_model.flat.value.clone()
    actual, P = applied(ServerFT(epochs=3), cohort), cohort.layers.P
    for spec in cohort.layers.tensors:
        if spec.name in ("0.bias", "1.running_mean"):
            continue  # before BatchNorm a bias has a gradient of rounding alone, which moves it, and then the mean
        part = slice(spec.start, spec.stop)
        assert torch.allclose(actual[part], expected[part], rtol=0, atol=1e-9), spec.name
    assert not torch.allclose(actual[P:], start[P:], atol=1e-3)  # statistics follow the batches
    assert abs(noted(cohort.server, "proxy_loss_before") - losses[0]) < 1e-12
    assert noted(cohort.server, "proxy_loss_after") < losses[-1]


def test_official_optimizer_is_the_clients_and_keeps_its_momentum():
    cohort, step = ProxyCohort(), ServerFT(epochs=2, batch_size=SAMPLES, server_ft_official=True)
    actual = cohort.reduce(cohort.by_size())
    value, grad = actual.clone(), torch.zeros(cohort.layers.P, dtype=torch.float64)
    sgd = SGD(OptimizerSpec("sgd", momentum=0.9, weight_decay=5e-4), value, grad, 0.08)
    server_model = cohort.server_model()
    for _ in range(2):  # four steps in a row, from where the last ended: only the momentum ties the rounds
        for _ in range(2):
            server_model.load(value)
            grad.copy_(server_model.gradient(server_model.objective(cohort.server.proxy.rows), torch.arange(SAMPLES)))
            sgd.step()
        actual = step.apply(actual, cohort.by_size(), cohort, cohort.server)
        assert torch.allclose(actual, value, rtol=0, atol=1e-12)
    assert torch.allclose(cohort.server.memory[step], sgd.momentum, rtol=0, atol=1e-12)
    cohort.server.memory.clear()
    assert not torch.allclose(step.apply(actual, cohort.by_size(), cohort, cohort.server), value, atol=1e-3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("epochs", 3), ("lr", 1e-2), ("batch_size", 5), ("betas", (0.9, 0.999)), ("server_ft_official", True)],
)
def test_every_switch_changes_the_model(field, value):
    cohort, step = ProxyCohort(), ServerFT()
    plain = applied(step, cohort)
    assert torch.equal(applied(step, cohort), plain)
    assert not torch.allclose(applied(dataclasses.replace(step, **{field: value}), cohort), plain, atol=1e-5)


def test_momentum_survives_a_checkpoint(tmp_path):
    def config(total: int):
        return tiny(
            server=[{"server_ft": {"server_ft_official": True}}], **PROXY,
            rounds={"total": total, "checkpoint_every": 1, "evaluate_every": total},
        )  # fmt: skip

    whole = simulate(config(3), tmp_path / "whole")
    simulate(config(2), tmp_path / "parts")
    resumed = simulate(config(3), tmp_path / "parts", resume=True)
    assert resumed.sha256() == whole.sha256()


def test_refused():
    with pytest.raises(ConfigError, match=r"data\.proxy\.samples is 0"):
        tiny(server=["server_ft"])
