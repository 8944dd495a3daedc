"""FedLAW and what learns its weights the same way."""

import dataclasses
import math

import pytest
import torch
from conftest import simulate, tiny
from toy import SIZES, UPDATES, W, noted, vector
from toy_proxy import CLASSES, SAMPLES, ProxyCohort

from raysim.config import ConfigError
from raysim.core.server import RoundScratch
from raysim.engine.collectives import HostedCohort
from raysim.methods.fedlaw import AdaptiveGWS, AttentiveLAW, FedLAW, LearnedWeights, Stacked

P = vector(SIZES) / sum(SIZES)
WHOLE = torch.arange(SAMPLES)


def half_square(lam: torch.Tensor, gamma: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inner products of the toy problem for the loss ½‖w‖², whose gradient is w itself."""
    w = gamma * (vector(W) + lam @ vector(UPDATES))
    return vector(W) @ w, vector(UPDATES) @ w


def learn(law: LearnedWeights, p: torch.Tensor = P, steps: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """λ and γ of the toy problem over epochs of `steps` batches."""
    orders = torch.arange(steps).repeat(law.epochs, 1)
    return law.read(law.learn(p, orders, half_square))


# Golden numbers.


def test_exponential_form():
    law = FedLAW(epochs=1, batch_size=1)
    grad = law.gradient(law.start(P), *half_square(P, vector(1.0), WHOLE))
    assert torch.allclose(grad, vector(1.21875, 1.21875, -2.4375, 21.125), atol=1e-12)
    lam, gamma = learn(law)
    assert torch.allclose(lam[-1], vector(0.2475001, 0.2475001, 0.5049998), atol=1e-7)
    assert abs(gamma[-1] - 0.9900498) < 1e-7
    w = gamma[-1] * (vector(W) + lam[-1] @ vector(UPDATES))
    assert torch.allclose(w, vector(3.2151869, 3.2052868), atol=1e-7)


def test_quadratic_form():
    law = FedLAW(form="quad")
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert torch.allclose(law.read(law.start(P))[0], uniform)
    grad = law.gradient(law.start(P), *half_square(uniform, vector(1.0), WHOLE))
    assert torch.allclose(grad, vector(3.9773019, 4.3622020, -8.3395039, 49.1111111), atol=1e-7)


# Gradients, through a model.


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("form", ["exp", "quad"])
def test_gradient_is_that_of_the_loss(form, norm):
    cohort, law = ProxyCohort(norm=norm), FedLAW(form=form, batch_size=SAMPLES)
    stacked = Stacked(cohort.server_model(), cohort.updates, WHOLE.numpy(), SAMPLES)
    z = law.start(P) + vector(0.3, -0.2, 0.1, -0.15)
    lam, gamma = law.read(z)
    of_server, of_updates = stacked.slopes(lam, gamma, WHOLE)
    grad = law.gradient(z, of_server, of_updates)
    step = 1e-5
    for i, unit in enumerate(torch.eye(4, dtype=torch.float64)):
        up, down = (stacked.loss(*law.read(z + sign * step * unit)) for sign in (1, -1))
        assert abs(grad[i] - (up - down) / (2 * step)) < 1e-8
    stacked.mix(lam, gamma)
    along = cohort.flat.params @ stacked.server_model.gradient(stacked.objective, WHOLE)  # ⟨w, G⟩
    if form == "exp":
        assert abs(grad[:-1].sum()) < 1e-14
        assert torch.allclose(grad[-1], along, atol=1e-14)
    else:
        assert abs((z[:-1] * grad[:-1]).sum()) < 1e-14  # λ does not depend on the length of x
        assert torch.allclose(grad[-1], 2 / z[-1] * along, atol=1e-14)


# Stages, schedules and averaging, against torch's own.


def by_torch(form: str, stages: list[tuple[str, int, bool]], lr: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights learned by autograd; a stage is what moves, its epochs, and whether x is averaged."""
    x = (P.log() if form == "exp" else torch.full((3,), 3**-0.5).double()).requires_grad_()
    s = torch.tensor(0.0 if form == "exp" else 1.0, dtype=torch.float64, requires_grad=True)

    def weights():
        return (x.softmax(0), s.exp()) if form == "exp" else (x**2 / (x**2).sum(), s**2)

    for moves, epochs, averaged in stages:
        adam = torch.optim.Adam([t for t, n in ((x, "lambda"), (s, "gamma")) if n in moves], lr, betas=(0.5, 0.999))
        halving = torch.optim.lr_scheduler.StepLR(adam, 20, 0.5)
        if averaged:
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=100)
            rise, iterates = None, []
        for epoch in range(epochs):
            for _ in range(2):
                lam, gamma = weights()
                adam.zero_grad()
                (gamma * (vector(W) + lam @ vector(UPDATES))).square().sum().div(2).backward()
                adam.step()
            if not averaged:
                halving.step()
            elif epoch > 5:
                iterates.append(x.detach().clone())
                rise = rise or torch.optim.swa_utils.SWALR(adam, swa_lr=0.05, anneal_epochs=10)
                rise.step()
            else:
                cosine.step()
        if averaged:
            x.data.copy_(torch.stack(iterates).mean(0))
    return tuple(w.detach() for w in weights())


