"""FedLWS."""

from collections import Counter

import numpy as np
import pytest
import torch
from case import State, Traced, average, fedavg, minus, norm
from conftest import simulate, table, tiny
from torch import nn
from toy import ONE_LAYER, TWO_LAYERS, ToyCohort, W, applied, noted, toy_server

from raysim.config import ConfigError
from raysim.core.layers import LayerMap
from raysim.engine.collectives import HostedCohort
from raysim.federation import Federation
from raysim.methods.fedldf import FedLDF
from raysim.methods.fedlws import FedLWS

SEVERAL = LayerMap.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2)))


def drawn(clients: int = 4) -> ToyCohort:
    """Three layers, random models."""
    stream = torch.Generator().manual_seed(1)
    value = torch.randn(SEVERAL.P, generator=stream, dtype=torch.float64)
    updates = torch.randn(clients, SEVERAL.P, generator=stream, dtype=torch.float64) / 3
    return ToyCohort(toy_server(SEVERAL, value.tolist()), updates.tolist(), list(range(1, clients + 1)))


def test_golden_numbers():
    cohort = ToyCohort(toy_server())
    result = applied(FedLWS(beta=0.1), cohort)
    assert result.tolist() == pytest.approx([3.1858684884, 3.1858684884], abs=1e-9)
    expected = {"tau": 1.2731325685, "moved": 0.7905694150, "gamma": 0.9802672272, "r": 0.1273132569, "norm": 5.0}
    for name, value in expected.items():
        assert noted(cohort.server, name).item() == pytest.approx(value, abs=1e-9), name
    cohort = ToyCohort(toy_server())
    applied(FedLWS(beta=0.1, tau_stat="rms"), cohort)
    assert noted(cohort.server, "tau").item() == pytest.approx(4 / 3)


@pytest.mark.parametrize("per", ["layer", "model"])
@pytest.mark.parametrize("tau_stat", ["mean", "rms"])
def test_regularisation_over_optimisation_is_beta_tau(per, tau_stat):
    cohort = drawn()
    applied(FedLWS(0.3, per=per, tau_stat=tau_stat), cohort)
    note = {name: noted(cohort.server, name) for name in ("gamma", "norm", "moved", "tau", "model_r", "model_tau", "r")}
    r = (1 - note["gamma"]) * note["norm"] / (note["gamma"] * note["moved"])
    torch.testing.assert_close(r, 0.3 * note["tau"], rtol=1e-12, atol=0)
    torch.testing.assert_close(note["r"], r, rtol=1e-12, atol=0)
    used = note["gamma"] if per == "layer" else noted(cohort.server, "model_gamma").expand(3)
    assert torch.equal(noted(cohort.server, "applied"), used)
    torch.testing.assert_close(note["model_r"], 0.3 * note["model_tau"], rtol=1e-12, atol=0)


def test_optimisation_and_regularisation_alone_add_up():
    full, opt, reg = (applied(FedLWS(0.3, variant=v), drawn()) for v in ("full", "only_opt", "only_reg"))
    mean = drawn().reduce(drawn().by_size())
    torch.testing.assert_close(opt + reg - mean, full, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(opt, full)
    assert not torch.allclose(reg, full)


@pytest.mark.parametrize(
    "cohort",
    [
        ToyCohort(toy_server(), [[1.0, -2.0]], [3]),  # alone
        ToyCohort(toy_server(), [[1.0, -2.0]] * 3),  # of one mind
        ToyCohort(toy_server(), [[0.0, 0.0]] * 3),  # nobody moved
    ],
)
def test_agreement_shrinks_nothing(cohort):
    torch.testing.assert_close(applied(FedLWS(0.1), cohort), cohort.reduce(cohort.by_size()), rtol=0, atol=1e-12)


def test_beta_0_is_the_base_method_to_the_bit_unless_clamped():
    mean = drawn().reduce(drawn().by_size())
    assert torch.equal(applied(FedLWS(0.0), drawn()), mean)
    assert not torch.allclose(applied(FedLWS(0.0, tau_clamp=(0.01, 0.2)), drawn()), mean, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.03, 100.0])
def test_clamp_bounds_gamma(beta):
    cohort = drawn()
    applied(FedLWS(beta, tau_clamp=(0.01, 0.2)), cohort)
    norms, moved, gamma = (noted(cohort.server, name) for name in ("norm", "moved", "gamma"))
    assert (gamma >= norms / (norms + 0.2 * moved) - 1e-12).all()
    assert (gamma <= norms / (norms + 0.01 * moved) + 1e-12).all()


