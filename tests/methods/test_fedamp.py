"""FedAMP."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import simulate, table, tiny
from quadratics import Quadratics, quadratics
from toy import ONE_LAYER, UPDATES, W, toy_server, vector

from raysim.config import ConfigError
from raysim.host.download import PeerModels, mixed
from raysim.host.messages import TrainRequest
from raysim.methods.fedamp import FedAMP, attraction

ALL = {"participation": 1.0}
MODELS = vector(W) + vector(UPDATES)  # [3, 2]
SQUARED = torch.cdist(MODELS, MODELS) ** 2


class Bank:
    """Models at hand."""

    def __init__(self, *clients: int):
        self.clients = clients

    def distances(self, clients):
        return SQUARED[list(clients)][:, list(clients)]


def cloud(models: torch.Tensor, weights: torch.Tensor, client: int) -> torch.Tensor:
    """u_i of rows `models` as a host computes it."""
    objects = [{"value": model.numpy()} for model in models]
    visit = TrainRequest(None, (client,), model_index={i: i for i in range(len(models))})
    peers = PeerModels(visit, client, models[0], objects)
    return mixed(peers, client, tuple(enumerate(weights[client].tolist())), models.shape[1])


def test_golden_numbers():
    weights = attraction(SQUARED, alpha=0.5, sigma=4.0)
    expected = vector([[0, 0.0758163, 0.0358131], [0.0758163, 0, 0.0131749], [0.0358131, 0.0131749, 0]])
    torch.testing.assert_close(weights, expected, rtol=0, atol=5e-8)
    torch.testing.assert_close(cloud(MODELS, weights, 0), vector([3.8883706, 4.0041901]), rtol=0, atol=5e-8)


def test_like_clients_keep_their_model_whatever_the_weights():
    models = MODELS[:1].expand(3, -1)
    weights = attraction(torch.zeros(3, 3).double(), alpha=1000.0, sigma=0.1)
    assert (weights.fill_diagonal_(1e4) == 1e4).all()
    assert torch.equal(cloud(models, weights, 1), models[1])


def test_wide_or_weak_attraction_is_none():
    """σ → ∞ and α → 0: u_i = w_i."""
    for alpha, sigma in ((0.5, 1e12), (1e-12, 4.0)):
        near = cloud(MODELS, attraction(SQUARED, alpha, sigma), 2)
        torch.testing.assert_close(near, MODELS[2], rtol=0, atol=1e-11)


def test_clip_leaves_a_convex_mixture():
    raw, clipped = (attraction(SQUARED, 1000.0, 4.0, clip) for clip in (False, True))
    assert raw.sum(1).min() > 1  # own weights are negative
    torch.testing.assert_close(clipped.sum(1), vector([1.0, 1.0, 1.0]))
    torch.testing.assert_close(clipped[0] / clipped[0, 1], raw[0] / raw[0, 1])
    assert torch.equal(attraction(SQUARED, 0.5, 4.0, True), attraction(SQUARED, 0.5, 4.0, False))  # nothing to clip


def test_clients_without_a_model_are_sent_the_global_one():
    server = toy_server(ONE_LAYER)
    method = FedAMP(0.5, 1.0, 4.0)
    assert method.downlink((0, 1, 2), Bank(), server).mix is None
    down = method.downlink((0, 1, 2), Bank(0, 2), server)
    c = 0.5 / 4 * math.exp(-SQUARED[0, 2] / 4)
    assert down.models == (0, 2)
    assert down.mix.flatten().tolist() == pytest.approx([0, c, 0, 0, c, 0])
    [note] = server.scratch.notes
    assert (note.name, note.axes, note.clients) == ("weights", ("client", "peer"), (0, 1, 2))


def test_ends_between_its_optimum_and_the_cloud():
    """min a/2 (w − b)² + λ/(2α) (w − u)²."""
    federation = Quadratics([FedAMP(alpha=2.0, lam=3.0)], [[4.0]], [[1.0]], steps=200)
    w = federation.visit(federation.run(0, [5.0])).value.item()
    assert w == pytest.approx((4.0 * 1.0 + 1.5 * 5.0) / (4.0 + 1.5), abs=1e-9)


@quadratics()
@pytest.mark.parametrize(("init", "start"), [("own", 7.0), ("cloud", 5.0)])
def test_starts_and_is_tested_from_its_own_model_or_the_cloud(init, start):
    federation = Quadratics([FedAMP(init=init)], [[4.0]], [[1.0]])
    newcomer = federation.run(0, [5.0])
    federation.stack.personal(newcomer)
    assert newcomer.params.item() == 5.0
    federation.states[0].previous = vector([7.0])
    run = federation.run(0, [5.0])
    federation.stack.personal(run)
    assert run.params.item() == start
    w = federation.visit(run).value.item()
    assert w == pytest.approx(start - 0.1 * (4.0 * (start - 1.0) + (start - 5.0) / 1000))
    federation.stack.personal(run)
    assert run.params.item() == w  # right after training


def test_buffers_are_the_clients_own():
    """Signed weights could make a running variance negative."""
    weights = attraction(SQUARED, alpha=0.5, sigma=4.0)
    objects = [{"value": model.numpy()} for model in MODELS]
    peers = PeerModels(TrainRequest(None, (0,), model_index={i: i for i in range(3)}), 0, MODELS[0], objects)
    mix = mixed(peers, 0, tuple(enumerate(weights[0].tolist())), 1)  # the second number is a buffer
    assert mix.tolist() == pytest.approx([3.8883706, 4.0])


def test_weights_are_recorded_and_models_are_counted(tmp_path):
    federation = simulate(tiny(client=["fedamp"], rounds=ALL), tmp_path)
    notes, traffic = table(tmp_path, "notes"), table(tmp_path, "traffic")
    assert sorted(set(zip(notes["round"].tolist(), notes["client"].tolist(), strict=True))) == [
        (t, c) for t in (1, 2) for c in range(8)
    ]
    model = 4 * federation.server.layers.P
    assert (traffic["up_params"] == model).all()
    assert (traffic["down_params"] == model).all()  # u_i in the place of the global model


def test_needs_all_clients_and_its_own_start():
    with pytest.raises(ConfigError, match=r"not 0\.4 of them"):
        tiny(client=["fedamp"])
    with pytest.raises(ConfigError, match="set init: cloud"):
        tiny(client=["fedamp", "fedala"], rounds=ALL)
    with pytest.raises(ConfigError, match=r"fedamp\.sigma: must be a number > 0"):
        tiny(client=[{"fedamp": {"sigma": 0.0}}], rounds=ALL)
    assert tiny(client=[{"fedamp": {"init": "cloud"}}, "fedala"], rounds=ALL)
    assert FedAMP().check(SimpleNamespace(participation=1.0, client=())) is None
