"""Client methods, selections, weightings and server steps together (design: any × FedLDF × any × FedLWS)."""

from typing import Any

import numpy as np
import pytest
import torch
from case import UNITS, State, Traced, cases, fedavg, minus, norm
from conftest import simulate, table, tiny

from raysim.config import ConfigError
from raysim.federation.builder import prepare
from raysim.methods import CLIENTS

PROXY = {"data": {"proxy": {"samples": 8}}}
WEIGHTINGS: list[dict[str, Any]] = [
    {"ccn": {"temperature": 0.1}}, {"fednova": {}}, {"feddisco": {}}, {"ldawa": {"warmup": 0}}, {"hdfl": 2},
    {"random_layer": 2}, {"fedavg": {"weights": "uniform"}},
]  # fmt: skip
PAIRS = [
    *((client, WEIGHTINGS[i % len(WEIGHTINGS)]) for i, client in enumerate(CLIENTS) if client != "fedprox"),
    *(("fedprox", weighting) for weighting in WEIGHTINGS),
]


@pytest.mark.parametrize(("client", "weighting"), PAIRS, ids=str)
def test_all_go_together(client, weighting, tmp_path):
    """Every client method and every weighting with FedLDF and FedLWS: two clients send each layer, which is shrunk."""
    config = tiny(**cases()[client].changes, weighting=[{"fedldf": 2}, weighting], server=[{"fedlws": 0.05}])
    federation = simulate(config, tmp_path)
    server, notes = federation.server, table(tmp_path, "notes")
    assert server.value.isfinite().all()
    sent = notes["value"][(notes["method"] == "fedldf") & (notes["name"] == "uploads")].reshape(3, -1, server.layers.L)
    heads = 0 if client in ("fedbabu", "fedrep") else 2  # where it stays with the clients nobody sends it
    assert (sent.sum(1) == [2, 2, heads]).all()
    gamma = notes["value"][notes["name"] == "gamma"]
    assert ((gamma > 0) & (gamma <= 1)).all()
    assert (gamma < 1).any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"client": ["finetune", "fedala"]}, "start"),
        ({"client": ["perfedavg", "pfedme"]}, "step"),
        ({"client": ["ditto", "fedrep"]}, "train"),
        ({"client": ["fedbabu", "fedrep"]}, "train"),
        (
            {"client": [{"sgdm": {"reading": "mfl"}}], "weighting": ["fednova"], "local": {"momentum": 0.0}},
            "start empty each",
        ),
        ({"weighting": ["feddisco", "ldawa"]}, "Set base: size"),
        ({"client": ["scaffold", "fedala"], "local": {"momentum": 0.0, "weight_decay": 0.0}}, "mean_grad"),
        ({"client": ["fedamp", "fedala"], "rounds": {"participation": 1.0}}, "init: cloud"),
        (
            {"weighting": [{"hdfl": 1}], "server": ["feddf"], **PROXY},
            "with hdfl not every client sends its whole model",
        ),
        ({"weighting": [{"fedldf": 1}], "server": ["fedbe"], **PROXY}, "with fedldf not every client sends its whole"),
        ({"client": ["fedrep"], "server": ["feddf"], **PROXY}, "fedrep never sends its head"),
        (
            {"client": ["fedrep", "fedamp"], "rounds": {"participation": 1.0}},
            "but 'fedrep' keeps part of its model private",
        ),
        ({"client": ["finetune", "fedbabu"]}, "trains all of the model in the usual way, and fedbabu in its own"),
        ({"client": [{"sgdm": {"reading": "mfl"}}, "finetune"], "local": {"momentum": 0.0}}, "which discards its own"),
        ({"client": ["fedamp", "finetune"], "rounds": {"participation": 1.0}}, "which discards what it trained"),
        ({"client": ["finetune", "pfedme"]}, "trains all of the model in the usual way, and pfedme in its own"),
        (
            {"client": ["scaffold", "fedrep"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
            "fedrep trains in its own way",
        ),
        (
            {
                "client": ["scaffold", "fedamp"],
                "rounds": {"participation": 1.0},
                "local": {"momentum": 0.0, "weight_decay": 0.0},
            },
            "option_2 needs training to start at w_g",
        ),
        (
            {"client": ["fedprox", "fedfomo"], "data": {"client_val_frac": 0.2}},
            "not the global one that 'fedprox' reads",
        ),
        (
            {"client": ["fedadp", "fedfomo"], "data": {"client_val_frac": 0.2}},
            "not the global one that 'fedadp' reads",
        ),
        ({"client": ["apple", "moon"], "rounds": {"participation": 1.0}}, "not the global one that 'moon' reads"),
        ({"client": ["sgdm", {"fedprox": {"official_sgd": True}}], "local": {"momentum": 0.0}}, "official_sgd: false"),
        (
            {"server": ["fedlws", "step_size", "fedavgm"]},
            "server.2: fedavgm remembers updates, which fedlws before it has",
        ),
    ],
    ids=str,
)
def test_what_cannot_compose_is_refused_with_the_reason(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        tiny(**changes)


def test_scaffold_goes_with_a_personal_model_beside_it(ran):
    """Ditto's global model is that of SCAFFOLD alone."""
    plain = {"local": {"momentum": 0.0, "weight_decay": 0.0}}
    both, alone = (ran(client=client, **plain).server.value for client in (["scaffold", "ditto"], ["scaffold"]))
    assert torch.equal(both, alone)


def test_a_private_head_is_not_drawn_to_the_servers(tmp_path):
    """Where a round takes one step of the head and one of the body, each starts where FedProx holds it: nothing pulls."""
    alike = {"rounds": {"participation": 1.0}, "local": {"batch_size": 1000, "epochs": 1}}
    held = [
        simulate(tiny(client=[{"fedrep": {"head_epochs": 1}}, {"fedprox": {"mu": mu}}], **alike), tmp_path / str(mu))
        for mu in (0.5, 0.0)
    ]
    assert held[0].sha256() == held[1].sha256()


def test_fednova_keeps_what_ldawa_shrinks(tmp_path):
    """Clients of as many steps have equal normalisers, and FedNova then changes nothing."""
    alike = {"data": {"partition": {"iid_equal": {"clients": 8}}}}
    shrunk, both = (
        simulate(tiny(weighting=weighting, **alike), tmp_path / str(i)).server.value
        for i, weighting in enumerate(([{"ldawa": {"warmup": 0}}], [{"ldawa": {"warmup": 0}}, "fednova"]))
    )
    plain = simulate(tiny(weighting=["fednova"], **alike), tmp_path / "plain").server.value
    assert torch.allclose(both, shrunk, atol=1e-6)
    assert not torch.allclose(both, plain, atol=1e-3)


def test_weights_are_refined_in_one_order(tmp_path):
    """Of the base weights, then FedDisco, then CCN, however they are listed."""
    stack = [{"fedavg": {"weights": "uniform"}}, {"feddisco": {"a": 0.1, "b": 0.2}}, "ccn"]
    hashes = [
        simulate(tiny(weighting=order), tmp_path / str(i)).sha256() for i, order in enumerate((stack, stack[::-1]))
    ]
    hashes += [
        simulate(tiny(weighting=part), tmp_path / f"part{i}").sha256() for i, part in enumerate((stack[:1], stack[:2]))
    ]
    assert hashes[0] == hashes[1]
    assert len({*hashes}) == 3


def test_clients_are_selected_before_their_layers(tmp_path):
    """However the two are listed, every layer is sent, by a client that HDFL has taken."""
    stack = [{"fedldf": 1}, {"hdfl": {"n": 1, "select": "by_loss"}}]
    ran = [simulate(tiny(weighting=order), tmp_path / str(i)) for i, order in enumerate((stack, stack[::-1]))]
    assert ran[0].sha256() == ran[1].sha256()
    assert (table(tmp_path / "0", "layers")["update_norm"] > 0).all()


def test_scaffold_with_ccn_and_fedldf(tmp_path):
    """ν is 1/K, and the mean of the control variates stays uniform and whole."""
    config = tiny(
        client=["scaffold"], weighting=["ccn", {"fedldf": 2}], server=["fedlws"], record={"traces": "rounds"},
        local={"momentum": 0.0, "weight_decay": 0.0},
    )  # fmt: skip
    federation = simulate(config, tmp_path)
    rounds = [Traced(tmp_path, t, federation) for t in range(3)]
    for round_ in rounds:
        factor = round_.note("ccn", "factor")
        np.testing.assert_allclose(round_.note("ccn", "lambda"), factor / factor.sum(), rtol=1e-12)
    control = federation.server.layers.state_dict(federation.server.shared["scaffold"])
    for name in rounds[0].parameters:
        changes = [np.mean([c.upload[f"scaffold.{name}"] for c in round_.clients], axis=0) for round_ in rounds]
        np.testing.assert_allclose(control[name], 3 / 8 * sum(changes), atol=1e-6)


@pytest.mark.parametrize("step", [{"fixed_shrink": 0.9}, {"awd": 0.2}, {"adadecay": 0.1}, {"fedlws": 0.3}], ids=str)
def test_what_stays_with_the_clients_is_not_shrunk(step, ran):
    server = ran(client=["fedbabu"], server=[step]).server
    plain = ran(client=["fedbabu"]).server
    head = server.layers.span("head")
    assert torch.equal(server.value[head], plain.value[head])
    assert not torch.equal(server.value, plain.value)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"model": {"bn_stats": "local"}}, "evaluated with its initial ones"),
        (
            {
                "client": ["fedamp"],
                "weighting": ["ccn", {"fedldf": 2}],
                "server": ["fedlws"],
                "rounds": {"participation": 1.0},
            },
            "ccn and fedlws only affect the global model",
        ),
    ],
    ids=["local statistics", "models of their own"],
)
def test_what_reaches_no_client_or_no_test_warns(changes, warning):
    with pytest.warns(UserWarning, match=warning):
        prepare(tiny(**changes))


