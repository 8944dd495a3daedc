"""APPLE."""

import math
from itertools import product

import pytest
import torch
from conftest import simulate, table, tiny
from quadratics import Quadratics, quadratics
from torch import nn
from toy import ToyCohort, toy_server, vector

from raysim.config import ConfigError
from raysim.core.layers import LayerMap
from raysim.core.local_run import ClientState
from raysim.core.pairs import entries
from raysim.methods.apple import APPLE, KnowRelations, Relations, mean_of_means

ALL = {"participation": 1.0}
A, B = [[1.0, 2.0]] * 3, [[0.5, -1.0]] * 3  # P = 2
CORES = [[1.0, 2.0], [-1.0, 0.5], [3.0, -2.0]]
SIZES = [1, 1, 2]
PI = [0.5, 0.3, -0.2]


def loss(w: list[float]) -> float:
    return sum(0.5 * a * (x - b) ** 2 for a, x, b in zip(A[0], w, B[0], strict=True))


def mix(pi: list[float], cores: list[list[float]]) -> list[float]:
    return [sum(p * core[j] for p, core in zip(pi, cores, strict=True)) for j in range(2)]


def at_client_0(method: APPLE, pi: list[float] | None = PI, t: int = 0, lr: float = 0.1, steps: int = 1):
    """Client 0 of three, after one visit with all cores."""
    federation = Quadratics([method], A, B, sizes=SIZES, lr=lr, steps=steps)
    federation.t = t
    federation.states[0].previous = vector(CORES[0])
    if pi is not None:
        federation.states[0].methods["apple"] = Relations(vector(pi))
    run = federation.run(0)
    run.peers = {j: vector(core) for j, core in enumerate(CORES)}
    return run, federation.visit(run), federation


def test_relations_follow_the_gradient():
    """π_ij moves by −η₂ (∂L/∂π_ij + λ_t μ (π_ij − p_j)): central differences; λ_0 = 1."""
    eta2, mu, h = 0.02, 0.7, 1e-6
    run, _, _ = at_client_0(APPLE(eta2, mu))
    for j, p in enumerate((0.25, 0.25, 0.5)):
        up, down = ([x + sign * h * (i == j) for i, x in enumerate(PI)] for sign in (1, -1))
        slope = (loss(mix(up, CORES)) - loss(mix(down, CORES))) / (2 * h)
        expected = PI[j] - eta2 * (slope + mu * (PI[j] - p))
        assert run.state(APPLE()).pi[j].item() == pytest.approx(expected, abs=1e-8)


def test_core_follows_the_gradient_and_is_sent():
    """m_i moves by −η ∂L/∂m_i; the personal model is put together from what has moved."""
    h, lr = 1e-6, 0.1
    run, upload, _ = at_client_0(APPLE(), lr=lr)
    core = []
    for j in range(2):
        up, down = ([[c + sign * h * (i == j) for i, c in enumerate(CORES[0])], *CORES[1:]] for sign in (1, -1))
        core.append(CORES[0][j] - lr * (loss(mix(PI, up)) - loss(mix(PI, down))) / (2 * h))
    assert upload.value.tolist() == pytest.approx(core, abs=1e-8)
    pi = run.state(APPLE()).pi.tolist()
    assert run.params.tolist() == pytest.approx(mix(pi, [core, *CORES[1:]]), abs=1e-8)
    assert upload.scalars["apple"].to_dense().tolist() == pi


def test_uniform_relations_move_a_core_by_its_share():
    """η₂ = 0, one step: by η/N · G."""
    run, upload, _ = at_client_0(APPLE(eta2=0.0), pi=None)
    G = [a * (x - b) for a, x, b in zip(A[0], mix([1 / 3] * 3, CORES), B[0], strict=True)]
    assert upload.value.tolist() == pytest.approx([c - 0.1 / 3 * g for c, g in zip(CORES[0], G, strict=True)])
    assert run.state(APPLE()).pi.tolist() == pytest.approx([1 / 3] * 3)


def test_the_pull_to_the_shares_ends():
    """λ_t = (cos(πt/R) + 1)/2, or 0.01^(t/R), with R = int(0.5 · 10)."""
    for t, schedule in product(range(8), ("cos", "epsilon")):
        methods = (APPLE(0.02, mu, L=0.5, schedule=schedule, epsilon=0.01) for mu in (0.0, 1.0))
        near, far = (at_client_0(method, t=t)[0].state(APPLE()).pi for method in methods)
        falling = (math.cos(math.pi * t / 5) + 1) / 2 if schedule == "cos" else 0.01 ** (t / 5)
        expected = falling if t < 5 else 0.0
        shares = vector([0.25, 0.25, 0.5])
        torch.testing.assert_close(near - far, 0.02 * expected * (vector(PI) - shares), rtol=0, atol=1e-12)


