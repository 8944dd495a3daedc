"""Robust rules: numerical cases, what they promise about liars, and the exchange of slices between hosts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case import Traced
from conftest import simulate, table, tiny
from sabotage import kill_before, to_the_end
from torch import Tensor, nn
from toy import TWO_LAYERS, ToyCohort, W, noted, toy_server, vector
from toy_proxy import ProxyCohort

from raysim.config import ConfigError
from raysim.core.aggregator import Aggregator
from raysim.core.layers import LayerMap
from raysim.federation import Federation
from raysim.methods import WEIGHTINGS
from raysim.methods.awd import AWD
from raysim.methods.fedavgm import FedAvgM
from raysim.methods.fedbe import FedBE
from raysim.methods.feddf import FedDF
from raysim.methods.fedlws import FedLWS
from raysim.methods.fixed_shrink import FixedShrink
from raysim.methods.median import Median
from raysim.methods.multi_krum import MultiKrum
from raysim.methods.trimmed_mean import TrimmedMean

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "robust_aggregation.json").read_text())["cases"]
RULES = ("median", "trimmed_mean", "multi_krum")


def cohort_of(updates: Any) -> ToyCohort:
    size = len(updates[0])
    layers = LayerMap.of(nn.Linear(size, 1, bias=False))
    return ToyCohort(toy_server(layers, [0.0] * size, labels=[[1]] * len(updates)), updates, [1] * len(updates))


def aggregate(weighting: Any, cohort: ToyCohort) -> Tensor:
    mixture = weighting.plan(cohort, cohort.server, cohort.uniform())
    made = weighting.combine(mixture, cohort, cohort.server)
    return cohort.reduce(mixture) if made is None else made


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{c['rule']}{i}") for i, c in enumerate(CASES) if c["rule"] in RULES]
)
def test_cases(case: Mapping[str, Any]) -> None:
    expect, cohort = case["expect"], cohort_of(case["inputs"]["updates"])
    found = aggregate(WEIGHTINGS[case["rule"]](**case["params"]), cohort)
    wanted = torch.tensor(expect.get("value", expect.get("mean")), dtype=torch.float64)
    if expect.get("cut_each_side") == 0 and case["params"]["beta"]:
        wanted[:] = 0  # Flower falls back to the mean; here the model stays
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    if "scores" in expect:
        torch.testing.assert_close(
            noted(cohort.server, "score"), torch.tensor(expect["scores"]).double(), rtol=1e-6, atol=1e-9
        )


def test_liars_do_not_leave_the_range_of_the_honest() -> None:
    """Two of seven send what they like; with b = 2 every coordinate stays between honest ones, and Krum keeps none of them."""
    chance = torch.Generator().manual_seed(0)
    honest = torch.randn(5, 6, generator=chance, dtype=torch.float64)
    for lie in (1e9, -1e9):
        updates = torch.cat([honest, torch.full((2, 6), lie, dtype=torch.float64)])
        for rule in (Median(), TrimmedMean(0.29)):
            found = aggregate(rule, cohort_of(updates))
            assert (found >= honest.amin(0)).all() and (found <= honest.amax(0)).all()
        cohort = cohort_of(updates)
        kept = MultiKrum(2).plan(cohort, cohort.server, cohort.uniform()).lam
        assert kept.tolist()[5:] == [0, 0]


def test_a_permutation_of_clients_permutes_the_plan_and_nothing_else() -> None:
    updates = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    for rule in (Median(), TrimmedMean(0.25)):
        assert torch.equal(aggregate(rule, cohort_of(updates)), aggregate(rule, cohort_of(updates[order])))
    one, other = cohort_of(updates), cohort_of(updates[order])
    plan = MultiKrum(1, 3).plan(one, one.server, one.uniform()).lam
    assert torch.equal(plan[order], MultiKrum(1, 3).plan(other, other.server, other.uniform()).lam)


def test_too_few_for_krum_leave_the_model() -> None:
    cohort = cohort_of([[1.0, 2.0]] * 4)
    assert aggregate(MultiKrum(1), cohort).tolist() == [0.0, 0.0]
    assert noted(cohort.server, "fell_back") == 1


@pytest.mark.parametrize("rule", [MultiKrum(1), TrimmedMean(0.2)], ids=lambda rule: rule.name)
def test_a_round_with_too_few_takes_no_server_step(rule: Any) -> None:
    """The model, FedAvgM's velocity and AWD's decay stay as the round found them."""
    cohort = cohort_of([[1.0, 2.0]] * 4)
    server, aggregator = cohort.server, Aggregator("uniform", (rule,), (FedAvgM(), AWD(), FixedShrink(0.9)))
    server.value, server.memory[FedAvgM()], server.memory[AWD()] = vector(3, 4), torch.ones(2), 0.5
    mixture = aggregator.plan(cohort, server)
    target = aggregator.reduce(mixture, cohort, server)
    assert aggregator.transform(target, mixture, cohort, server).tolist() == [3.0, 4.0]
    assert server.memory[FedAvgM()].tolist() == [1.0, 1.0]
    assert server.memory[AWD()] == 0.5
    assert noted(server, "fell_back") == 1


def test_a_layer_of_too_few_senders_is_not_trimmed_but_left() -> None:
    """All five send the first layer, and three the second: ⌊0.2 · 5⌋ is one, ⌊0.2 · 3⌋ none, and its mean would be the liar's."""
    server = toy_server(TWO_LAYERS)
    cohort = ToyCohort(server, [[1.0, 9e9], [2.0, 1.0], [3.0, 1.0], [4.0, 1.0], [9e9, 1.0]], [1] * 5)
    sent = torch.tensor([[True, i < 3] for i in range(5)])
    found = TrimmedMean(0.2).combine(cohort.uniform().select(sent), cohort, server)
    assert found is not None
    assert found.tolist() == [W[0] + 3.0, W[1]]  # of 2, 3, 4 the mean
    assert noted(server, "fell_back") == 1
    assert not server.scratch.leaves_model