LEARNERS = {
    "together": (FedLAW(epochs=45, batch_size=1), [("lambda gamma", 45, False)]),
    "quadratic": (FedLAW(epochs=45, batch_size=1, form="quad"), [("lambda gamma", 45, False)]),
    "lambda first": (FedLAW(epochs=44, batch_size=1, swa=True), [("lambda", 22, True), ("gamma", 22, False)]),
    "gamma first": (
        FedLAW(epochs=44, batch_size=1, swa=True, swa_order="gamma_first"),
        [("gamma", 22, False), ("lambda", 22, True)],
    ),
    "attentive": (AttentiveLAW(epochs=22, batch_size=1), [("lambda", 22, False)]),
    "attentive, averaged": (AttentiveLAW(epochs=22, batch_size=1, swa=True), [("lambda", 22, True)]),
    "shrinking": (AdaptiveGWS(epochs=22, batch_size=1), [("gamma", 22, False)]),
}


@pytest.mark.parametrize(("law", "stages"), LEARNERS.values(), ids=LEARNERS.keys())
def test_learning_is_torchs(law, stages):
    lam, gamma = learn(law, steps=2)
    assert len(lam) == len(gamma) == law.epochs + 1
    expected_lam, expected_gamma = by_torch(law.form, stages)
    # torch's schedulers make a rate out of the last one, with rounding.
    assert torch.allclose(lam[-1], expected_lam, rtol=0, atol=1e-7)
    assert torch.allclose(gamma[-1], expected_gamma, rtol=0, atol=1e-7)


def test_a_frozen_weight_does_not_move():
    lam, gamma = learn(AttentiveLAW(epochs=3))
    assert (gamma == 1).all()
    assert (lam[1:] != lam[0]).any()
    lam, gamma = learn(FedLAW(epochs=6, swa=True, swa_order="gamma_first"))
    assert torch.allclose(lam[:4], P.expand(4, 3), rtol=0, atol=1e-15)
    assert (gamma[3:] == gamma[3]).all()
    assert gamma[3] != 1
    assert (lam[4:] != lam[0]).all()


# Identities.


def plan(law: LearnedWeights, cohort: ProxyCohort):
    return law.plan(cohort, cohort.server, cohort.by_size())


def test_without_epochs_weights_are_those_of_fedavg_or_uniform():
    cohort = ProxyCohort()
    mixture = plan(FedLAW(epochs=0), cohort)
    assert torch.allclose(mixture.weights, cohort.by_size().weights, rtol=0, atol=1e-15)
    assert torch.allclose(plan(FedLAW(epochs=0, form="quad"), cohort).weights, cohort.uniform().weights, atol=1e-15)
    assert not torch.allclose(plan(FedLAW(epochs=1), cohort).weights, mixture.weights, atol=1e-3)


def test_one_client_has_all_the_weight():
    cohort = ProxyCohort(clients=1)
    plan(FedLAW(epochs=5), cohort)
    assert (noted(cohort.server, "lambda") == 1).all()
    assert noted(cohort.server, "gamma")[-1] != 1


