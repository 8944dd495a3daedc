"""FedBABU and FedRep: the head that is never sent."""

import pytest
import torch
from case import Traced
from conftest import simulate, tiny
from runs import batches, local_run

from raysim.core.layers import LayerMap
from raysim.core.local_run import ClientState
from raysim.federation.round import evaluate_personal
from raysim.methods.fedbabu import FedBABU
from raysim.methods.fedrep import FedRep
from raysim.store import tables

HEAD = 64 * 4 + 4  # parameters of the tiny net's last layer
TESTS = {"data": {"client_test_frac": 0.25}, "evaluate": {"personal": "after_init"}}


@pytest.mark.parametrize("method", ["fedbabu", "fedrep"])
def test_the_body_is_what_travels(method, tmp_path):
    federation = simulate(tiny(client=[method]), tmp_path)
    traffic = tables.read(tmp_path, "traffic")
    for column in ("up_params", "down_params"):
        assert set(traffic[column].to_pylist()) == {4 * (federation.server.layers.P - HEAD)}


def test_fedbabus_head_is_the_first_one_everywhere(tmp_path):
    federation = simulate(tiny(client=["fedbabu"], record={"traces": [1, 2, 3]}), tmp_path)
    first = Traced(tmp_path, 0, federation).before
    for t in range(3):
        round_ = Traced(tmp_path, t, federation)
        for state in (round_.before, round_.after, *(c.model for c in round_.clients)):
            assert all((state[n] == first[n]).all() for n in ("head.weight", "head.bias"))
        assert (round_.after["conv1.conv.weight"] != round_.before["conv1.conv.weight"]).any()


def test_fedreps_head_is_the_clients_own(tmp_path):
    """It goes on from where the client left it, differs between clients, and the server's stays as it was drawn."""
    federation = simulate(tiny(client=["fedrep"], record={"traces": [1, 2, 3]}), tmp_path)
    rounds = [Traced(tmp_path, t, federation) for t in range(3)]
    left = {}
    for round_ in rounds:
        assert (round_.after["head.weight"] == rounds[0].before["head.weight"]).all()
        for client in round_.clients:
            assert (client.init["head.weight"] == left.get(client.id, rounds[0].before["head.weight"])).all()
            assert (client.model["head.weight"] != client.init["head.weight"]).any()
            left[client.id] = client.model["head.weight"]
    heads = list(left.values())
    assert all((a != b).any() for i, a in enumerate(heads) for b in heads[:i])


@pytest.mark.parametrize("method", [FedBABU(), FedRep(0)])
def test_without_a_head_it_is_fedavg(method, monkeypatch):
    """Freezing nothing."""

    def trained(methods):
        run = local_run(methods, momentum=0.9)
        run.receive()
        run.stack.train(run)
        return run.params.clone()

    frozen = trained([method])
    monkeypatch.setattr(LayerMap, "span", lambda self, part: slice(0, self.P if part != "head" else 0))
    assert torch.equal(trained([method]), trained([]))
    assert not torch.equal(frozen, trained([]))


def test_fedrep_trains_the_head_first_then_the_body():
    method = FedRep(head_epochs=2)
    run = local_run([method], momentum=0.9, weight_decay=0.1)
    run.receive()
    head, body = run.layers.span("head"), run.layers.span("body")
    seen = []
    step = run.stack.step

    def watched(run, x, y):
        before = run.params.clone()
        step(run, x, y)
        moved = run.params != before
        seen.append((bool(moved[head].any()), bool(moved[body].any())))

    run.stack.step = watched
    run.stack.train(run)
    assert seen == [(True, False)] * 6 + [(False, True)] * 3  # three batches an epoch
    assert [len(batches(run, purpose)) for purpose in ("head", "batches")] == [6, 3]


def test_a_head_epoch_needs_no_gradient_of_the_body():
    run = local_run([FedRep()])
    run.receive()
    run.fit(1, only="head")
    assert not run.grad[run.layers.span("body")].any()


def test_the_head_pass_does_not_reorder_the_bodys_batches():
    orders = []
    for method in (FedRep(3), FedRep(0)):
        run = local_run([method])
        run.receive()
        run.stack.train(run)
        orders.append(torch.cat(batches(run, "batches")))
    assert torch.equal(*orders)


def test_fedbabu_fine_tunes_for_the_test_alone(tmp_path):
    federation = simulate(tiny(client=["fedbabu"], **TESTS), tmp_path / "plain")
    runs = {
        part: simulate(tiny(client=[{"fedbabu": {"ft_epochs": 2, "ft_part": part}}], **TESTS), tmp_path / part)
        for part in ("all", "head")
    }
    losses = {part: sum(s.loss for s in evaluate_personal(run.run, 3)[0].values()) for part, run in runs.items()}
    losses["none"] = sum(s.loss for s in evaluate_personal(federation.run, 3)[0].values())
    assert len(set(losses.values())) == 3
    assert {run.sha256() for run in runs.values()} == {federation.sha256()}


def test_fedreps_personal_model_is_the_body_under_the_own_head(tmp_path):
    """Equal bodies, other heads: clients that have taken part score otherwise than the global model would."""
    federation = simulate(tiny(client=["fedrep"], **TESTS), tmp_path)
    run = local_run([FedRep()], state=ClientState(personal=torch.ones(15, dtype=torch.float64)))
    run.stack.personal(run)
    assert run.params[run.layers.span("head")].tolist() == [1.0] * 15
    assert torch.equal(run.params[run.layers.span("body")], run.received[run.layers.span("body")])
    assert len(evaluate_personal(federation.run, 3)[0]) == 8
