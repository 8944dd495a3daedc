"""FedDF."""

import dataclasses

import pytest
import torch
from conftest import tiny
from toy import applied, noted
from toy_proxy import SAMPLES, ProxyCohort

from raysim.config import ConfigError
from raysim.core.server_model import ServerModel
from raysim.methods.feddf import FedDF

STEP = FedDF(epochs=2, batch_size=5)


def start(cohort: ProxyCohort) -> tuple[torch.Tensor, torch.Tensor]:
    """Distillation loss of the aggregate, and its gradient [P]."""
    rows = cohort.server.proxy.rows
    taught, server_model = cohort.predict(rows).mean(0).softmax(1), cohort.server_model()
    server_model.load(cohort.reduce(cohort.by_size()))
    objective = server_model.distillation(rows, taught, 1.0)
    return server_model.mean_loss(objective, SAMPLES), server_model.gradient(objective, torch.arange(SAMPLES)).clone()


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
    rows, server_model = cohort.server.proxy.rows, cohort.server_model()
    mean = cohort.predict(rows).mean(0)
    server_model.load(cohort.reduce(cohort.by_size()))
    teacher, student = (mean / 2).log_softmax(1), (server_model.logits(rows) / 2).log_softmax(1)
    expected = (teacher.exp() * (teacher - student)).sum(1).mean()
    assert torch.allclose(noted(cohort.server, "proxy_loss_before"), expected, rtol=0, atol=1e-12)


def test_the_rate_may_fall_to_zero():
    """Five samples a batch of twelve: six batches of two epochs, with Adam at lr (1 + cos(πi/6))/2; the like of torch's."""
    cohort = ProxyCohort()
    value = applied(dataclasses.replace(STEP, cosine=True), cohort)
    rows, server_model, model = cohort.server.proxy.rows, cohort.server_model(), cohort.flat.model
    taught, orders = cohort.predict(rows).mean(0).softmax(1), cohort.server.proxy_orders(STEP, 2, 5)
    server_model.load(cohort.reduce(cohort.by_size()))
    adam = torch.optim.Adam(model.parameters(), STEP.lr, STEP.betas)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=6)
    for batch in (b for order in orders for b in order.split(5)):
        adam.zero_grad(set_to_none=False)
        student = model(cohort.x[batch]).log_softmax(1)
        (taught[batch] * (taught[batch].log() - student)).sum(1).mean().backward()
        adam.step()
        cosine.step()
    torch.testing.assert_close(value, server_model.flat.value, rtol=0, atol=1e-9)


def looks(monkeypatch, accuracies: list[float]) -> list[list[int]]:
    """Validation finds these, one after the other; the rows that it was asked about."""
    asked, answers = [], iter(accuracies)
    monkeypatch.setattr(ServerModel, "quality", lambda self, rows: (asked.append(rows.tolist()), next(answers))[1])
    return asked


def test_it_stops_where_validation_gains_no_more(monkeypatch):
    """Ten of twelve samples are taught, two batches an epoch; the best model is the one after the second."""
    step = FedDF(epochs=50, batch_size=5, patience=4, validation=0.2)
    asked = looks(monkeypatch, [0.1, 0.2, 0.5, 0.5, 0.4])
    cohort = ProxyCohort()
    stopped = applied(step, cohort)
    assert len(asked) == 5  # at the start, and after four epochs
    assert asked[0] == asked[-1]
    assert len(asked[0]) == 2
    taught = {row for batch in cohort.server.scratch.batches for row in batch.tolist()}
    assert taught == set(range(12)) - set(asked[0])
    looks(monkeypatch, [0.0, 0.1, 0.2])
    assert torch.equal(applied(dataclasses.replace(step, epochs=2), cohort), stopped)
    looks(monkeypatch, [0.0, 0.1, 0.2, 0.3])
    assert not torch.equal(applied(dataclasses.replace(step, epochs=3), cohort), stopped)
    looks(monkeypatch, [1.0] * 3)
    assert torch.equal(applied(dataclasses.replace(step, patience=3), cohort), cohort.reduce(cohort.by_size()))


def test_validation_is_accuracy_in_eval_mode():
    cohort = ProxyCohort(norm=True)
    server_model = cohort.server_model()
    server_model.load(cohort.server.value)
    expected = cohort.flat.model.eval()(cohort.x[:5]).argmax(1) == cohort.y[:5]
    assert server_model.quality(cohort.server.proxy.rows[:5]) == expected.double().mean()


def test_patience_needs_validation_samples():
    for fields, why in (({"patience": 0}, "at least 1 batch"), ({"patience": 9, "validation": 1.0}, "a share in")):
        with pytest.raises(ConfigError, match=why):
            tiny(server=[{"feddf": fields}], data={"proxy": {"samples": 8}})
    with pytest.raises(ConfigError, match=r"proxy\.samples is 1"):
        tiny(server=[{"feddf": {"patience": 9}}], data={"proxy": {"samples": 1}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cosine", True),
        ("patience", 100),
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