def test_identical_clients_keep_their_weights_and_shrink_as_one():
    cohort = ProxyCohort()
    cohort.updates[:] = cohort.updates[0]
    law = FedLAW(epochs=5, batch_size=5)
    together = plan(law, cohort)
    lam = noted(cohort.server, "lambda")
    assert torch.allclose(lam, lam[0].expand_as(lam), rtol=0, atol=1e-7)
    # The same batches for both: the stream is named by the method.
    orders = cohort.server.proxy_orders(law, 5, 5)
    cohort.server.proxy_orders = lambda *_: orders
    assert torch.allclose(plan(AdaptiveGWS(epochs=5, batch_size=5), cohort).weights, together.weights, atol=1e-7)
    cohort.updates[0] *= 1.001
    lam = law.read(law.learn(P, orders, Stacked(cohort.server_model(), cohort.updates, WHOLE.numpy(), 5).slopes))[0]
    assert (lam[-1] - lam[0]).abs().max() > 1e-3


def test_permuting_clients_permutes_weights():
    cohort = ProxyCohort()
    plan(FedLAW(epochs=5, batch_size=5), cohort)
    lam = noted(cohort.server, "lambda")
    order = [2, 0, 1]
    cohort.updates, cohort.sizes, cohort.server.scratch.notes = cohort.updates[order], cohort.sizes[order], []
    plan(FedLAW(epochs=5, batch_size=5), cohort)
    assert torch.allclose(noted(cohort.server, "lambda"), lam[:, order], rtol=0, atol=1e-9)
    assert not torch.allclose(lam[:, order], lam, atol=1e-3)


def test_shrinking_needs_only_the_mean():
    cohort = ProxyCohort()
    shrunk = plan(AdaptiveGWS(epochs=4), cohort)
    mean = cohort.reduce(cohort.by_size()) - cohort.server.value
    alone = ProxyCohort(clients=1)
    alone.updates, alone.x = mean[None], cohort.x
    assert torch.allclose(alone.reduce(plan(AdaptiveGWS(epochs=4), alone)), cohort.reduce(shrunk), atol=1e-12)
    weights = shrunk.weights / noted(cohort.server, "gamma")[-1]
    assert torch.allclose(weights, cohort.by_size().weights)
    assert "lambda" not in {
        note.name for note in cohort.server.scratch.notes
    }  # the clients' weights are the other weightings'


def test_the_global_step_comes_before_the_shrinking():
    """w = γ (w_g + η (ŵ − w_g)), γ learned for that model."""
    cohort, law = ProxyCohort(), AdaptiveGWS(epochs=4, eta=0.5)
    value, mean = cohort.server.value, cohort.reduce(cohort.by_size())
    stepped = value + 0.5 * (mean - value)
    shrunk = cohort.reduce(plan(law, cohort))
    gamma = noted(cohort.server, "gamma")[-1]
    assert torch.allclose(shrunk, gamma * stepped, rtol=0, atol=1e-12)
    halved = ProxyCohort(clients=1)
    halved.updates, halved.x = (stepped - value)[None], cohort.x
    plan(AdaptiveGWS(epochs=4), halved)
    assert noted(halved.server, "gamma")[-1] == pytest.approx(gamma.item(), abs=1e-12)
    after = value + 0.5 * (gamma * mean - value)  # what `step_size` would make of it
    assert not torch.allclose(shrunk, after, atol=1e-3)


# Where the models are.


def test_spread_is_stacked_in_float64():
    cohort, law = ProxyCohort(norm=True), FedLAW(epochs=6, batch_size=5)
    stacked = plan(law, cohort)
    statistics, notes = cohort.server.scratch.statistics, cohort.server.scratch.notes
    cohort.gathers, cohort.server.scratch.notes = False, []
    spread = plan(law, cohort)
    assert torch.allclose(spread.weights, stacked.weights, rtol=0, atol=1e-9)
    assert torch.allclose(cohort.server.scratch.statistics, statistics, rtol=0, atol=1e-9)
    for note in notes:
        assert torch.allclose(noted(cohort.server, note.name), note.value, rtol=0, atol=1e-9), note.name