def test_a_layer_of_norm_zero_is_not_frozen():
    cohort = ToyCohort(toy_server(TWO_LAYERS, [0.0, 4.0]), [[1.0, 0.0], [2.0, 1.0], [3.0, -1.0]])
    result = applied(FedLWS(0.1), cohort)
    assert result[0] == cohort.reduce(cohort.by_size())[0] != 0
    assert noted(cohort.server, "gamma")[1] < 1


def test_rms_is_an_upper_bound():
    mean, rms = drawn(), drawn()
    applied(FedLWS(0.1), mean)
    applied(FedLWS(0.1, tau_stat="rms"), rms)
    for name in ("tau", "model_tau"):
        assert (noted(rms.server, name) > noted(mean.server, name)).all()
    u = rms.updates - rms.updates.mean(0)
    assert noted(rms.server, "model_tau").item() == pytest.approx(float(u.square().sum(1).mean().sqrt()), rel=1e-12)


def test_model_wise_is_equation_7():
    cohort = drawn()
    result, d = applied(FedLWS(0.3, per="model"), cohort), cohort.reduce(cohort.by_size()) - cohort.server.value
    tau = (cohort.updates - cohort.updates.mean(0)).norm(dim=1).mean()
    norm = cohort.server.value.norm()
    gamma = norm / (0.3 * tau * d.norm() + norm)
    torch.testing.assert_close(result, gamma * (cohort.server.value + d), rtol=1e-12, atol=0)
    assert not torch.allclose(result, applied(FedLWS(0.3), drawn()))
    one = [applied(FedLWS(0.3, per=per), ToyCohort(toy_server(ONE_LAYER))) for per in ("model", "layer")]
    torch.testing.assert_close(*one, rtol=1e-12, atol=0)


def test_it_is_not_scale_invariant():
    cohort = ToyCohort(toy_server(value=[10 * w for w in W]), [[10.0, 0], [0, 10.0], [0, -20.0]])
    applied(FedLWS(0.1), cohort)
    expected = 1 / (1 + 10 * 0.1 * 1.2731325685 * 0.7905694150 / 5)
    assert noted(cohort.server, "gamma").item() == pytest.approx(expected, abs=1e-9)


def test_tau_is_over_the_uploaders():
    cohort = ToyCohort(toy_server(TWO_LAYERS))
    mixture = FedLDF(2).plan(cohort, cohort.server, cohort.by_size())  # {1, 2} send layer 1, {2, 3} layer 2
    result = applied(FedLWS(0.1), cohort, mixture)
    expected = [3.5 * 3 / (0.1 * 0.5 * 0.5 + 3), 3.0 * 4 / (0.1 * 1.5 * 1.0 + 4)]
    assert result.tolist() == pytest.approx(expected, abs=1e-12)
    # Model-wise, client 2 differs in both layers, the others in the one that they sent.
    assert noted(cohort.server, "model_tau").item() == pytest.approx((0.5 + np.hypot(0.5, 1.5) + 1.5) / 3)


def test_order_of_clients_does_not_matter():
    cohort = ToyCohort(toy_server(), [[0.0, -2.0], [1.0, 0.0], [0.0, 1.0]], [2, 1, 1])
    plain = applied(FedLWS(), ToyCohort(toy_server()))
    torch.testing.assert_close(applied(FedLWS(), cohort), plain, rtol=1e-12, atol=0)


GROUPS = [  # of the released code: a layer closes with a "bias", whatever comes before it in the state dict
    ["conv1.conv.weight", "conv1.conv.bias"],
    ["conv1.norm.weight", "conv1.norm.bias"],
    ["conv1.norm.running_mean", "conv1.norm.running_var", "conv1.norm.num_batches_tracked",
     "conv2.conv.weight", "conv2.conv.bias"],
    ["conv2.norm.weight", "conv2.norm.bias"],
    ["conv2.norm.running_mean", "conv2.norm.running_var", "conv2.norm.num_batches_tracked", "head.weight", "head.bias"],
]  # fmt: skip
OFFICIAL = {"beta": 0.03, "tau_clamp": [0.01, 0.2], "lws_stats": "all", "shrink_buffers": True}


def released(round_: Traced) -> State:
    """One round of the released code: everything in the state dict is averaged, measured and shrunk."""
    before, models = round_.before, [c.model for c in round_.clients]
    after, updates = average(models, round_.p), [minus(m, before) for m in models]
    centre = average(updates, np.full(len(models), 1 / len(models)))
    for names in GROUPS:
        tau = np.mean([norm(minus(u, centre), names) for u in updates])
        old, moved = norm(before, names), norm(minus(after, before), names)
        gamma = old / (np.clip(0.03 * tau, 0.01, 0.2) * moved + old)
        after |= {n: gamma * after[n] for n in names}
    return {n: np.trunc(a) if n.endswith("num_batches_tracked") else a for n, a in after.items()}


