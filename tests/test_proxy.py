"""The server's own samples, and BatchNorm statistics that come from them."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case import Traced, fedavg
from conftest import simulate, tiny
from reference import forward, inputs, parameters, tensors
from toy import toy_server

from raysim.api.lines import header
from raysim.config import ConfigError, from_dict, to_dict
from raysim.core import server_model as on_server
from raysim.core.local_run import RoundInfo
from raysim.core.server import Downlink, ProxyData
from raysim.engine.base import Engine
from raysim.engine.collectives import HostedCohort
from raysim.engine.dispatcher import Dispatcher
from raysim.federation import Federation, prepare
from raysim.store import tables

PROXY = {"data": {"proxy": {"samples": 24}}}
FEDLAW = {"weighting": [{"fedlaw": {"epochs": 3, "batch_size": 64}}]}  # a batch is the whole proxy set


def data(labels: list[int], balanced: bool) -> ProxyData:
    return ProxyData(np.arange(100, 100 + len(labels)), np.array(labels), balanced)


# Batches.


def test_an_epoch_is_every_sample_once():
    proxy, stream = data([0] * 20 + [1] * 5, balanced=False), torch.Generator().manual_seed(0)
    first, second = (proxy.order(8, stream) for _ in range(2))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(25))
    assert not torch.equal(first, second)


def test_balanced_batches_of_a_long_tail():
    labels = [0] * 30 + [2] * 9 + [5] * 3  # no sample of the classes between
    proxy, stream = data(labels, balanced=True), torch.Generator().manual_seed(0)
    order = proxy.order(8, stream)
    assert len(order) == 42
    for batch in order.split(8):
        counts = np.bincount(proxy.labels[batch.numpy()], minlength=6)
        assert counts[[1, 3, 4]].tolist() == [0, 0, 0]
        assert np.ptp(counts[[0, 2, 5]]) <= 1
    uses = np.bincount(order.numpy(), minlength=42)
    for c in (0, 2, 5):  # within a class, nobody is drawn twice before all have been drawn
        assert np.ptp(uses[proxy.labels == c]) <= 1
    plain = data(labels, balanced=False).order(8, stream)
    assert all(np.ptp(np.bincount(proxy.labels[b.numpy()], minlength=6)[[0, 2, 5]]) > 1 for b in plain.split(8))


def test_batches_belong_to_seed_round_and_method():
    class FedLAW: ...

    class FedDF: ...

    server = toy_server(proxy=data([0, 1] * 10, balanced=False))
    orders = server.proxy_orders(FedLAW(), 2, 8)
    assert torch.equal(server.proxy_orders(FedLAW(), 3, 8)[:2], orders)
    assert not torch.equal(server.proxy_orders(FedDF(), 2, 8), orders)
    assert [b.tolist() for b in server.scratch.batches[:3]] == [(100 + o).tolist() for o in orders[0].split(8)]
    server.scratch.t = 1
    assert not torch.equal(server.proxy_orders(FedLAW(), 2, 8), orders)


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        (FEDLAW, {"average": "proxy or recalibrate", "proxy": None, "recalibrate": None}),
        ({"weighting": ["adaptive_gws"]}, {"average": "proxy or recalibrate"}),
        ({"weighting": ["attentive_law"]}, {"average": None}),
        ({"server": [{"fixed_shrink": {"gamma": 0.9}}]}, {"average": "recalibrate, with some", "recalibrate": None}),
        ({"server": [{"fixed_shrink": {"gamma": 1.0}}]}, {"average": None}),
        ({**FEDLAW, "model": {"name": "mlp"}}, {"average": None}),  # without BatchNorm
    ],
)
def test_scaled_weights_want_statistics_of_their_own(changes, ways):
    for bn_stats, way in ways.items():
        model = {"name": "tiny_bn_cnn", **changes.get("model", {}), "bn_stats": bn_stats}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepare(tiny(**{**PROXY, **changes, "model": model}))
        found = [str(one.message) for one in caught]
        assert len(found) == (way is not None)
        assert all(f"Set it to {way}" in message for message in found)


@pytest.mark.parametrize("split", ["test", "train"])
def test_proxy_samples_are_nobodys(split, tmp_path):
    changes = {"data": {"proxy": {"samples": 24, "from": split}}, "rounds": {"total": 1}, **FEDLAW}
    federation = simulate(tiny(**changes, record={"traces": [1]}), tmp_path)
    partition, proxy = federation.partition, federation.partition.proxy
    assert ((proxy < federation.data.train_rows) == (split == "train")).all()
    for rows in (partition.server_test, *partition.train, *partition.test, *partition.val):
        assert not np.isin(rows, proxy).any()
    assert len(partition.server_test) == len(federation.data.y) - federation.data.train_rows - 24 * (split == "test")
    learned_on = Traced(tmp_path, 0, federation).proxy_batches
    assert len(learned_on) == 3
    assert all(sorted(batch) == sorted(proxy) for batch in learned_on)


def test_an_oracle_learns_on_what_it_is_tested_on(tmp_path):
    """And its runs say so."""
    oracle = {"data": {"proxy": {"samples": 24, "oracle": True}}, "rounds": {"total": 1}, "weighting": ["adaptive_gws"]}
    federation = simulate(tiny(**oracle), tmp_path)
    partition, tests = federation.partition, len(federation.data.y) - federation.data.train_rows
    assert len(partition.proxy) == 24
    assert np.isin(partition.proxy, partition.server_test).all()
    assert len(partition.server_test) == tests
    assert "adaptive_gws (oracle: learns on test samples)" in header(federation.config)
    assert "oracle" not in header(tiny(data={"proxy": {"samples": 24}}))
    with pytest.raises(ConfigError, match="its samples are from the test split"):
        tiny(data={"proxy": {"samples": 24, "from": "train", "oracle": True}})


def test_balanced_sampling_is_a_setting(tmp_path):
    def value(balanced: bool) -> torch.Tensor:
        proxy = {"samples": 24, "long_tail": 10, "balanced_sampling": balanced}
        changes = {"data": {"proxy": proxy}, "rounds": {"total": 1}, **FEDLAW}
        return simulate(tiny(**changes), tmp_path / str(balanced)).server.value

    assert not torch.allclose(value(True), value(False), rtol=0, atol=1e-4)


# Statistics.


def buffers(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {n: np.asarray(t) for n, t in state.items() if n not in parameters(state)}


def same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-6) -> bool:
    assert actual.keys() == expected.keys()
    return all(np.abs(actual[n] - t).max() <= tolerance * max(1, np.abs(t).max()) for n, t in expected.items())


def last_round(changes: dict[str, Any], folder: Path) -> Traced:
    federation = simulate(tiny(**PROXY, **changes, record={"traces": "rounds"}), folder)
    return Traced(folder, 2, federation)


def test_recalibrated_statistics_are_means_over_one_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(on_server, "SWEEP_BATCH", 10)  # 24 samples are three batches of eight
    round_ = last_round({"model": {"bn_stats": "recalibrate"}}, tmp_path / "recalibrate")
    state = tensors({n: round_.after[n] for n in parameters(round_.after)})
    fresh = {n: torch.zeros(b.shape).double() + n.endswith("var") for n, b in buffers(round_.after).items()}
    seen = []
    for rows in np.split(round_.federation.partition.proxy, 3):
        moved = forward({**state, **fresh}, inputs(round_.federation, rows)[0], train=True)[1]
        # A running statistic moves a tenth of the way to the batch's.
        seen.append({n: fresh[n] + 10 * (t - fresh[n]) for n, t in moved.items()})
    expected = {n: torch.stack([s[n] for s in seen]).mean(0).numpy() for n in seen[0]}
    expected |= {n: np.array(3.0) for n in expected if n.endswith("num_batches_tracked")}
    assert same(buffers(round_.after), expected)
    mean = fedavg(round_)
    assert same({n: round_.after[n] for n in state}, {n: mean[n] for n in state})
    averaged = last_round({}, tmp_path / "average")
    assert not same(buffers(averaged.after), expected, 1e-2)


def test_recalibration_comes_after_the_server_steps(tmp_path):
    changes = {"model": {"bn_stats": "recalibrate"}, "server": [{"fedlws": {"beta": 5.0}}]}
    round_ = last_round(changes, tmp_path)
    images, _ = inputs(round_.federation, round_.federation.partition.proxy)
    statistics = forward(tensors(round_.after), images, train=True)[1]
    name = "conv2.norm.running_mean"
    # They are those of the shrunk model's activations.
    assert np.abs(statistics[name].numpy() - round_.after[name]).max() < 2e-6


def test_proxy_statistics_follow_weight_learning(tmp_path):
    round_ = last_round({"model": {"bn_stats": "proxy"}, **FEDLAW}, tmp_path / "proxy")
    gamma = round_.note("fedlaw", "gamma")
    lam = round_.note("fedlaw", "lambda").reshape(len(gamma), -1)
    images, _ = inputs(round_.federation, round_.federation.partition.proxy)
    models, state = [c.model for c in round_.clients], tensors(round_.before)
    for g, weights in zip(gamma[:-1], lam, strict=False):  # the statistics of the next step are those of the next round
        for n in parameters(state):
            state[n] = g * sum(w * torch.tensor(m[n]) for w, m in zip(weights, models, strict=True))
        state |= forward(state, images, train=True)[1]
    assert same(buffers(round_.after), buffers(state))
    assert not same(buffers(round_.after), buffers(fedavg(round_)), 1e-2)

    traffic = tables.read(tmp_path / "proxy", "traffic")
    assert sum(traffic["up_buffers"].to_pylist()) == sum(traffic["down_buffers"].to_pylist()) == 0
    initial = buffers(round_.at(0).before)
    last = {}  # of every client, what it ended its last round with
    for t in range(3):
        for client in round_.at(t).clients:
            assert same(buffers(client.init), last.get(client.id, initial), 0)
            last[client.id] = buffers(client.model)
    assert len(last) > round_.federation.cohort_size  # some came later, when the server's statistics had moved
    assert not same(buffers(round_.before), initial, 1e-2)


def test_proxy_statistics_follow_training_on_the_server(tmp_path):
    changes = {"model": {"bn_stats": "proxy"}, "server": [{"server_ft": {"epochs": 1, "server_ft_official": True}}]}
    round_ = last_round(changes, tmp_path)
    images, _ = inputs(round_.federation, round_.federation.partition.proxy)
    start = tensors({**fedavg(round_), **buffers(round_.before)})
    assert same(buffers(round_.after), buffers(forward(start, images, train=True)[1]))


def test_statistics_from_proxy_data_need_some():
    for bn_stats in ("proxy", "recalibrate"):
        with pytest.raises(ConfigError, match=f"{bn_stats} needs proxy data"):
            tiny(model={"bn_stats": bn_stats})
    with pytest.raises(ConfigError, match="follow a method that learns on proxy data"):
        tiny(model={"bn_stats": "proxy"}, **PROXY)
    assert tiny(model={"bn_stats": "recalibrate"}, **PROXY)


# Engines.


def trained(engine: Engine, t: int) -> HostedCohort:
    dispatcher = Dispatcher(engine, RoundInfo(3, t, 3, 8, 0.1), (0, 1), Downlink())
    return HostedCohort(engine, dispatcher, dispatcher.train())


def draw(server_model: on_server.ServerModel) -> torch.Tensor:
    return torch.rand(4)  # as dropout does


def test_layers_that_draw_have_a_stream_for_each_call(tmp_path):
    engine = Federation(tiny(), tmp_path).engine

    def draws(t: int) -> torch.Tensor:
        cohort = trained(engine, t)
        return torch.stack([cohort.compute(draw) for _ in range(2)])

    before = torch.get_rng_state()
    first = draws(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draws(0), first)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(draws(1), first)


def test_gathering_past_the_limit_is_refused(tmp_path):
    engine = Federation(tiny(engine={"local": {"gather_bytes": 1}}), tmp_path).engine
    cohort = trained(engine, 0)
    assert not cohort.gathers
    for gather in (cohort.gather, lambda: cohort.compute(draw, models=True)):
        with pytest.raises(MemoryError, match=r"2 models in one process are .* the engine's gather_bytes allows"):
            gather()


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({"model": {"bn_stats": "proxy"}, **FEDLAW}, {"gather_bytes": 1}),
        ({"model": {"bn_stats": "recalibrate"}, "server": [{"fedbe": {"epochs": 1, "mode": "dirichlet"}}]}, {}),
    ],
    ids=["spread over hosts", "recalibrated"],
)
def test_ray_is_in_process(changes, limits, tmp_path, warm_ray):
    local = simulate(tiny(**PROXY, **changes, engine={"local": limits}), tmp_path / "local")
    ray = {"ray": {"clients_per_actor": 2, **limits}}
    remote = simulate(tiny(**PROXY, **changes, engine=ray), tmp_path / "ray", make_engine=warm_ray)
    assert remote.sha256() == local.sha256()


# The preset of FedLAW's released code.


def official(**changes: Any) -> Any:
    return tiny(preset="official_003", **PROXY, **changes)


def test_preset_sets_what_the_released_code_does():
    config = official(server=["server_ft", "feddf"])
    assert config.data.client_val_frac == 0.3
    assert config.local.state == "persist"
    assert config.model.bn_stats == "average"
    assert all(step.server_ft_official for step in config.server)
    fedlaw = official(weighting=["fedlaw"])
    assert fedlaw.model.bn_stats == "proxy"
    assert fedlaw.weighting[0].swa_order == "lambda_first"
    assert official(client=["fedprox"]).client[0].official_sgd
    feddyn = official(client=["feddyn"])
    assert feddyn.client[0].unsquared
    assert feddyn.client[0].weights == "size"


def test_what_the_file_says_wins_over_the_preset():
    kept = {"server": [{"fedbe": {"server_ft_official": False}}], "model": {"bn_stats": "first"}}
    config = official(weighting=["fedlaw"], **kept)
    assert config.model.bn_stats == "first"
    assert not config.server[0].server_ft_official
    assert official(client=[{"feddyn": {"weights": "uniform"}}]).client[0].weights == "uniform"
    assert from_dict(to_dict(config)) == config


def test_a_fault_beside_a_preset_is_told_as_ever():
    with pytest.raises(ConfigError, match=r"server\.0\.feddf\.epoch: unknown field"):
        official(server=[{"feddf": {"epoch": 1}}])
    with pytest.raises(ConfigError, match="server: must be a list"):
        official(server=7)