SENDERS = 2
STACK = {
    "weighting": ["fednova", {"ccn": {"temperature": 0.1}}, {"feddisco": {"a": 0.1, "b": 0.2}}, {"fedldf": SENDERS}],
    "server": [{"fedavgm": 0.5}, {"fedlws": {"beta": 0.3}}],
}


def recomputed(round_: Traced) -> State:
    """FedDisco and then CCN, whatever the list says, normalised directions over each layer's uploaders, momentum, then
    shrinking with τ over the uploaders. CCN sees FedDisco's weights in the place of p."""
    before, clients = round_.before, round_.clients
    factor, shares = round_.note("ccn", "factor"), round_.note("feddisco", "discrepancy")
    disco = np.maximum(0, round_.p - 0.1 * shares + 0.2)
    lam = factor * disco / disco.sum()
    np.testing.assert_allclose(round_.note("ccn", "lambda"), lam / lam.sum(), rtol=1e-9)
    steps = np.array([len(c.steps) for c in clients])
    applied = (steps - 9 * (1 - 0.9**steps)) / 0.1
    after = fedavg(round_)
    for unit, names in UNITS.items():
        updates = [minus(c.model, before) for c in clients]
        order = np.argsort([-norm(u, names) for u in updates], kind="stable")[:SENDERS]
        weights = lam[order] / lam[order].sum()
        tau_eff = weights @ applied[order]
        for name in names:
            after[name] = before[name] + tau_eff * sum(
                w * updates[k][name] / applied[k] for w, k in zip(weights, order, strict=True)
            )
        for name in (n for n in after if n.startswith(f"{unit}.norm.") and n not in names):
            sent = [clients[k].model[name] for k in order]
            after[name] = np.max(sent, axis=0) if name.endswith("tracked") else weights @ np.stack(sent)
    return after


def test_one_round_of_everything(tmp_path):
    config = tiny(**STACK, record={"traces": "rounds"})
    round_ = Traced(tmp_path, 2, simulate(config, tmp_path))
    velocity = dict.fromkeys(round_.parameters, 0.0)
    for t in range(3):
        update = minus(recomputed(round_.at(t)), round_.at(t).before)
        velocity = {n: 0.5 * v + update[n] for n, v in velocity.items()}
    expected = recomputed(round_) | {n: round_.before[n] + v for n, v in velocity.items()}
    for names in UNITS.values():
        updates = [minus(c.model, round_.before) for c in round_.clients]
        order = np.argsort([-norm(u, names) for u in updates], kind="stable")[:SENDERS]
        centre = {n: np.mean([updates[k][n] for k in order], axis=0) for n in names}
        tau = np.mean([norm(minus({n: updates[k][n] for n in names}, centre), names) for k in order])
        old, moved = norm(round_.before, names), norm(minus(expected, round_.before), names)
        expected |= {n: old / (0.3 * tau * moved + old) * expected[n] for n in names}
    for name, value in expected.items():
        np.testing.assert_allclose(round_.after[name], value, atol=4e-6 * max(1, np.abs(value).max()), err_msg=name)
