"""FedLDF."""

import pickle

import numpy as np
import pytest
import torch
from conftest import simulate, table, tiny
from toy import TWO_LAYERS, UPDATES, ToyCohort, noted, planned, toy_server

from raysim.config import ConfigError
from raysim.federation import Federation
from raysim.methods.fedldf import FedLDF


def cohort(updates=UPDATES) -> ToyCohort:
    return ToyCohort(toy_server(TWO_LAYERS), updates)


@pytest.mark.parametrize(
    ("n", "uploads", "result"),
    [
        (1, [[1, 0], [0, 0], [0, 1]], [4.0, 2.0]),
        (2, [[1, 0], [1, 1], [0, 1]], [3.5, 3.0]),  # clients 2 and 3 both stand still in layer 1: the lower id sends
        (3, [[1, 1]] * 3, [3.25, 3.25]),
        (9, [[1, 1]] * 3, [3.25, 3.25]),
    ],
)
def test_golden_numbers(n, uploads, result):
    toy = cohort()
    assert planned(FedLDF(n), toy).tolist() == pytest.approx(result, abs=1e-12)
    assert noted(toy.server, "uploads").tolist() == uploads
    assert noted(toy.server, "divergence").tolist() == [[1, 0], [0, 1], [0, 2]]


def test_identical_clients_and_clients_that_stand_still():
    for update in ([0.5, -1.0], [0.0, 0.0]):
        same = planned(FedLDF(1), cohort([update] * 3))
        torch.testing.assert_close(same, cohort().server.value + torch.tensor(update), rtol=0, atol=1e-12)


def test_metrics_compare_layers_and_choose_alike():
    """They divide a layer's divergences by one number, so that only what is recorded can differ."""
    server = {"value": [3.0, 0.5]}
    notes = {}
    for metric in ("l2", "l2_rms", "relative"):
        toy = ToyCohort(toy_server(TWO_LAYERS, **server))
        planned(FedLDF(1, metric), toy)
        notes[metric] = noted(toy.server, "divergence"), noted(toy.server, "uploads")
    assert notes["relative"][0].tolist() == [[1 / 3, 0], [0, 2], [0, 4]]
    assert notes["l2_rms"][0].tolist() == notes["l2"][0].tolist()  # of one parameter each
    assert torch.equal(notes["relative"][1], notes["l2"][1])


def run(folder, **changes):
    """A short run: its federation, `uploads` and `divergence` [rounds, K, L], and the bytes of every round."""
    federation = simulate(tiny(**changes), folder)
    server, notes = federation.server, table(folder, "notes")
    shape = (server.rounds, federation.cohort_size, server.layers.L)
    values = {name: notes["value"][notes["name"] == name].reshape(shape) for name in ("uploads", "divergence")}
    traffic = {name: column.reshape(shape[:2]).sum(1) for name, column in table(folder, "traffic").items()}
    return federation, values, traffic


def test_every_layer_is_sent_n_times_and_its_bytes_are_counted(tmp_path):
    n, fedldf = 2, {"weighting": [{"fedldf": 2}]}
    federation, notes, traffic = run(tmp_path, **fedldf)
    layers, (_, K, L) = federation.server.layers, notes["uploads"].shape
    assert (notes["uploads"].sum(1) == n).all()
    asked = traffic["up_params"] + traffic["up_scalars"] + traffic["down_masks"]
    assert (asked == n * layers.P * 4 + K * L * 4 + K * -(-L // 8)).all()
    assert (traffic["up_buffers"] == n * layers.B * 4).all()
    assert (traffic["down_params"] == K * layers.P * 4).all()


def test_what_actors_hand_over_is_what_clients_send(tmp_path, warm_ray, monkeypatch):
    """With an actor for each client, the objects that they put into Ray's store for the sum have the ledger's bytes, up
    to their names and headers; the first client's actor adds the others' to its own, which stays."""
    import ray

    n, model = 2, {"name": "mlp", "options": {"hidden": [300, 300]}}  # in which names are nothing
    config = tiny(weighting=[{"fedldf": n}], model=model, engine={"ray": {"clients_per_actor": 1, "fan_in": 8}})
    federation = Federation(config, tmp_path, make_engine=warm_ray)
    handed, real = [], federation.engine.call

    def call(asked):
        result = real(asked)
        if asked.method == "partial":
            [client] = asked.args[0]
            handed.append((federation.t, client, result))
        return result

    monkeypatch.setattr(federation.engine, "call", call)
    rounds = []
    while federation.step() is not None:
        rounds.append({client: len(pickle.dumps(ray.get(ref))) for _, client, ref in handed})
        handed.clear()
    federation.close()
    traffic, layers, K = table(tmp_path, "traffic"), federation.server.layers, federation.cohort_size
    for t, sizes in enumerate(rounds):
        of_round = {name: column[traffic["round"] == t] for name, column in traffic.items()}
        sent = dict(zip(of_round["client"].tolist(), of_round["up_params"].tolist(), strict=True))
        assert sizes.keys() == sent.keys()
        assert sum(sent.values()) == n * layers.P * 4
        scalars = of_round["up_scalars"].sum() + of_round["down_masks"].sum()
        assert scalars == K * layers.L * 4 + K * -(-layers.L // 8)
        for client in sorted(sizes)[1:]:
            assert 0 <= sizes[client] - sent[client] < 1000
        assert sizes[min(sizes)] < 1000
    assert len({tuple(sizes.values()) for sizes in rounds}) > 1  # not the same layers every time


def test_l2_rms_is_per_parameter(tmp_path):
    _, l2, _ = run(tmp_path / "l2", weighting=[{"fedldf": 1}])
    federation, rms, _ = run(tmp_path / "rms", weighting=[{"fedldf": {"top_n": 1, "metric": "l2_rms"}}])
    sizes = np.array([8 * 9 + 3 * 8, 16 * 72 + 3 * 16, 4 * 64 + 4])
    np.testing.assert_allclose(rms["divergence"], l2["divergence"] / np.sqrt(sizes), rtol=1e-12)
    assert (rms["uploads"] == l2["uploads"]).all()
    assert federation.server.layers.counts.tolist() == sizes.tolist()


@pytest.mark.parametrize(("method", "field"), [("fedldf", "top_n"), ("random_layer", "n"), ("hdfl", "n")])
def test_of_a_round_one_client_sends_or_several_but_not_more_than_there_are(method, field):
    """Three of the federation's eight clients take part."""
    assert getattr(tiny(weighting=[{method: 3}]).weighting[0], field) == 3
    for n, fault in ((0, "at least one client must send"), (4, "but a round has 3 clients. With 3 it is FedAvg")):
        with pytest.raises(ConfigError, match=f"{field} is {n}[;,] {fault}"):
            tiny(weighting=[{method: n}])
