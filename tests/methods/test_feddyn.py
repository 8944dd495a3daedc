"""FedDyn."""

import pytest
import torch
from conftest import tiny
from quadratics import Cohort, Quadratics, quadratics
from toy import UPDATES, toy_server, vector

from raysim.config import ConfigError
from raysim.core.local_run import ClientState
from raysim.methods.fedavg import FedAvg
from raysim.methods.feddyn import AddDrift, FedDyn
from raysim.methods.fedprox import FedProx

A, B = [[1.0], [4.0]], [[0.0], [1.0]]  # two clients, curvatures and optima
OPTIMUM = 4 / 5  # Σ a b / Σ a


def test_reaches_the_optimum_where_fedavg_does_not():
    assert Quadratics([FedDyn(1.0)], A, B, lr=0.2, steps=20).simulate(40).item() == pytest.approx(OPTIMUM, abs=1e-6)
    assert abs(Quadratics([], A, B, lr=0.2, steps=20).simulate(40).item() - OPTIMUM) > 0.2


def test_golden_numbers():
    """First round of the toy problem: α = 0.1, N = K = 3."""
    federation = Quadratics([FedDyn(0.1)], torch.ones(3, 2).tolist(), torch.zeros(3, 2).tolist(), start=[3.0, 4.0])
    for k, update in enumerate(UPDATES):
        run = federation.run(k)
        run.params.copy_(vector([3.0, 4.0]) + vector(update))
        with quadratics():
            federation.stack.finishers[0](run, None)
        assert run.state(federation.stack.methods[0]).g.tolist() == pytest.approx([-0.1 * u for u in update])
    server = toy_server()
    step, cohort = AddDrift(), Cohort(server)
    with quadratics():
        step.prepare(server)
    mixture = cohort.uniform()
    value = step.apply(cohort.reduce(mixture), mixture, cohort, server)
    h = -0.1 * server.memory["feddyn"]
    assert h.tolist() == pytest.approx([-1 / 30, 1 / 30], abs=1e-15)
    assert value.tolist() == pytest.approx([3.6666667, 3.3333333], abs=5e-8)


def test_the_clients_terms_add_up_to_n_h():
    """Whoever takes part: Σ_k g_k = N h, and h = −α h̃. A client without samples is none of the N."""
    alpha = 0.3
    a, b = [[1.0], [2.0], [3.0], [4.0], [9.0]], [[0.0], [1.0], [-1.0], [2.0], [3.0]]
    federation = Quadratics([FedDyn(alpha)], a, b, steps=3, sizes=[1, 1, 1, 1, 0])
    federation.simulate(5, cohorts=[(0, 1), (1, 3), (0,)])
    terms = [s.methods["feddyn"].g if s.methods else vector([0.0]) for s in federation.states]
    assert federation.states[2] == ClientState()  # who never took part keeps nothing
    assert sum(terms).item() == pytest.approx(-4 * alpha * federation.server.memory["feddyn"].item())
    assert abs(sum(terms).item()) > 0.1


def test_first_round_is_fedprox_then_the_drift():
    """g = h = 0: clients as FedProx with μ = α; the server adds (1/N) Σ Δ to the mean."""
    dynamic, proximal = (Quadratics([m], A, B, steps=4, start=[3.0]) for m in (FedDyn(0.7), FedProx(0.7)))
    models = [torch.cat([f.visit(f.run(k)).value.clone() for k in (0, 1)]) for f in (dynamic, proximal)]
    assert torch.equal(*models)
    federation = Quadratics([FedDyn(0.7)], [*A, [2.0]], [*B, [0.0]], steps=4, start=[3.0])
    assert federation.round([0, 1]).item() == pytest.approx((models[0].mean() + (models[0] - 3.0).sum() / 3).item())


def test_other_weights_change_the_mean_alone():
    """h̃ is uniform even so: w = Σ p w_k + (1/N) Σ Δ_k."""
    federation = Quadratics([FedDyn(0.7)], A, B, sizes=[1, 3], weighting=[FedAvg("size")], start=[3.0])
    models = [federation.visit(federation.run(k)).value.item() for k in (0, 1)]
    federation.states = [ClientState(), ClientState()]
    expected = 0.25 * models[0] + 0.75 * models[1] + (sum(models) - 6.0) / 2
    assert federation.round().item() == pytest.approx(expected)


@quadratics()
def test_unsquared_pulls_with_a_constant_force():
    federation = Quadratics([FedDyn(0.8, unsquared=True)], [[0.0, 0.0]], [[0.0, 0.0]], start=[1.0, 1.0])
    run = federation.run(0)
    run.receive()
    run.gradient(*run.data.train)
    assert run.grad.tolist() == [0.0, 0.0]  # undefined at the start: none
    run.params.add_(vector([3.0, -4.0]))
    run.gradient(*run.data.train)
    assert run.grad.tolist() == pytest.approx([0.4 * 0.6, -0.4 * 0.8])


def test_adaptive_alpha_is_over_the_relative_size():
    """Sizes 1 and 3 are 0.5 and 1.5 of the mean: α_k = 2α and α/1.5, in the penalty and in g_k."""
    for k, alpha in enumerate([0.2, 0.1 / 1.5]):
        ours, same = (
            Quadratics([method], A, B, sizes=[1, 3], steps=3, start=[3.0])
            for method in (FedDyn(0.1, adaptive_alpha=True), FedDyn(alpha))
        )
        for federation in (ours, same):
            federation.visit(federation.run(k))
        assert ours.states[k].methods["feddyn"].g.item() == pytest.approx(same.states[k].methods["feddyn"].g.item())


def test_nothing_moves_where_no_client_moves():
    assert Quadratics([FedDyn(0.5)], A, [[2.0], [2.0]], start=[2.0], steps=3).simulate(3).item() == 2.0


def test_a_negative_alpha_is_refused():
    with pytest.raises(ConfigError, match=r"feddyn\.alpha: must be a number >= 0"):
        tiny(client=[{"feddyn": {"alpha": -1.0}}])