def test_beyond_the_byte_limit_a_step_is_a_reduction_and_a_visit(tmp_path, monkeypatch):
    calls = dict.fromkeys(("reduce", "dots", "compute", "gather"), 0)

    def counted(name, method):
        def count(cohort, *args, **kwargs):
            calls[name] += 1
            return method(cohort, *args, **kwargs)

        return count

    for name in calls:
        monkeypatch.setattr(HostedCohort, name, counted(name, getattr(HostedCohort, name)))
    changes = {
        "data": {"proxy": {"samples": 24}}, "rounds": {"total": 2, "evaluate_every": 2},
        "weighting": [{"fedlaw": {"epochs": 3, "batch_size": 16}}],
    }  # fmt: skip
    stacked = simulate(tiny(**changes), tmp_path / "stacked")
    assert calls == {"reduce": 2, "dots": 0, "compute": 2, "gather": 0}
    calls.update(dict.fromkeys(calls, 0))
    K, S = stacked.cohort_size, stacked.server.layers.S
    spread = simulate(tiny(**changes, engine={"local": {"gather_bytes": K * S * 4 - 1}}), tmp_path / "spread")
    steps = (
        3 * 2 * 2
    )  # epochs, batches, rounds; besides the round's own reduction, the loss before and after, and of zeros
    assert calls == {"reduce": steps + 2 * 4, "dots": steps, "compute": steps + 2 * 3, "gather": 0}
    assert torch.allclose(spread.server.value, stacked.server.value, rtol=1e-5, atol=1e-5)
    calls.update(dict.fromkeys(calls, 0))
    exactly = simulate(tiny(**changes, engine={"local": {"gather_bytes": K * S * 4}}), tmp_path / "exactly")
    assert calls == {"reduce": 2, "dots": 0, "compute": 2, "gather": 0}
    assert torch.equal(exactly.server.value, stacked.server.value)


# Switches and edges.

TOGETHER = FedLAW(epochs=45, batch_size=4)
SWA = FedLAW(epochs=45, batch_size=4, swa=True)


@pytest.mark.parametrize(
    ("law", "field", "value"),
    [
        (TOGETHER, "epochs", 44),
        (TOGETHER, "lr", 0.005),
        (TOGETHER, "form", "quad"),
        (TOGETHER, "batch_size", 5),
        (TOGETHER, "betas", (0.9, 0.999)),
        (TOGETHER, "halve_every", 44),
        (TOGETHER, "gamma_clamp", (0.5, 0.9)),
        (TOGETHER, "swa", True),
        (SWA, "swa_order", "gamma_first"),
        (AttentiveLAW(epochs=9), "swa", True),
        (AttentiveLAW(epochs=9), "stop_round", 0),
        (AdaptiveGWS(epochs=9), "gamma_clamp", (0.5, 0.9)),
        (AdaptiveGWS(epochs=9), "eta", 0.5),
    ],
)
def test_every_switch_changes_the_weights(law, field, value):
    cohort = ProxyCohort()
    weights = plan(law, cohort).weights
    assert torch.equal(plan(law, cohort).weights, weights)
    assert not torch.allclose(plan(dataclasses.replace(law, **{field: value}), cohort).weights, weights, atol=1e-6)


@pytest.mark.parametrize("form", ["exp", "quad"])
def test_gamma_can_be_bounded(form):
    for sign in (1, -1):  # with the other sign the loss falls with the length of w, and growing helps

        def slopes(lam, gamma, batch, sign=sign):
            return tuple(sign * s for s in half_square(lam, gamma, batch))

        for clamp in (None, (0.97, 1.01)):
            law = FedLAW(epochs=9, gamma_clamp=clamp, form=form)
            gamma = law.read(law.learn(P, torch.zeros(9, 1, dtype=torch.long), slopes))[1]
            assert gamma.min() >= (clamp[0] - 1e-12 if clamp else 0)
            assert gamma.max() <= (clamp[1] + 1e-12 if clamp else 2)
            assert bool((gamma < 0.96).any() or (gamma > 1.02).any()) == (clamp is None)


def test_attentive_law_stops():
    cohort, law = ProxyCohort(), AttentiveLAW(epochs=3, stop_round=4)
    for t, learns in ((3, True), (4, False)):
        cohort.server.scratch.t, cohort.server.scratch.notes = t, []
        assert torch.equal(plan(law, cohort).weights, cohort.by_size().weights) != learns
        assert bool(cohort.server.scratch.notes) == learns


def test_weights_that_are_not_finite_are_dropped():
    cohort = ProxyCohort()
    cohort.x *= torch.inf  # then no gradient is finite
    mixture = plan(FedLAW(epochs=2), cohort)
    assert torch.allclose(mixture.weights, cohort.by_size().weights, atol=1e-15)
    assert cohort.server.scratch.statistics is None
    assert noted(cohort.server, "fell_back") == 1


def hopeless(cohort: ProxyCohort) -> float:
    """Make the labels those to which every client's mixture gives the least, and return what a model of zeros loses."""
    server_model = cohort.server_model()
    server_model.load(cohort.reduce(cohort.by_size()))
    cohort.y = server_model.flat.model(cohort.x).argmin(1)
    return math.log(CLASSES)


