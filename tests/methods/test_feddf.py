"""FedDF."""

import dataclasses

import pytest
import torch
from toy import applied, noted
from toy_proxy import SAMPLES, ProxyCohort

from raysim.methods.feddf import FedDF

STEP = FedDF(epochs=2, batch_size=5)


def start(cohort: ProxyCohort) -> tuple[torch.Tensor, torch.Tensor]:
    """Distillation loss of the aggregate, and its gradient [P]."""
    rows = cohort.server.proxy.rows
    taught, bench = cohort.predict(rows).mean(0).softmax(1), cohort.bench()
    bench.load(cohort.reduce(cohort.by_size()))
    objective = bench.distillation(rows, taught, 1.0)
    return bench.mean_loss(objective, SAMPLES), bench.gradient(objective, torch.arange(SAMPLES)).clone()


@pytest.mark.parametrize("clients", [1, 3])
def test_identical_teachers_have_nothing_to_teach(clients):
    cohort = ProxyCohort(clients)
    cohort.updates[:] = cohort.updates[0]
    loss, grad = start(cohort)
    assert abs(loss) < 1e-15
    assert grad.abs().max() < 1e-15
    applied(STEP, cohort)
    assert abs(noted(cohort.server, "proxy_loss_before")) < 1e-15


def test_different_teachers_have():
    cohort = ProxyCohort()
    loss, grad = start(cohort)
    assert loss > 1e-3
    assert grad.abs().max() > 1e-3
    applied(FedDF(epochs=20), cohort)
    assert noted(cohort.server, "proxy_loss_before") == loss
    assert noted(cohort.server, "proxy_loss_after") < loss


def test_teachers_are_not_weighted_and_labels_not_used():
    cohort = ProxyCohort(sizes=[1, 1, 1])
    plain = applied(STEP, cohort)
    cohort.y = 2 - cohort.y
    assert torch.equal(applied(STEP, cohort), plain)
    mean = cohort.uniform()
    cohort.sizes = torch.tensor([9, 1, 1])
    assert torch.equal(applied(STEP, cohort, mean), plain)
    cohort.updates[0] = -cohort.updates[0]
    assert not torch.allclose(applied(STEP, cohort, mean), plain, atol=1e-4)


def test_without_epochs_it_is_the_aggregate():
    cohort = ProxyCohort()
    assert torch.equal(applied(FedDF(epochs=0), cohort), cohort.reduce(cohort.by_size()))


def test_temperature_softens_both_sides():
    cohort = ProxyCohort()
    applied(dataclasses.replace(STEP, temperature=2.0), cohort)
    rows, bench = cohort.server.proxy.rows, cohort.bench()
    mean = cohort.predict(rows).mean(0)
    bench.load(cohort.reduce(cohort.by_size()))
    teacher, student = (mean / 2).log_softmax(1), (bench.logits(rows) / 2).log_softmax(1)
    expected = (teacher.exp() * (teacher - student)).sum(1).mean()
    assert torch.allclose(noted(cohort.server, "proxy_loss_before"), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 3),
        ("lr", 1e-2),
        ("batch_size", 6),
        ("betas", (0.9, 0.999)),
        ("temperature", 2.0),
        ("server_ft_official", True),
    ],
)
def test_every_switch_changes_the_model(field, value):
    cohort = ProxyCohort()
    plain = applied(STEP, cohort)
    assert torch.equal(applied(STEP, cohort), plain)
    assert not torch.allclose(applied(dataclasses.replace(STEP, **{field: value}), cohort), plain, atol=1e-5)