def after_the_rule(rule: Any, step: Any, cohort: ToyCohort) -> Tensor:
    """The new model [S] of a round in which `step` follows `rule`."""
    server, aggregator = cohort.server, Aggregator("uniform", (rule,), (step,))
    mixture = aggregator.plan(cohort, server)
    return aggregator.transform(aggregator.reduce(mixture, cohort, server), mixture, cohort, server)


def with_liar(cohort: ToyCohort, lie: float) -> ToyCohort:
    """Of the same clients, and one more that sends `lie`."""
    updates, K = torch.cat([cohort.updates, torch.full_like(cohort.updates[:1], lie)]), len(cohort.updates) + 1
    cohort.updates, cohort.clients, cohort.sizes = updates, tuple(range(K)), torch.ones(K)
    return cohort


@pytest.mark.parametrize(
    "step", [FedLWS(0.3), FedLWS(0.3, tau_stat="rms"), FedDF(epochs=2), FedBE(epochs=2)], ids=lambda step: step.name
)
def test_a_step_does_not_hear_clients_that_krum_dropped(step: Any) -> None:
    """The model is that of the four others alone."""
    alone, lied = ProxyCohort(4, sizes=[1] * 4), with_liar(ProxyCohort(4), 1e3)
    found = after_the_rule(MultiKrum(1), step, lied)
    torch.testing.assert_close(found, after_the_rule(MultiKrum(0), step, alone), rtol=0, atol=1e-9)


def test_dirichlet_mixes_only_those_that_krum_kept() -> None:
    cohort = with_liar(ProxyCohort(4), 1e3)
    among = MultiKrum(1).plan(cohort, cohort.server, cohort.uniform())
    for sample in FedBE(mode="dirichlet", samples=3).sampled(cohort.server.value, among, cohort, cohort.server):
        assert ((cohort.models[:4].amin(0) <= sample) & (sample <= cohort.models[:4].amax(0))).all()


@pytest.mark.parametrize(
    ("rule", "by_hand"), [(Median(), lambda d: np.median(d, 0)), (TrimmedMean(0.2), lambda d: trimmed(d))]
)
def test_tau_after_a_rule_by_coordinate_is_by_that_rule(rule: Any, by_hand: Any) -> None:
    """The rule of the clients' distances to what it made of them: of two layers and of the model."""
    drawn = np.random.default_rng(0).normal(size=(5, 2))
    for lie in (1.0, 1e9):
        updates = np.concatenate([drawn[:4], [[lie, -lie]]])
        cohort = ToyCohort(toy_server(TWO_LAYERS), updates, [1] * 5)
        after_the_rule(rule, FedLWS(0.3), cohort)
        distances = np.abs(updates - by_hand(updates))
        tau = [*noted(cohort.server, "tau").tolist(), noted(cohort.server, "model_tau").item()]
        assert tau == pytest.approx([*by_hand(distances), by_hand(np.hypot(*distances.T)[:, None])[0]])
        assert max(tau) < 1e3