def test_official_code():
    """η N; the mean over tensors (here one) of the mean of G ⊙ m_j; the personal model is sent."""
    eta2, lr = 0.02, 0.1
    run, upload, _ = at_client_0(APPLE(eta2, mu=0.0, official=True), lr=lr)
    w = mix(PI, CORES)
    G = [a * (x - b) for a, x, b in zip(A[0], w, B[0], strict=True)]
    pi = [p - eta2 * sum(g * c for g, c in zip(G, core, strict=True)) / 2 for p, core in zip(PI, CORES, strict=True)]
    core = [c - 3 * lr * PI[0] * g for c, g in zip(CORES[0], G, strict=True)]
    assert run.state(APPLE()).pi.tolist() == pytest.approx(pi, abs=1e-12)
    assert upload.value.tolist() == pytest.approx(mix(pi, [core, *CORES[1:]]), abs=1e-12)


def test_official_mean_is_over_tensors():
    layers = LayerMap.of(nn.Sequential(nn.Linear(2, 3)))  # six weights and three biases
    weights, bias = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0], [1.0, 0.0, 5.0]
    assert (mean_of_means(layers) * vector([*weights, *bias])).sum().item() == pytest.approx((4.0 + 2.0) / 2)


def test_cores_not_sent_count_as_zero():
    federation = Quadratics([APPLE(eta2=0.1, models=2)], A, B)
    federation.states[0] = ClientState({"apple": Relations(vector(PI))}, vector(CORES[0]))
    run = federation.run(0)
    run.peers = {0: vector(CORES[0]), 2: vector(CORES[2])}
    federation.stack.start(run)
    assert run.params.tolist() == pytest.approx(mix([PI[0], PI[2]], [CORES[0], CORES[2]]))
    federation.visit(run)
    assert run.state(APPLE()).pi[1].item() == PI[1]


def test_sends_the_own_core_and_those_of_the_strongest_relations():
    server = toy_server(labels=[[1], [1], [2], [0]])  # client 3 has no samples
    step = KnowRelations()
    step.prepare(server)
    assert server.shared["apple"].tolist() == [0.25, 0.25, 0.5, 0.0]
    assert APPLE(models=2).downlink((0, 1, 2), None, server).peers == ((0, 1), (0, 1), (0, 2))  # nothing known yet
    relations = vector([[0.1, 0.2, -0.9, 5.0], [0.0, 0.1, 0.2, 0.0], [-1.0, 0.5, 0.0, 0.0]])
    everyone = torch.ones(3, 4).nonzero().T
    cohort = ToyCohort(server, scalars={"apple": entries(everyone, relations.flatten(), [3, 4])})
    step.apply(server.value, cohort.by_size(), cohort, server)
    assert APPLE(models=2).downlink((0, 1, 2), None, server).peers == ((0, 2), (1, 2), (0, 2))
    assert APPLE().downlink((0, 2), None, server).peers == ((0, 1, 2), (0, 1, 2))
    # Client 1 has met client 0 alone: for the others it still has what it began with, 1/3 or nothing.
    index = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 2]])
    met = entries(index, vector([1, 0, 0.5, 0.1, 0.2, 1]), [3, 4])
    cohort = ToyCohort(server, scalars={"apple": met})
    step.prepare(server)
    for _ in range(2):  # the second time in place of the first
        step.apply(server.value, cohort.by_size(), cohort, server)
    assert len(server.memory["apple"]["keys"]) == 6
    assert APPLE(models=2).downlink((1,), None, server).peers == ((1, 2),)
    assert APPLE(models=2, initial="own").downlink((1,), None, server).peers == ((0, 1),)


@quadratics()
def test_tested_is_the_mix():
    run, _, federation = at_client_0(APPLE())
    w = run.params.clone()
    federation.stack.personal(run)
    assert torch.equal(run.params, w)  # right after training
    later = federation.run(0)
    later.peers = {j: vector(core) for j, core in enumerate(CORES)}
    federation.stack.personal(later)
    assert later.params.tolist() == pytest.approx(mix(later.state(APPLE()).pi.tolist(), CORES))


def test_models_are_counted(tmp_path):
    def run(**fields):
        return simulate(tiny(client=[{"apple": fields}], rounds=ALL), tmp_path / str(fields))

    federations = [run(), run(models=3)]
    model = 4 * federations[0].server.layers.P
    for folder, M in ((tmp_path / "{}", 8), (tmp_path / "{'models': 3}", 3)):
        traffic = table(folder, "traffic")
        assert (traffic["up_params"] == model).all()
        assert (traffic["down_params"] == M * model).all()


def test_refused():
    with pytest.raises(ConfigError, match=r"not 0\.4 of them"):
        tiny(client=["apple"])
    with pytest.raises(ConfigError, match=r"apple\.models: must be a whole number > 0"):
        tiny(client=[{"apple": {"models": 0}}], rounds=ALL)
    with pytest.raises(ConfigError, match=r"apple\.epsilon: must be a number > 0"):
        tiny(client=[{"apple": {"epsilon": 0.0}}], rounds=ALL)
