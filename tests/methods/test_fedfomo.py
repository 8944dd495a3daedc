"""FedFomo."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import simulate, table, tiny
from quadratics import Quadratics, quadratics
from toy import ToyCohort, noted, toy_server, vector

from raysim.config import ConfigError
from raysim.core.client import Upload
from raysim.core.local_run import ClientState
from raysim.core.pairs import Pairs, sparse
from raysim.core.server import RoundScratch
from raysim.federation import builder
from raysim.methods.fedfomo import AddPreferences, FedFomo, Origin

VAL = {"client_val_frac": 0.2}


def client(peers: dict[int, float], old: float = 4.0, own: float = 3.0):
    """Client 0 of four, whose loss is ½ (w − 1)², on validation samples too.

    It started at `old` last time, came to `own`, and is sent `peers`.
    """
    federation = Quadratics([FedFomo()], [[1.0]] * 4, [[1.0]] * 4)
    federation.states[0] = ClientState({"fedfomo": Origin(vector([old]))}, vector([own]))
    run = federation.run(0, [-50.0])  # the global model, which nobody is sent
    run.peers = {peer: vector([value]) for peer, value in peers.items()}
    return federation, run


def test_weights_by_what_models_gain_per_distance():
    """L(4) = 4.5: its own model 3 gains 2.5 over 1, a peer at 2 gains 4 over 2, one at 6 loses 8 over 2."""
    federation, run = client({0: 3.0, 1: 2.0, 3: 6.0})
    with quadratics():
        federation.stack.start(run)
    a = [2.5 / 1.00001, 4.0 / 2.00001, 0.0, -8.0 / 2.00001]
    b = [a[0] / (a[0] + a[1]), a[1] / (a[0] + a[1])]
    assert run.params.item() == pytest.approx(b[0] * 3.0 + b[1] * 2.0, abs=1e-12)
    assert run.state(FedFomo()).value.item() == run.params.item()  # the next θ_old
    upload = Upload(run.value)
    FedFomo().finish(run, upload)
    assert upload.scalars["fedfomo"].to_dense().tolist() == pytest.approx(a, abs=1e-12)


@pytest.mark.parametrize("peers", [{}, {1: 6.0, 2: -10.0}, {0: 3.0}])
def test_goes_on_from_its_own_model_where_no_other_helps(peers):
    federation, run = client(peers)
    with quadratics():
        federation.stack.start(run)
    assert run.params.item() == 3.0
    [note] = run.notes
    assert (note.name, note.value.tolist()) == ("fell_back", [1.0 if 0 not in peers else 0.0])


def test_newcomers_start_from_the_global_model():
    federation = Quadratics([FedFomo()], [[1.0]] * 2, [[1.0]] * 2, start=[9.0])
    run = federation.run(1)
    federation.stack.start(run)
    assert run.params.item() == 9.0
    assert run.state(FedFomo()).value.item() == 9.0


def bank(*clients: int) -> SimpleNamespace:
    return SimpleNamespace(clients=clients)


def server(Q: list[list[float]]):
    made = toy_server(labels=[[1]] * len(Q))
    AddPreferences().prepare(made)
    assert not len(made.memory["fedfomo"]["keys"])  # an identity, until somebody has taken part
    preferences = sparse(torch.eye(len(Q)) + vector(Q))
    made.memory["fedfomo"] = Pairs.none(len(Q)).plus(range(len(Q)), preferences).memory
    return made


def test_sends_the_models_of_largest_preference_among_those_there_are():
    Q = [[0, 3, 0.5, 2], [0, 0, 0, 0], [5, 5, 5, 5], [0, 0, -1, 0]]
    method = FedFomo(models=2)
    down = method.downlink((0, 1, 3), bank(0, 1, 2, 3), server(Q))
    assert down.peers == ((1, 3), (0, 1), (0, 3))  # its own counts 1 from the start; equals: the lower id
    down = method.downlink((0, 1, 3), bank(0, 2, 3), server(Q))
    assert down.peers == ((0, 3), (), (0, 3))  # client 1 has not taken part: it gets the global model
    assert FedFomo().downlink((0,), bank(0, 1, 2, 3), server(Q)).peers == ((0, 1, 2, 3),)
    assert FedFomo().downlink((0, 1), bank(), server(Q)).peers == ((), ())


def test_epsilon_sends_others_instead():
    Q = [[9.0, 8, 1, 1, 1, 1]] * 6

    def drawn(epsilon: float, t: int = 0) -> tuple[int, ...]:
        return FedFomo(2, epsilon).downlink((0,), bank(*range(6)), replace(server(Q), scratch=RoundScratch(t))).peers[0]

    assert drawn(0.0) == (0, 1)
    assert len(drawn(1.0)) == 2
    assert not {*drawn(1.0)} & {0, 1}
    share = sum(len({*drawn(0.3, t)} - {0, 1}) for t in range(400)) / 800
    assert abs(share - 0.3) < 0.06  # its standard deviation is 0.016


def test_preferences_add_up():
    made = toy_server(labels=[[1]] * 3)
    AddPreferences().prepare(made)
    cohort = ToyCohort(made, scalars={"fedfomo": vector([[1.0, 2.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 4.0]])})
    for _ in range(2):
        target = AddPreferences().apply(made.value, cohort.by_size(), cohort, made)
    assert target is made.value
    preferences = Pairs.of(3, made.memory["fedfomo"])
    found = [
        {peer: sums[i].item() for i, peer in enumerate(peers.tolist())}
        for peers, sums in map(preferences.row, range(3))
    ]
    assert found == [{0: 3.0, 1: 4.0}, {1: -1.0}, {2: 9.0}]  # of those that have met, and the 1 for a client's own
    made.scratch.notes.pop()
    assert noted(made, "preference").to_dense().tolist()[0] == [1.0, 2.0, 0.0]


def test_what_pairs_have_not_met_is_nowhere(tmp_path):
    """Forty clients of which ten take part in each of four rounds, sent three models each: not 1600 numbers, but those of
    at most 4 · 10 · (3 + 1) pairs; noted are those that met, or none of them."""
    data = {
        **VAL,
        "partition": {"iid_equal": {"clients": 40}},
        "name": {"synthetic": {"samples": 800, "shape": [1, 8, 8]}},
    }
    rounds = {"participation": 0.25, "total": 4}
    changes = {"client": [{"fedfomo": {"models": 3}}], "data": data, "rounds": rounds}
    federation = simulate(tiny(**changes), tmp_path / "noted")
    assert 0 < len(federation.server.memory["fedfomo"]["keys"]) <= 160
    rows = table(tmp_path / "noted", "notes")
    assert 0 < (rows["name"] == "preference").sum() <= 120
    other = simulate(tiny(**changes, record={"pairs": False}), tmp_path / "not")
    assert not (table(tmp_path / "not", "notes")["name"] == "preference").any()
    assert other.sha256() == federation.sha256()


@pytest.mark.parametrize("method", ["fedfomo", "apple"])
def test_all_models_for_everybody_are_too_many_at_some_point(method, tmp_path, monkeypatch):
    """Eight clients that are sent eight models are 64 models a round."""
    changes = {"client": [method], "data": VAL, "rounds": {"participation": 1.0, "total": 1}}
    model = 4 * simulate(tiny(**changes), tmp_path).server.layers.S
    monkeypatch.setattr(builder, "SENT_BYTES", 64 * model - 1)
    with pytest.raises(
        ConfigError, match=r"models is null: each of 8 clients is sent the models of all 8.* models: 10"
    ):
        builder.prepare(tiny(**changes))
    builder.prepare(tiny(**changes | {"client": [{method: {"models": 8}}]}))
    monkeypatch.setattr(builder, "SENT_BYTES", 64 * model)
    builder.prepare(tiny(**changes))


def test_models_sent_are_counted(tmp_path):
    """(1 + M) P a client and round once all have taken part, before that as in FedAvg; preferences are N scalars."""
    federation = simulate(tiny(client=[{"fedfomo": {"models": 3}}], data=VAL, rounds={"participation": 1.0}), tmp_path)
    traffic, model = table(tmp_path, "traffic"), 4 * federation.server.layers.P
    assert (traffic["up_params"] == model).all()
    assert (traffic["up_scalars"] == 4 * 8).all()
    assert traffic["down_params"].reshape(3, 8).tolist() == [[model] * 8, [3 * model] * 8, [3 * model] * 8]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [({}, "data.client_val_frac is 0"), ({"fields": {"models": 0}, "data": VAL}, r"fedfomo\.models: must be a whole number > 0"),
     ({"fields": {"epsilon": 2.0}, "data": VAL}, r"fedfomo\.epsilon: .* <= 1, but is 2")],
)  # fmt: skip
def test_refused(changes, fault):
    with pytest.raises(ConfigError, match=fault):
        tiny(client=[{"fedfomo": changes.get("fields", {})}], data=changes.get("data", {}))
