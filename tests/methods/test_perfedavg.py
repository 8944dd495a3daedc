"""Per-FedAvg."""

import pytest
import torch
from conftest import simulate, tiny
from runs import batches, local_run, loss, slope

from raysim.federation.round import evaluate_personal
from raysim.methods.perfedavg import PerFedAvg


def plain_steps(run, halves):
    """θ after SGD on the given rows of the client's samples."""
    theta = run.received.clone().requires_grad_()
    for rows in halves:
        x, y = run.data.train
        (grad,) = torch.autograd.grad(loss(run, theta, x[rows], y[rows]), theta)
        theta = (theta - run.lr * grad).detach().requires_grad_()
    return theta.detach()


def test_without_an_inner_step_it_is_sgd_on_second_halves():
    run = local_run([PerFedAvg(alpha=0.0)])
    run.receive()
    run.fit()
    rows = batches(run, "batches")
    assert [len(r) for r in rows] == [16, 8]  # 2B, and what is left of 24
    assert torch.allclose(run.params, plain_steps(run, [rows[0][8:], rows[1][4:]]), atol=1e-14)
    assert not torch.allclose(run.params, plain_steps(run, [rows[0][:8], rows[1][:4]]), atol=1e-4)


def test_a_step_follows_the_slope_at_the_adapted_model():
    """Finite differences of the second half's loss at θ' = θ − α ∇L(θ; first half)."""
    alpha, beta = 0.3, 0.05
    run = local_run([PerFedAvg(alpha, beta)], samples=16)
    run.receive()
    run.fit()
    x, y = run.data.train
    [rows] = batches(run, "batches")
    first, second = rows[:8], rows[8:]
    theta = run.received
    adapted = theta - alpha * slope(lambda w: loss(run, w, x[first], y[first]), theta)
    expected = theta - beta * slope(lambda w: loss(run, w, x[second], y[second]), adapted)
    assert torch.allclose(run.params, expected, atol=1e-9)


def test_the_rates_default_to_the_rounds():
    def trained(method):
        run = local_run([method], lr=0.2)
        run.receive()
        run.fit()
        return run.params.clone()

    assert torch.equal(trained(PerFedAvg()), trained(PerFedAvg(0.2, 0.2)))
    assert not torch.equal(trained(PerFedAvg()), trained(PerFedAvg(0.1, 0.2)))
    assert torch.equal(trained(PerFedAvg(beta=0.0)), local_run([]).received)


def test_a_personal_model_is_one_step_on_one_batch():
    run = local_run([PerFedAvg(alpha=0.3)])
    run.stack.personal(run)
    x, y = run.data.train
    [rows] = batches(run, "personal")
    assert len(rows) == 8
    expected = run.received - 0.3 * slope(lambda w: loss(run, w, x[rows], y[rows]), run.received)
    assert torch.allclose(run.params, expected, atol=1e-9)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_batch_that_cannot_be_halved(samples):
    run = local_run([PerFedAvg()], samples=samples)
    run.receive()
    run.fit()
    assert run.steps == 1
    assert run.params.isfinite().all()
    assert not torch.equal(run.params, run.received)


def test_the_personal_step_shows_in_the_scores(tmp_path):
    def losses(alpha):
        changes = {"data": {"client_test_frac": 0.25}, "evaluate": {"personal": "after_init"}, "rounds": {"total": 1}}
        federation = simulate(
            tiny(client=[{"perfedavg": {"alpha": alpha, "beta": 0.0}}], **changes), tmp_path / str(alpha)
        )
        return [score.loss for score in evaluate_personal(federation.run, 1)[0].values()]

    assert losses(0.05) != losses(0.0)