@pytest.mark.parametrize("law", [FedLAW(epochs=2, guard=True), AdaptiveGWS(epochs=2, guard=True)])
def test_the_guard_keeps_the_model_while_it_is_worse_than_chance(law):
    cohort = ProxyCohort(spread=0.05)
    chance = hopeless(cohort)
    free = plan(dataclasses.replace(law, guard=False), cohort)
    assert noted(cohort.server, "proxy_loss_after") > chance
    assert noted(cohort.server, "gamma")[-1] < 1
    cohort.server.scratch.notes.clear()
    guarded = plan(law, cohort)
    scale = noted(cohort.server, "gamma")[-1]
    assert torch.allclose(guarded.weights * scale, free.weights, rtol=1e-12)
    assert noted(cohort.server, "fell_back") == 1


def test_the_guard_lets_a_model_shrink_that_is_better_than_chance():
    cohort = ProxyCohort(spread=0.05)
    model = cohort.server_model()
    model.load(cohort.reduce(cohort.by_size()))
    cohort.y = model.flat.model(cohort.x).argmax(1)
    free, guarded = (plan(FedLAW(epochs=2, guard=guard), cohort) for guard in (False, True))
    assert torch.equal(free.weights, guarded.weights)


def test_that_gamma_may_drive_the_model_to_zero_is_said():
    cohort = ProxyCohort(spread=0.05)
    hopeless(cohort)
    for t in range(4):
        cohort.server.scratch = RoundScratch(t)
        plan(FedLAW(epochs=2), cohort)
        said = [event.message for event in cohort.server.scratch.warnings]
        assert len(said) == (t >= 2)
        assert all("guard: true" in message for message in said)


def test_what_is_learned_is_recorded():
    cohort = ProxyCohort()
    mixture = plan(FedLAW(epochs=30), cohort)
    lam, gamma = noted(cohort.server, "lambda"), noted(cohort.server, "gamma")
    assert noted(cohort.server, "fell_back") == 0
    assert lam.shape == (31, 3)
    assert gamma.shape == (31,)
    assert torch.allclose(lam[0], cohort.by_size().per_client())
    assert torch.allclose(mixture.weights[:, 0], gamma[-1] * lam[-1])
    assert torch.allclose(mixture.buffers.sum(0), torch.ones(mixture.buffers.shape[1]).double())  # γ is for parameters
    server_model = cohort.server_model()
    for when, weights in (("before", cohort.by_size()), ("after", mixture)):
        server_model.load(cohort.reduce(weights))
        loss = torch.nn.functional.cross_entropy(server_model.flat.model(cohort.x), cohort.y)
        assert torch.allclose(noted(cohort.server, f"proxy_loss_{when}"), loss)
    assert noted(cohort.server, "proxy_loss_after") < noted(cohort.server, "proxy_loss_before")


PROXY = {"data": {"proxy": {"samples": 16}}}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"weighting": ["fedlaw"]}, "fedlaw learns on proxy data, but data.proxy.samples is 0"),
        ({"weighting": ["fedavg", "fedlaw"], **PROXY}, "learns the clients' weights itself"),
        ({"weighting": ["attentive_law", {"fedldf": {"top_n": 1}}], **PROXY}, "so that fedldf would have no effect"),
        ({"weighting": ["fedlaw"], "server": ["fedlws"], **PROXY}, "and so does FedLWS"),
        ({"weighting": ["adaptive_gws"], "server": ["fedlws"], **PROXY}, "and so does FedLWS"),
        ({"weighting": ["fedlaw"], "client": ["fedrep"], **PROXY}, "fedrep never sends its head"),
        ({"weighting": [{"fedlaw": {"gamma_clamp": [0.0, 1.0]}}], **PROXY}, "a positive lower and an upper bound"),
    ],
)
def test_refused_when_the_configuration_is_read(changes, fault):
    with pytest.raises(ConfigError, match=fault):
        tiny(**changes)


def test_what_composes_is_read():
    assert tiny(weighting=["attentive_law"], server=["fedlws"], **PROXY)
    assert tiny(weighting=[{"fedavg": {"weights": "uniform"}}, "adaptive_gws"], client=["fedprox"], **PROXY)
    assert tiny(weighting=["fedlaw"], client=["fedprox"], **PROXY)
