"""Observers of rounds, on vectors whose cosines and norms are known; and that they leave training alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from case import Traced
from conftest import simulate, tiny
from toy import TWO_LAYERS, UPDATES, ToyCohort, toy_server, vector

from raysim.analysis import INSTRUMENTS
from raysim.analysis.balance import Balance
from raysim.analysis.coherence import Coherence
from raysim.analysis.heterogeneity import Heterogeneity
from raysim.analysis.instrument import Instrument
from raysim.analysis.similarity import Similarity
from raysim.config import ConfigError
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.server import Server
from raysim.federation import MakeEngine
from raysim.methods.fedlws import FedLWS
from raysim.methods.fixed_shrink import FixedShrink
from raysim.registry import REGISTRY


class Cohort(ToyCohort):
    def dots(self, with_: torch.Tensor) -> torch.Tensor:
        return self.layers.dots(self.updates[:, : len(with_)], with_)

    def each(self, function: Callable[..., torch.Tensor], *payload: Any) -> torch.Tensor:
        return torch.stack([function(update, self.layers, *payload) for update in self.updates])


def seen(
    instrument: Instrument, server: Server, updates: Any = UPDATES, sizes: Sequence[int] = (1, 1, 2),
    mixture: Mixture | None = None, step: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """What the instrument notes of a round of the toy clients, by name."""
    cohort = Cohort(server, updates, sizes)
    mixture = mixture or cohort.by_size()
    target = cohort.reduce(mixture)
    after = step.apply(target, mixture, cohort, server) if step else target
    done: Any = SimpleNamespace(cohort=cohort, mixture=mixture, before=server.value, target=target, after=after)
    return {note.name: note.value.numpy()[()] for note in instrument.observe(done, server.population)}


def test_coherence_of_three_directions() -> None:
    """Updates along x, y and −y with λ = ¼, ¼, ½: the one pair that is not at right angles has the cosine −1."""
    found = seen(Coherence({"straight": (0, 1), "line": (1, 2), "alone": (2,)}), toy_server())
    pairs = 2 * (1 / 4) * (1 / 2) * -1
    assert found["paper"] == pytest.approx(pairs / 3)
    assert found["mean"] == pytest.approx(pairs / (1 - 1 / 16 - 1 / 16 - 1 / 4))
    np.testing.assert_allclose(found["client"], [0, -2 / 3, -1 / 2], atol=1e-12)
    assert found["mean_straight"] == pytest.approx(0, abs=1e-12)
    assert found["mean_line"] == pytest.approx(-1)
    assert found["paper_line"] == pytest.approx(pairs / 2)
    assert "mean_alone" not in found  # a single client has no pair


def test_coherence_leaves_out_whom_it_cannot_compare() -> None:
    still = seen(Coherence(), toy_server(), [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]])  # the second did not move
    assert still["mean"] == pytest.approx(1)
    assert still["paper"] == pytest.approx(2 * (1 / 4) * (1 / 2) / 2)
    np.testing.assert_allclose(still["client"], [1, np.nan, 1])
    assert not seen(Coherence(), toy_server(), [[1.0, 1.0], [0.0, 0.0]], [1, 1])
    # The second layer stays with the clients: along the first they agree.
    server = toy_server(TWO_LAYERS)
    first = Mixture.of(torch.ones(2), TWO_LAYERS).select(torch.tensor([[True, False]] * 2))
    assert seen(Coherence(), server, [[1.0, 5.0], [1.0, -5.0]], [1, 1], first)["mean"] == pytest.approx(1)


def test_heterogeneity_of_two_class_distributions() -> None:
    server = toy_server(labels=[[4, 0, 0], [0, 2, 2], [0, 0, 8]])
    found = seen(Heterogeneity(), server, mixture=Mixture.of(vector(1, 1, 2), server.layers))
    classes, every = np.array([1 / 4, 1 / 8, 5 / 8]), np.array([4, 2, 10]) / 16
    np.testing.assert_allclose(found["classes"], classes)
    np.testing.assert_allclose(found["cosine"], 1)  # λ are the sizes' shares, so the distributions agree
    np.testing.assert_allclose(found["overlap"], 1)
    uniform = seen(Heterogeneity(), server, mixture=Mixture.of(torch.ones(3), server.layers))
    mean = np.array([1 / 3, 1 / 6, 1 / 2])
    np.testing.assert_allclose(uniform["overlap"], 1 - np.abs(mean - every).sum() / 2)
    np.testing.assert_allclose(uniform["cosine"], mean @ every / np.linalg.norm(mean) / np.linalg.norm(every))


def test_balance_of_a_fixed_shrink() -> None:
    """w = (3, 4), d = (¼, −¾), γ = 0.9."""
    found = seen(Balance(), toy_server(), step=FixedShrink(0.9))
    gradient, decay = 0.9 * np.sqrt(0.0625 + 0.5625), 0.1 * 5
    assert found["gamma"] == pytest.approx(0.9)
    assert (found["norm"], found["moved"]) == pytest.approx((5, np.sqrt(0.625)))
    assert (found["gradient"], found["decay"]) == pytest.approx((gradient, decay))
    assert found["fedlaw_ratio"] == pytest.approx(gradient / decay)
    assert found["fedlws_ratio"] == pytest.approx(decay / gradient)
    assert found["tau"] == pytest.approx((np.sqrt(5) + np.sqrt(17) + np.sqrt(26)) / 9)


def test_the_ratios_are_negative_where_the_model_grows() -> None:
    """γ = 1.25: (1 − γ) ‖w‖ / (γ ‖d‖) = −0.25 · 5 / (1.25 · √0.625)."""
    found = seen(Balance(), toy_server(), step=FixedShrink(1.25))
    assert found["decay"] == pytest.approx(1.25)
    assert found["fedlws_ratio"] == pytest.approx(-1 / np.sqrt(0.625))
    assert found["fedlaw_ratio"] == pytest.approx(-np.sqrt(0.625))


def test_balance_where_the_weights_or_the_layers_shrink() -> None:
    server = toy_server()
    learned = Mixture.of(vector(1, 1, 2), server.layers).scaled(vector(0.9))  # as FedLAW's γ
    fixed, planned = seen(Balance(), server, step=FixedShrink(0.9)), seen(Balance(), server, mixture=learned)
    assert planned == pytest.approx(fixed)
    server = toy_server(TWO_LAYERS)
    found = seen(Balance(), server, step=FixedShrink(1.0, decrement=0.2))  # γ = 1, 0.8
    assert found["decay"] == pytest.approx(0.2 * 4)
    assert found["gradient"] == pytest.approx(np.hypot(0.25, 0.8 * 0.75))
    plain = seen(Balance(), server)
    assert "fedlaw_ratio" not in plain
    assert plain["fedlws_ratio"] == plain["decay"] == 0  # rounding is no shrinking


def test_balance_where_the_tensors_of_a_layer_shrink_differently() -> None:
    """As with L-DAWA: the γ of weight and bias, which are one layer, are 0.9 and 0.5; w = (3, 4), d = (¼, −¾)."""
    server = toy_server(LayerMap.of(torch.nn.Linear(1, 1)))
    found = seen(Balance(), server, mixture=Mixture.of(vector(1, 1, 2), server.layers).scaled(vector(0.9, 0.5)))
    assert found["gamma"] == pytest.approx(0.7)
    assert found["moved"] == pytest.approx(np.sqrt(0.625))
    assert found["gradient"] == pytest.approx(np.hypot(0.9 * 0.25, 0.5 * 0.75))
    assert found["decay"] == pytest.approx(np.hypot(0.1 * 3, 0.5 * 4))


def test_balance_counts_the_clients_and_tensors_that_are_sent() -> None:
    """Of head and body, one layer here, the body alone is sent; the third client sends nothing."""
    layers = TWO_LAYERS.regroup("model")
    mixture = Mixture.of(torch.ones(3), layers).select(torch.tensor([[True, False], [True, False], [False, False]]))
    found = seen(Balance(), toy_server(layers), [[1.0, 5.0], [4.0, -5.0], [100.0, 0.0]], mixture=mixture)
    assert found["tau"] == pytest.approx(1.5)
    shrunk = seen(Balance(), toy_server(layers), [[1.0, 5.0]] * 3, mixture=mixture, step=FixedShrink(0.5))
    assert shrunk["gamma"] == pytest.approx((0.5 + 1) / 2)  # the head stays


def test_balance_gives_the_ratio_that_fedlws_was_derived_from() -> None:
    """Of one layer, γ solves fedlws_ratio = β τ."""
    found = seen(Balance(), toy_server(), step=FedLWS(beta=0.3))
    assert found["fedlws_ratio"] == pytest.approx(0.3 * found["tau"])


@pytest.mark.parametrize(
    "changes",
    [
        {"client": [{"scaffold": {"c_update": "mean_grad"}}]},
        {"client": [{"sgdm": {"reading": "mfl"}}], "local": {"momentum": 0}},
        {"client": ["fedfomo"], "data": {"client_val_frac": 0.2}},
        {"client": ["apple"], "rounds": {"participation": 1}},
    ],
)
def test_balance_beside_server_halves_that_leave_the_model_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    record = {"instruments": ["balance"], "traces": [1]}
    federation = simulate(tiny(**changes, server=[{"fixed_shrink": {"gamma": 0.9}}], record=record), tmp_path)
    assert Traced(tmp_path, 0, federation).note("balance", "gamma") == pytest.approx(0.9)


def test_similarity_to_the_new_model() -> None:
    found = seen(Similarity(), toy_server())["client"]
    models, after = np.array([[4, 4], [3, 5], [3, 2]]), np.array([3.25, 3.25])
    np.testing.assert_allclose(found, models @ after / np.linalg.norm(models, axis=1) / np.linalg.norm(after))


def test_distances_to_a_mean_where_downloads_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A mean is the server's model and a mean update, while clients begin with a coarse copy of that model."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    @dataclass(frozen=True)
    class Distances(Instrument):
        reads_models = True

        def observe(self, done: Any, population: Any) -> Any:
            mix = done.cohort.by_size()
            mean = done.cohort.reduce(mix)[: done.cohort.layers.P]
            found.append((done.cohort.distances(mean), done.cohort.distances_to_mixture(mix)))
            return ()

    monkeypatch.setitem(REGISTRY.table("instrument"), "distances", Distances)
    simulate(tiny(download=[{"uniform": {"bits": 2}}], record={"instruments": ["distances"]}), tmp_path)
    for to_mean, to_mixture in found:
        torch.testing.assert_close(to_mean, to_mixture, rtol=1e-4, atol=1e-6)
    assert len(found) == 3


def test_similarity_of_what_is_sent() -> None:
    """The second layer stays with the clients. In the first one models at 4 and −4 meet a new one at 2."""
    first = Mixture.of(vector(3, 1), TWO_LAYERS).select(torch.tensor([[True, False]] * 2))
    found = seen(Similarity(), toy_server(TWO_LAYERS), [[1.0, 5.0], [-7.0, 9.0]], [3, 1], first)
    np.testing.assert_allclose(found["client"], [1, -1])


# ----------------------------------------------------------------------------------------------------------- whole runs

ALL = [{"coherence": {"groups": {"low": [0, 1, 2, 3]}}}, "heterogeneity", "balance", "similarity", "objective"]


def notes(folder: Path) -> list[tuple[Any, ...]]:
    from raysim.store import tables

    rows = tables.read(folder, "notes").to_pylist()
    return [tuple(row.values()) for row in rows if row["method"] in INSTRUMENTS]


def test_a_run_has_the_same_bits_with_and_without_instruments(tmp_path: Path, warm_ray: MakeEngine) -> None:
    plain = simulate(tiny(), tmp_path / "plain")
    watched = simulate(tiny(record={"instruments": ALL}), tmp_path / "watched")
    on_ray = tiny(record={"instruments": ALL}, engine={"ray": {"clients_per_actor": 2}})
    far = simulate(on_ray, tmp_path / "far", make_engine=warm_ray)
    assert plain.sha256() == watched.sha256()
    assert torch.equal(far.server.value, plain.server.value)
    assert notes(tmp_path / "watched") == notes(tmp_path / "far")
    assert {row[1] for row in notes(tmp_path / "watched")} == set(INSTRUMENTS)
    assert not notes(tmp_path / "plain")


def test_coherence_and_similarity_of_traced_models(tmp_path: Path) -> None:
    record = {"instruments": ["coherence", "similarity"], "traces": [2]}
    federation = simulate(tiny(server=["fedlws"], record=record), tmp_path)
    round_ = Traced(tmp_path, 1, federation)
    names = [s.name for s in federation.server.layers.tensors if s.kind == "parameter"]

    def flat(state: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([state[name].ravel() for name in names])

    before, after = flat(round_.load("before")), flat(round_.load("after"))
    models = np.stack([flat(client.model) for client in round_.clients])
    updates, lam = models - before, round_.p
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    pairs = np.outer(lam, lam) * (unit @ unit.T)
    np.fill_diagonal(pairs, 0)
    np.testing.assert_allclose(round_.note("coherence", "paper"), pairs.sum() / 3, rtol=1e-4)
    np.testing.assert_allclose(round_.note("coherence", "client"), pairs.sum(1) / lam / (1 - lam), rtol=1e-4)
    cosines = models @ after / np.linalg.norm(models, axis=1) / np.linalg.norm(after)
    np.testing.assert_allclose(round_.note("similarity", "client"), cosines, rtol=1e-6)


def test_objective_before_and_after_local_training(tmp_path: Path) -> None:
    """Of traced models, with the loss computed sample by sample."""
    federation = simulate(tiny(client=["fedala"], record={"instruments": ["objective"], "traces": [3]}), tmp_path)
    round_ = Traced(tmp_path, 2, federation)
    model, layers = federation.spec.network()
    model.eval()

    def loss(state: dict[str, np.ndarray], client: int) -> float:
        model.load_state_dict({s.name: torch.from_numpy(np.asarray(state[s.name])).float() for s in layers.tensors})
        rows = federation.partition.train[client]
        with torch.no_grad():
            p = model(federation.data.transform(torch.from_numpy(federation.data.x[rows]))).double().softmax(1).numpy()
        return float(-np.log(p[np.arange(len(rows)), federation.data.y[rows]]).mean())

    for name in ("before", "after"):
        states = [c.init if name == "before" else c.model for c in round_.clients]
        losses = [loss(state, c.id) for state, c in zip(states, round_.clients, strict=True)]
        assert round_.note("objective", name) == pytest.approx(round_.p @ losses, rel=1e-5)


def test_balance_of_a_learned_factor(tmp_path: Path) -> None:
    """Against the note of what adaptive GWS learned, and the traced models."""
    changes = {"weighting": [{"adaptive_gws": {"epochs": 3}}], "data": {"proxy": {"samples": 20}}}
    federation = simulate(tiny(**changes, record={"instruments": ["balance"], "traces": [2]}), tmp_path)
    round_ = Traced(tmp_path, 1, federation)
    gamma = round_.note("adaptive_gws", "gamma")[-1]
    names = [s.name for s in federation.server.layers.tensors if s.kind == "parameter"]
    before, after = (np.concatenate([round_.load(n)[name].ravel() for name in names]) for n in ("before", "after"))
    assert round_.note("balance", "gamma") == pytest.approx(gamma)
    gradient, decay = np.linalg.norm(after - gamma * before), abs(1 - gamma) * np.linalg.norm(before)
    assert round_.note("balance", "gradient") == pytest.approx(gradient, rel=1e-4)
    assert round_.note("balance", "decay") == pytest.approx(decay, rel=1e-4)
    assert round_.note("balance", "fedlaw_ratio") == pytest.approx(np.sign(1 - gamma) * gradient / decay, rel=1e-4)


def test_a_round_of_one_client(tmp_path: Path) -> None:
    """Coherence needs a pair, the others do not."""
    alone = tiny(rounds={"total": 1, "participation": 0.1}, record={"instruments": ["coherence", "similarity"]})
    simulate(alone, tmp_path / "one")
    assert {row[1] for row in notes(tmp_path / "one")} == {"similarity"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"record": {"instruments": ["coherence", "coherence"]}}, r"instruments.1: 'coherence' is listed twice"),
        ({"record": {"instruments": ["balance"]}, "server": ["fedavgm"]}, r"0.balance: shows what .* but fedavgm does"),
        ({"record": {"instruments": ["balance"]}, "client": ["feddyn"]}, r"0.balance: shows what shrinking does"),
        (
            {"record": {"instruments": [{"coherence": {"groups": {"a": [8]}}}]}},
            r"0.coherence: groups.a names client 8; .* 0 to 7",
        ),
    ],
)
def test_what_cannot_be_observed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)


def test_classes_are_compared_where_there_are_some(tmp_path: Path) -> None:
    data = {"name": "diabetes", "partition": {"iid_equal": {"clients": 3}}}
    config = tiny(data=data, model={"name": "mlp"}, record={"instruments": ["similarity", "heterogeneity"]})
    with pytest.raises(
        ConfigError, match=r"instruments.1.heterogeneity: .* class by class, but the task is regression"
    ):
        simulate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
