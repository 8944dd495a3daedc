"""How far clients are from their mean: the same bits where one host reads its models once and where hosts do it in turns."""

from typing import Any

import pytest
import torch
from conftest import tiny

import raysim.core.segments
from raysim.core import tree
from raysim.core.local_run import RoundInfo
from raysim.core.mixture import Mixture
from raysim.core.server import Downlink
from raysim.engine.collectives import HostedCohort
from raysim.engine.dispatcher import Dispatcher
from raysim.federation import Federation

CLIENTS = (0, 1, 3, 4, 6)


@pytest.fixture
def federation(tmp_path):
    federation = Federation(tiny(rounds={"total": 1}), tmp_path)
    yield federation
    federation.close()


def trained(federation: Federation) -> HostedCohort:
    dispatcher = Dispatcher(federation.engine, RoundInfo(3, 0, 1, 8, 0.1), CLIENTS, Downlink())
    return HostedCohort(federation.engine, dispatcher, dispatcher.train())


def mixtures(cohort: HostedCohort) -> dict[str, Mixture]:
    by_size, sent = cohort.by_size(), torch.ones(len(CLIENTS), cohort.layers.L, dtype=torch.bool)
    sent[1:, 0] = sent[::2, 1] = False
    nobody = sent.clone()
    nobody[:, 1] = False
    by_layer = torch.linspace(0.5, 1.5, len(CLIENTS) * cohort.layers.T).reshape(len(CLIENTS), -1).double()
    return {
        "by size": by_size,
        "uniform": cohort.uniform(),
        "by layer": by_size.scaled(by_layer, anchor=torch.full((cohort.layers.T,), 0.1).double()),
        "some send": by_size.select(cohort.layers.expand(sent)),
        "a layer that nobody sends": by_size.select(cohort.layers.expand(nobody)),
    }


@pytest.mark.parametrize("name", ["by size", "uniform", "by layer", "some send", "a layer that nobody sends"])
@pytest.mark.parametrize("small", [False, True])
def test_one_read_or_many(name, small, federation, monkeypatch):
    if small:  # many blocks of many runs
        monkeypatch.setattr(raysim.core.segments, "RUN", 16)
        monkeypatch.setattr(tree, "BLOCK", 100)
    cohort = trained(federation)
    mix = mixtures(cohort)[name]
    reduced, spread = cohort.reduce(mix), cohort.distances_to_mixture(mix.support())
    asked: list[Any] = []
    once = trained(federation)
    mix = mixtures(once)[name]
    call = federation.engine.call
    monkeypatch.setattr(federation.engine, "call", lambda c: (asked.append(c.method), call(c))[1])
    assert once.reduce(mix, distances_to=mix.support()).equal(reduced)
    assert once.distances_to_mixture(mix.support()).equal(spread)
    assert asked == ["sum_and_distances"]  # nothing else was asked of the host
    centre = once.reduce(mix.support())
    updates = once.gather()[:, : once.layers.P].double()
    mean = (centre - federation.server.value)[: once.layers.P].double()
    torch.testing.assert_close(spread, once.layers.norms(updates - mean), rtol=1e-5, atol=1e-7)


def test_models_need_not_lie_in_order(federation):
    """As after a client has been trained again."""
    cohort = trained(federation)
    mix = mixtures(cohort)["some send"]
    reduced, spread = cohort.reduce(mix), cohort.distances_to_mixture(mix.support())
    trained_models = federation.engine.hosts[0].trained
    order = torch.tensor([2, 0, 4, 1, 3])
    trained_models.updates[: len(CLIENTS)] = trained_models.updates[order].clone()
    trained_models.row = {client: int((order == row).nonzero()) for client, row in trained_models.row.items()}
    again = mixtures(cohort)["some send"]
    assert cohort.reduce(again).equal(reduced)
    assert cohort.distances_to_mixture(again.support()).equal(spread)
    assert cohort.reduce(again, distances_to=again.support()).equal(reduced)
    assert cohort.distances_to_mixture(again.support()).equal(spread)


def test_clients_that_agree_are_at_no_distance(federation):
    cohort = trained(federation)
    trained_models = federation.engine.hosts[0].trained
    trained_models.updates[:] = trained_models.updates[0].clone()
    moved = cohort.layers.norms(cohort.gather()[:, : cohort.layers.P])
    assert (cohort.distances_to_mixture(cohort.uniform()) <= 1e-6 * moved).all()
    assert (moved > 1e-3).all()


def test_sums_of_equal_weights_are_scaled_once():
    """Weights that differ stay as they are; so does what nobody sends."""
    rows = torch.tensor(
        [[0.25, 0.25, 0.25], [0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]
    ).double()
    pieces = [(i, i + 1, row.numpy()) for i, row in enumerate(rows)]
    unscaled, factors = tree.without_factors(pieces)
    assert factors == (0.25, 0.5, 1.0, 1.0, 2.0)
    for (_, _, before), (_, _, after), factor in zip(pieces, unscaled, factors, strict=True):
        assert (after * factor == before).all()
        assert factor == 1 or set(after) <= {0.0, 1.0}