def trimmed(values: np.ndarray) -> Any:
    return np.sort(values, axis=0)[1:-1].mean(0)


FIVE = {
    "data": {"partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 8, "min_size": 4}}},
    "rounds": {"participation": 0.65, "total": 3},
}  # five clients a round
PROXY = {"data": {"proxy": {"samples": 20}}}
ENTRIES: dict[str, Any] = {
    "median": "median",
    "trimmed_mean": {"trimmed_mean": 0.2},
    "multi_krum": {"multi_krum": {"f": 1}},
}


@pytest.mark.parametrize("name", ENTRIES)
def test_same_bits_on_actors_of_which_one_dies(name: str, tmp_path: Path, warm_ray: Any, monkeypatch: Any) -> None:
    """Five actors; one is killed once its slices are asked for. The hosts exchange slices of 100 columns."""
    changes = {**FIVE, "weighting": [ENTRIES[name]], "server": ["fedavgm"]}
    local = simulate(tiny(**changes), tmp_path / "local")
    monkeypatch.setattr("raysim.engine.columns.COLUMNS", 100)
    config = tiny(**changes, engine={"ray": {"clients_per_actor": 1}})
    federation = Federation(config, tmp_path / "ray", make_engine=warm_ray)
    asked: list[int] = []

    def victim(call: Any) -> int | None:
        asked.extend([call.host] * (call.method == "slices"))
        return 2 if call.method == "slices" and call.host == 2 and federation.t == 1 else None

    killed = kill_before(federation, "call", victim, monkeypatch)
    to_the_end(federation)
    assert {*asked} == {*range(5)}
    assert killed
    assert "actor" in table(tmp_path / "ray", "events")["of"]
    assert federation.sha256() == local.sha256()


def test_a_layer_has_the_median_of_those_that_send_it(ran: Any) -> None:
    """With random layers: by hand, from the traced models of the first round."""
    run = ran(**FIVE, weighting=[{"random_layer": 3}, "median"], record={"traces": [1]})
    traced, layers, notes = Traced(run.folder, 0, run), run.server.layers, table(run.folder, "notes")
    sent = notes["value"][(notes["name"] == "uploads") & (notes["round"] == 0)].reshape(5, layers.L)
    assert (sent.sum(0) == 3).all()
    for spec, layer in zip(layers.tensors, layers.groups, strict=True):
        start = traced.before[spec.name]
        moved = [c.model[spec.name] - start for c, sends in zip(traced.clients, sent[:, layer], strict=True) if sends]
        middle = np.max(moved, axis=0) if spec.kind == "counter" else np.median(moved, axis=0)
        np.testing.assert_allclose(traced.after[spec.name], start + middle, atol=1e-6)


def test_what_a_host_holds_is_bounded(tmp_path: Path, warm_ray: Any, monkeypatch: Any) -> None:
    """Each of two actors is handed K · S / 2 floats, up to a piece; less at once where `gather_bytes` is small."""
    monkeypatch.setattr("raysim.engine.columns.COLUMNS", 50)
    for gather_bytes, most in ((1 << 30, None), (4 * 5 * 200, 200)):
        config = tiny(
            **FIVE, weighting=["median"], engine={"ray": {"clients_per_actor": 3, "gather_bytes": gather_bytes}}
        )
        federation = Federation(config, tmp_path / str(gather_bytes), make_engine=warm_ray)
        real, widths = federation.engine.call, []

        def call(asks: Any, real: Any = real, widths: list[int] = widths) -> Any:
            if asks.method == "columns":
                pieces = asks.args[2]
                widths.append(pieces[-1].stop - pieces[0].start)
            return real(asks)

        monkeypatch.setattr(federation.engine, "call", call)
        federation.step()
        federation.close()
        S = federation.server.layers.S
        assert sum(widths) == S
        assert max(widths) <= (most or S / 2 + 50)


BUFFERED = {"clock": {"latency": 1}}
LDAWA = {"ldawa": {"base": "size"}}
KRUM = {"multi_krum": {"f": 0}}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        *(({"weighting": [other, "median"], **PROXY}, "") for other in ("feddisco", "ccn", "fednova", LDAWA, "adaptive_gws")),
        *(({"weighting": [other, KRUM]}, "") for other in ("feddisco", "fednova", LDAWA)),
        *(({"weighting": [{"fedavg": "size"}, rule]}, "fedavg counts their samples") for rule in ("median", KRUM)),
        *(({"weighting": [rule], "rounds": {"selection": "by_size"}}, "by_size counts them") for rule in ("median", KRUM)),
        ({"weighting": ["median"], **BUFFERED, "rounds": {"selection": {"fedbuff": 3}}}, "fedbuff counts stale ones less"),
        *(
            (
                {"weighting": [rule], **BUFFERED, "rounds": {"selection": {"fedbuff": {"buffer": 3, "weights": "size"}}}},
                "fedbuff counts their samples",
            )
            for rule in ("median", KRUM)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_no_other_weights_are_ignored(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"counts all clients alike, but {name}"):
        tiny(**changes)


def test_weights_that_are_alike_go_with_a_rule(ran: Any) -> None:
    """And with Multi-Krum staleness, which the server knows by itself."""
    rules = [ran(weighting=weighting).sha256() for weighting in (["median"], [{"fedavg": "uniform"}, "median"])]
    assert rules[0] == rules[1]
    equal: dict[str, Any] = {"data": {"partition": {"iid_equal": {"clients": 8}}}, **BUFFERED, "weighting": ["median"]}
    rounds = [
        {"participation": 0.5},
        {"participation": 0.5, "selection": {"fedbuff": {"buffer": 4, "staleness": "constant"}}},
    ]
    assert len({ran(**equal, rounds=one).sha256() for one in rounds}) == 1
    tiny(weighting=[KRUM], **BUFFERED, rounds={"selection": {"fedbuff": 3}})
    tiny(weighting=["median"], rounds={"selection": "power_of_choice"})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"weighting": ["median", {"trimmed_mean": 0.4}]},
            "'median' and 'trimmed_mean' both combine the clients' models",
        ),
        ({"weighting": ["median"], "client": ["scaffold"], "local": {"momentum": 0.0}}, "scaffold averages more than"),
        ({"weighting": [{"multi_krum": {"f": 1}}]}, r"f 1 needs rounds of 5 clients \(2f \+ 3\), and they have 3"),
        ({"weighting": [{"multi_krum": {"f": 0}}, {"fedldf": 2}]}, "compares whole updates, but fedldf"),
        ({"weighting": [{"trimmed_mean": 0.1}]}, "beta 0.1 of the 3 clients of a round is none. Set it to 0.34,"),
        (
            {"weighting": ["median"], "server": ["feddf"], **PROXY},
            "with median malicious ones are among them; multi_krum",
        ),
        (
            {"weighting": [{"trimmed_mean": 0.4}], "server": ["fedbe"], **PROXY},
            "with trimmed_mean malicious ones are among",
        ),
        (
            {"weighting": ["median"], "server": [{"fedlws": {"tau_stat": "rms"}}]},
            "which median does not protect. Set tau_stat: mean",
        ),
        (
            {"weighting": ["median"], "server": [{"fedlws": {"lws_stats": "all"}}]},
            "which median does not protect. Set tau_stat: mean",
        ),
        *(
            (
                {"weighting": [{name: 4}, {"trimmed_mean": 0.2}], "rounds": {"participation": 1.0}},
                "beta 0.2 of the 4 clients that",
            )
            for name in ("hdfl", "random_layer", "fedldf")
        ),
        ({"weighting": [{"trimmed_mean": 0.5}]}, "must be a number >= 0 and < 0.5, but is 0.5"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny(**changes)


def test_nothing_cut_is_the_mean(ran: Any) -> None:
    uniform = ran(weighting=[{"fedavg": {"weights": "uniform"}}])
    assert ran(weighting=[{"trimmed_mean": 0.0}]).sha256() == uniform.sha256()
    assert ran(weighting=[{"multi_krum": {"f": 0, "m": 3}}]).sha256() == uniform.sha256()
