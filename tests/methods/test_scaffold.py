"""SCAFFOLD."""

import pytest
import torch
from conftest import tiny
from quadratics import Quadratics, quadratics
from toy import UPDATES, vector

from raysim.config import ConfigError
from raysim.methods.fedavg import StepSize
from raysim.methods.scaffold import SCAFFOLD, full_gradient

A, B = [[1.0], [4.0]], [[0.0], [1.0]]  # two clients, curvatures and optima
OPTIMUM = 4 / 5  # Σ a b / Σ a
OPTIONS = ["option_1", "option_2", "mean_grad"]


@pytest.mark.parametrize("option", OPTIONS)
def test_reaches_the_optimum_where_fedavg_does_not(option):
    assert Quadratics([SCAFFOLD(option)], A, B, lr=0.1, steps=5).simulate(40).item() == pytest.approx(OPTIMUM, abs=1e-6)
    assert abs(Quadratics([], A, B, lr=0.1, steps=5).simulate(40).item() - OPTIMUM) > 0.05


@quadratics()
def test_golden_numbers():
    """S = 2, η = 0.1, all controls 0."""
    federation = Quadratics([SCAFFOLD()], torch.zeros(3, 2).tolist(), torch.zeros(3, 2).tolist(), start=[3.0, 4.0])
    moved = iter(vector(UPDATES))

    def train(run):
        run.params.add_(next(moved))
        run.steps = 2

    federation.stack.train = train
    assert federation.round().tolist() == pytest.approx([3.3333333, 3.6666667], abs=5e-8)
    for state, update in zip(federation.states, UPDATES, strict=True):
        assert state.methods["scaffold"].c.tolist() == pytest.approx([-5 * u for u in update])
    assert federation.server.shared["scaffold"].tolist() == pytest.approx([-5 / 3, 5 / 3])


def test_the_controls_add_up_to_n_c():
    """Whoever takes part: Σ_k c_k = N c. A client without samples is none of the N."""
    federation = Quadratics([SCAFFOLD()], [*A, [2.0], [9.0]], [*B, [-1.0], [0.0]], steps=2, sizes=[1, 1, 1, 0])
    federation.simulate(5, cohorts=[(0, 1), (1, 2), (0,)])
    total = sum(state.methods["scaffold"].c.item() for state in federation.states[:3])
    assert total == pytest.approx(3 * federation.server.shared["scaffold"].item())
    assert abs(total) > 0.1


@pytest.mark.parametrize("option", OPTIONS)
def test_one_full_batch_step_gives_the_gradient(option):
    """S = 1: c_k⁺ = ∇F_k(w_g), whatever the controls were."""
    federation = Quadratics([SCAFFOLD(option)], A, B, start=[3.0])
    federation.server.shared["scaffold"] = vector([0.7])
    run = federation.run(1)
    with quadratics():
        run.state(federation.stack.methods[0]).c.fill_(-2.0)
    federation.visit(run)
    assert federation.states[1].methods["scaffold"].c.item() == pytest.approx(4 * (3.0 - 1.0))


def test_the_options_differ_after_two_steps():
    """From w = 3 with η = 0.1 and F' = 4 (w − 1): w' = 2.2, so that the gradients are 8 and 4.8."""
    controls = {}
    for option in OPTIONS:
        federation = Quadratics([SCAFFOLD(option)], A, B, steps=2, start=[3.0])
        federation.visit(federation.run(1))
        controls[option] = federation.states[1].methods["scaffold"].c.item()
    assert controls == pytest.approx({"option_1": 8.0, "option_2": 6.4, "mean_grad": 6.4})


def test_with_momentum_the_mean_gradient_is_of_the_raw_ones():
    """w = 3; g = 8 − (−1) + 0.5; momentum 0.5: w' = 3 − 0.95, w'' irrelevant: mean of F'(3) and F'(2.05)."""
    federation = Quadratics([SCAFFOLD("mean_grad")], A, B, steps=2, start=[3.0], momentum=0.5)
    federation.server.shared["scaffold"] = vector([0.5])
    run = federation.run(1)
    with quadratics():
        run.state(federation.stack.methods[0]).c.fill_(-1.0)
    federation.visit(run)
    assert federation.states[1].methods["scaffold"].c.item() == pytest.approx((8.0 + 4 * 1.05) / 2)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_mean_of_the_clients_controls_is_the_servers(option):
    a, b = [[1.0], [2.0], [3.0], [4.0]], [[0.0], [1.0], [-1.0], [2.0]]
    federation = Quadratics([SCAFFOLD(option)], a, b, steps=3)
    federation.simulate(5, cohorts=[(0, 1), (1, 3), (0,)])
    controls = [s.methods["scaffold"].c if s.methods else vector([0.0]) for s in federation.states]
    assert (sum(controls) / 4).item() == pytest.approx(federation.server.shared["scaffold"].item())
    assert abs(federation.server.shared["scaffold"].item()) > 0.01


def test_alone_a_client_is_plain_sgd():
    alone, sgd = (Quadratics(methods, A[:1], [[2.0]], steps=3).simulate(4) for methods in ([SCAFFOLD()], []))
    assert alone.item() == pytest.approx(sgd.item(), abs=1e-14)


def test_global_step_size():
    whole, half = (Quadratics([SCAFFOLD()], A, B, start=[3.0], server=s).round() for s in ([], [StepSize(0.5)]))
    assert half.item() == pytest.approx(3.0 + 0.5 * (whole.item() - 3.0))


@quadratics()
def test_full_gradient_takes_every_sample():
    """Batches of 2 and drop_last: the third sample counts nevertheless, and the model stays."""
    federation = Quadratics([SCAFFOLD("option_1")], A, B, sizes=[1, 3], batch_size=2, drop_last=True)
    run = federation.run(1)
    run.params.fill_(5.0)
    assert full_gradient(run, vector([3.0])).item() == pytest.approx(8.0)
    assert run.params.item() == 5.0


@pytest.mark.parametrize(
    "changes",
    [
        {"local": {"weight_decay": 0.0}},  # tiny has momentum
        {"local": {"momentum": 0.0}},
        {"local": {"optimizer": "adam", "momentum": 0.0, "weight_decay": 0.0}},
        {"client": ["scaffold", "fedala"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
    ],
)
def test_option_2_needs_plain_steps_from_the_global_model(changes):
    with pytest.raises(ConfigError, match=r"option_2 needs.*mean_grad"):
        tiny(**{"client": ["scaffold"], **changes})
    others = changes.get("client", [None])[1:]
    tiny(**{**changes, "client": [{"scaffold": {"c_update": "mean_grad"}}, *others]})