def final(folder, **fedlws) -> tuple[dict, Traced]:
    config = tiny(model={"layer_by": "bias_group"}, server=[{"fedlws": fedlws}], record={"traces": [3]})
    round_ = Traced(folder, 2, simulate(config, folder))
    return round_.after, round_


@pytest.fixture(scope="module")
def official(tmp_path_factory) -> tuple[dict, Traced]:
    return final(tmp_path_factory.mktemp("official"), **OFFICIAL)


def test_official_round(official):
    after, round_ = official
    for name, expected in released(round_).items():
        np.testing.assert_allclose(after[name], expected, atol=2e-6 * max(1, np.abs(expected).max()), err_msg=name)
    assert round_.before["conv1.norm.num_batches_tracked"] > 0


@pytest.mark.parametrize("change", [{"lws_stats": "parameters"}, {"tau_clamp": None}, {"shrink_buffers": False}])
def test_each_official_switch_matters(change, official, tmp_path):
    other, round_ = final(tmp_path, **{**OFFICIAL, **change})
    assert max(np.abs(official[0][n] - other[n]).max() for n in other) > 1e-4
    if change == {"shrink_buffers": False}:
        for name in (n for n in other if n not in round_.parameters):
            np.testing.assert_allclose(other[name], fedavg(round_)[name], atol=1e-6, err_msg=name)


def test_refusals():
    for fields, reason in (
        ({"beta": -0.1}, r"fedlws\.beta: must be a number >= 0"),
        ({"tau_clamp": [0.2, 0.01]}, "tau_clamp is"),
    ):
        with pytest.raises(ConfigError, match=reason):
            tiny(server=[{"fedlws": fields}])
    with pytest.raises(ConfigError, match="FedLWS"):
        tiny(weighting=["fedlaw"], server=["fedlws"], data={"proxy": {"samples": 20}})


def test_the_root_mean_square_is_of_what_the_server_receives(tmp_path):
    """So it bounds the mean also where messages are encoded."""
    tau = {}
    for stat in ("mean", "rms"):
        changes = {"server": [{"fedlws": {"tau_stat": stat}}], "upload": [{"qsgd": {"levels": 1}}]}
        simulate(tiny(**changes, rounds={"total": 1}), tmp_path / stat)
        notes = table(tmp_path / stat, "notes")
        tau[stat] = notes["value"][notes["name"] == "tau"]
    assert (tau["rms"] >= tau["mean"]).all() and tau["mean"].max() > 0


@pytest.mark.parametrize(("tau_stat", "visits"), [("mean", 1), ("rms", 0)])
def test_it_costs_one_reduction_and_a_visit_that_returns_scalars(tau_stat, visits, monkeypatch, tmp_path):
    """Or, as a root mean square, no visit. In the simulated method clients send nothing more: the server has their models."""
    asked = []
    for collective in (
        "reduce",
        "distances_to_mixture",
        "distances",
        "dots",
        "each",
        "gram",
        "gather",
        "predict",
        "compute",
    ):
        real = getattr(HostedCohort, collective)
        counted = lambda *args, real=real, name=collective, **kwargs: (asked.append(name), real(*args, **kwargs))[1]  # noqa: E731
        monkeypatch.setattr(HostedCohort, collective, counted)
    simulate(tiny(server=[{"fedlws": {"tau_stat": tau_stat}}], rounds={"total": 1}), tmp_path / "fedlws")
    assert asked == (["reduce", "distances_to_mixture"] if visits else ["reduce"] * 2)
    simulate(tiny(rounds={"total": 1}), tmp_path / "fedavg")
    bytes_with, bytes_without = (table(tmp_path / f, "traffic")["bytes"] for f in ("fedlws", "fedavg"))
    assert (bytes_with == bytes_without).all()


def test_hosts_are_called_for_one_sum_and_one_visit_more(tmp_path, warm_ray):
    """Beside FedNova, which like it plans when clients are back: what its two hosts are asked for in a round."""

    def calls(**changes) -> Counter[str]:
        config = tiny(weighting=["fednova"], **changes, engine={"ray": {"clients_per_actor": 2}})
        federation = Federation(config, tmp_path / str(len(changes)), make_engine=warm_ray)
        asked, real = Counter(), federation.engine.call

        def call(one):
            asked[one.method] += 1
            return real(one)

        federation.engine.call = call
        federation.step()
        federation.close()
        return asked

    plain, fedlws = calls(), calls(server=["fedlws"])
    assert fedlws - plain == {"partial": 2, "merge": 1, "squared_distances": 2}
    assert plain - fedlws == {}
    assert (plain["partial"], plain["merge"]) == (2, 1)
