"""FedBE."""

import dataclasses

import pytest
import torch
from toy import ToyCohort, applied, noted, toy_server, vector
from toy_proxy import ProxyCohort

from raysim.methods import fedbe
from raysim.methods.fedbe import FedBE, directions
from raysim.methods.feddf import FedDF

STEP = FedBE(epochs=2, batch_size=5)


def test_golden_statistics():
    cohort = ToyCohort(toy_server())
    mean, variance, length = directions(cohort.uniform(), cohort, cohort.server)
    assert torch.allclose(mean, vector(1 / 3, 0), atol=1e-12)
    assert torch.allclose(variance, vector(2 / 9, 2 / 3), atol=1e-12)
    assert torch.allclose(length, vector(4 / 3, 4 / 3), atol=1e-12)


def test_a_client_that_did_not_move_has_no_direction():
    cohort = ToyCohort(toy_server(), updates=[[1.0, 0.0], [0.0, 0.0], [0.0, -2.0]])
    mean, variance, length = directions(cohort.uniform(), cohort, cohort.server)
    assert torch.allclose(mean, vector(1 / 3, -1 / 3))
    assert torch.allclose(variance, vector(1 / 3 - 1 / 9, 1 / 3 - 1 / 9))
    assert torch.allclose(length, vector(1, 1).double())
    still = ToyCohort(toy_server(), updates=[[0.0, 0.0]] * 3)
    mean, variance, length = directions(still.uniform(), still, still.server)
    assert (mean == 0).all()
    assert torch.allclose(variance, vector(1e-5, 1e-5))  # the least there is
    assert (length == 0).all()


def test_each_tensor_has_its_own_length():
    cohort = ProxyCohort()
    mean, variance, length = directions(cohort.uniform(), cohort, cohort.server)
    P = cohort.layers.P
    for spec in cohort.layers.tensors:
        part = slice(spec.start, spec.stop)
        norms = cohort.updates[:, part].norm(dim=1)
        units = cohort.updates[:, part] / norms[:, None]
        assert torch.allclose(length[part], norms.mean())
        assert torch.allclose(mean[part], units.mean(0))
        assert torch.allclose(variance[part], units.var(0, correction=0).clamp_min(1e-5))
    assert mean.shape == variance.shape == length.shape == (P,)


def test_without_noise_the_sample_is_the_mean_direction(monkeypatch):
    cohort = ProxyCohort(norm=True)
    target, P = cohort.reduce(cohort.by_size()), cohort.layers.P
    [noisy] = STEP.sampled(target, cohort.uniform(), cohort, cohort.server)
    monkeypatch.setattr(fedbe, "NOISE", 0.0)
    [still] = STEP.sampled(target, cohort.uniform(), cohort, cohort.server)
    mean, _, length = directions(cohort.uniform(), cohort, cohort.server)
    assert torch.allclose(still[:P], cohort.server.params + length * mean, atol=1e-12)
    assert not torch.allclose(noisy[:P], still[:P], atol=1e-3)
    assert torch.equal(noisy[P:], target[P:])  # statistics are not sampled


def test_samples_differ_within_a_round_and_between_rounds():
    cohort = ProxyCohort()
    target, law = cohort.reduce(cohort.by_size()), FedBE(samples=2)
    first, second = law.sampled(target, cohort.uniform(), cohort, cohort.server)
    assert not torch.equal(first, second)
    cohort.server.scratch.t = 1
    assert not torch.equal(law.sampled(target, cohort.uniform(), cohort, cohort.server)[0], first)


def test_dirichlet_samples_are_convex_mixtures():
    cohort = ProxyCohort(clients=2)
    target = cohort.reduce(cohort.by_size())
    samples = torch.stack(FedBE(mode="dirichlet", samples=400).sampled(target, cohort.uniform(), cohort, cohort.server))
    first, last = cohort.models
    share = (samples - last) @ (first - last) / (first - last).square().sum()  # of the first client
    assert torch.allclose(samples, share[:, None] * first + (1 - share[:, None]) * last, atol=1e-12)
    assert 0 <= share.min() < 0.02
    assert 0.98 < share.max() <= 1
    assert abs(share.mean() - 0.5) < 3 * (1 / 12 / 400) ** 0.5  # uniform on [0, 1]
    assert abs(share.var() - 1 / 12) < 0.01


def test_clients_their_average_and_samples_teach():
    cohort = ProxyCohort()
    applied(STEP, cohort)
    target, rows, server_model = cohort.reduce(cohort.by_size()), cohort.server.proxy.rows, cohort.server_model()
    models = [*cohort.models, target, *STEP.sampled(target, cohort.uniform(), cohort, cohort.server)]
    logits = []
    for model in models:
        server_model.load(model)
        logits.append(server_model.logits(rows))
    server_model.load(target)
    teacher, student = torch.stack(logits).mean(0).log_softmax(1), server_model.logits(rows).log_softmax(1)
    expected = (teacher.exp() * (teacher - student)).sum(1).mean()
    assert torch.allclose(noted(cohort.server, "proxy_loss_before"), expected, rtol=0, atol=1e-12)


def test_identical_clients_teach_what_they_know():
    cohort, alone = ProxyCohort(), FedBE(epochs=2, batch_size=5, samples=0)
    cohort.updates[:] = cohort.updates[0]
    applied(alone, cohort)
    assert abs(noted(cohort.server, "proxy_loss_before")) < 1e-15
    cohort.server.scratch.notes = []
    applied(STEP, cohort)  # a sample differs from them
    assert noted(cohort.server, "proxy_loss_before") > 1e-9


def test_without_epochs_it_is_the_aggregate():
    cohort = ProxyCohort()
    assert torch.equal(applied(FedBE(epochs=0), cohort), cohort.reduce(cohort.by_size()))


def test_swa_is_the_mean_over_epochs():
    cohort = ProxyCohort(norm=True)
    orders = torch.arange(12).repeat(3, 1)
    cohort.server.proxy_orders = lambda method, epochs, batch_size, part: orders[:epochs]
    iterates = [applied(FedBE(epochs=e, batch_size=5), cohort) for e in (1, 2, 3)]
    averaged = applied(FedBE(epochs=3, batch_size=5, swa=True), cohort)
    assert torch.allclose(averaged, torch.stack(iterates).mean(0), atol=1e-12)
    assert torch.allclose(applied(FedBE(epochs=1, batch_size=5, swa=True), cohort), iterates[0], atol=1e-15)
    assert not torch.allclose(averaged, iterates[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 3),
        ("lr", 1e-2),
        ("batch_size", 6),
        ("betas", (0.9, 0.999)),
        ("samples", 2),
        ("mode", "dirichlet"),
        ("temperature", 0.5),
        ("swa", True),
        ("server_ft_official", True),
    ],
)
def test_every_switch_changes_the_model(field, value):
    cohort = ProxyCohort()
    plain = applied(STEP, cohort)
    assert torch.equal(applied(STEP, cohort), plain)
    assert not torch.allclose(applied(dataclasses.replace(STEP, **{field: value}), cohort), plain, atol=1e-6)
    assert not torch.allclose(applied(FedDF(epochs=2, batch_size=5), cohort), plain, atol=1e-6)
