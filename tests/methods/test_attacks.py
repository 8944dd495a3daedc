"""Malicious clients: numerical cases, who lies and when, and what is measured and counted of a lie."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case import Traced
from conftest import simulate, table, tiny
from sabotage import kill_before, to_the_end
from test_robust import cohort_of
from torch import Tensor

from raysim.config import ConfigError
from raysim.core.attack import Attack
from raysim.federation import Federation
from raysim.federation.failures import RoundFailed
from raysim.methods import ATTACKS
from raysim.methods.alie import ALIE, rule
from raysim.methods.sign_flip import SignFlip

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "attacks.json").read_text())["cases"]
FIVE = {
    "data": {"partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 8, "min_size": 4}}, "client_test_frac": 0.3},
    "rounds": {"participation": 0.65, "total": 3},
}  # five clients a round
ENTRIES: dict[str, Any] = {"sign_flip": {"sign_flip": {"scale": 2.0}}, "alie": {"alie": {"z": 1.0}}}


def entry(name: str, **who: Any) -> dict[str, Any]:
    """The attack by some clients; by default by a quarter of them."""
    return {name: {**ENTRIES[name][name], **(who or {"fraction": 0.25})}}


def test_z() -> None:
    [case] = [case for case in CASES if case["rule"] == "alie_z"]
    found = [rule(K, f) for K, f in case["inputs"]["cohort_and_malicious"]]
    assert found[0] is None  # by the formula 0, which is no attack
    assert case["expect"]["z"][0] == 0
    assert found[1:] == pytest.approx(case["expect"]["z"][1:], rel=1e-9)
    assert rule(7, 4) is None  # by the formula infinite


@pytest.mark.parametrize("case", [case for case in CASES if case["rule"] == "alie"])
def test_cases(case: Mapping[str, Any]) -> None:
    inputs, z = case["inputs"], case["params"]["z"]
    cohort = cohort_of(inputs["benign"])
    attack = ALIE(None if z == "auto" else z, fraction=0.1)
    found = attack.known(cohort, inputs["malicious"], cohort.server)
    torch.testing.assert_close(found, torch.tensor(case["expect"]["value"]).double(), rtol=0, atol=1e-6)


def traced(run: Federation) -> tuple[Traced, list[int], list[bool]]:
    """The first round, its clients, and which of them lie."""
    round_, rows = Traced(run.folder, 0, run), table(run.folder, "clients")
    first = rows["round"] == 0
    return round_, rows["client"][first].tolist(), [name is not None for name in rows["attack"][first]]


def updates(round_: Traced) -> np.ndarray:
    """[K, P] what was sent."""
    rows = [
        np.concatenate([(c.model[n] - round_.before[n]).ravel() for n in round_.parameters]) for c in round_.clients
    ]
    return np.stack(rows)


TRACE = {"record": {"traces": [1]}}


def test_liars_send_the_reverse_and_keep_what_they_have_trained(ran: Any) -> None:
    who = {"clients": [0, 1, 2, 3]}
    local = {"local": {"state": "persist"}}
    honest = ran(**FIVE, **TRACE, **local)
    lying = ran(**FIVE, **TRACE, **local, attack=[entry("sign_flip", **who)])
    (true, clients, _), (sent, _, lies) = traced(honest), traced(lying)
    assert lies == [client < 4 for client in clients]
    assert 0 < sum(lies) < 5
    for lie, own, said, one, other in zip(lies, updates(true), updates(sent), true.clients, sent.clients, strict=True):
        np.testing.assert_allclose(said, -2 * own if lie else own, atol=1e-6)
        for name in one.after:
            np.testing.assert_array_equal(one.after[name], other.after[name])
        for name in set(one.model) - set(true.parameters):
            np.testing.assert_array_equal(one.model[name], other.model[name])


def test_a_little_is_enough_by_hand(ran: Any) -> None:
    """All liars of a round send μ - z σ of its others."""
    run = ran(**FIVE, **TRACE, attack=[{"alie": {"z": 0.7, "clients": [0, 1, 2]}}])
    round_, _, lies = traced(run)
    assert 0 < sum(lies) < 4
    sent, lying = updates(round_), np.array(lies)
    others = sent[~lying]
    lie = others.mean(0) - 0.7 * others.std(0, ddof=1)
    for said in sent[lying]:
        np.testing.assert_allclose(said, lie, atol=1e-6)
    notes = table(run.folder, "notes")
    assert notes["value"][notes["name"] == "z"].tolist() == pytest.approx([0.7] * 3)


@pytest.mark.parametrize("name", ENTRIES)
def test_nobody_lies(name: str, ran: Any) -> None:
    assert ran(**FIVE, attack=[entry(name, fraction=0.0)]).sha256() == ran(**FIVE).sha256()


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"weighting": [{"fedldf": 2}]}, {"upload": ["error_feedback", {"top_k": 0.1}], "weighting": ["median"]}],
    ids=["mean", "fedldf", "compressed"],
)
def test_same_bits_on_actors_of_which_one_dies(
    name: str, changes: dict[str, Any], tmp_path: Path, warm_ray: Any, monkeypatch: Any
) -> None:
    """One of five actors is killed when malicious clients are asked to train. In later rounds others hold its clients."""
    changes = {**FIVE, **changes, "attack": [entry(name, clients=[0, 1, 2])]}
    local = simulate(tiny(**changes), tmp_path / "local")
    config = tiny(**changes, engine={"ray": {"clients_per_actor": 1}})
    federation = Federation(config, tmp_path / "ray", make_engine=warm_ray)

    def victim(call: Any) -> int | None:
        return 0 if call.args[0].attacks and federation.t == 1 else None

    killed = kill_before(federation, "train", victim, monkeypatch)
    to_the_end(federation)
    assert killed
    assert "actor" in table(tmp_path / "ray", "events")["of"]
    assert federation.sha256() == local.sha256()


def test_a_lie_is_measured_and_counted(ran: Any) -> None:
    """FedLDF chooses by the norms of what is sent, and a lie takes the bytes of an update."""
    honest, lying = (
        ran(**FIVE, **TRACE, weighting=[{"fedldf": 1}], attack=attack)
        for attack in ([], [{"sign_flip": {"scale": 100.0, "clients": [0, 1, 2, 3]}}])
    )
    _, _, lies = traced(lying)
    notes = table(lying.folder, "notes")
    chosen = notes["value"][(notes["name"] == "uploads") & (notes["round"] == 0)].reshape(5, -1)
    assert chosen[lies].sum(0).all()  # every layer is a liar's
    bytes_ = [table(run.folder, "traffic")["bytes"][:5].sum() for run in (honest, lying)]
    assert bytes_[0] == bytes_[1]


def test_the_same_clients_lie_in_every_attack(ran: Any) -> None:
    rows = [table(ran(**FIVE, attack=[entry(name)]).folder, "clients")["attack"] for name in ENTRIES]
    assert [name is not None for name in rows[0]] == [name is not None for name in rows[1]]
    assert {*rows[0]} == {None, "sign_flip"}
    assert {*rows[1]} == {None, "alie"}


def test_scores_of_clients_are_of_the_honest(ran: Any) -> None:
    for when in ("after_train", "before_train", "after_init"):
        run = ran(**FIVE, attack=[entry("sign_flip", clients=[0, 1, 2])], evaluate={"personal": when})
        tested = {*table(run.folder, "personal")["client"]}
        assert tested
        assert not tested & {0, 1, 2}


def test_together_they_lie_as_each_alone(ran: Any) -> None:
    """With `batch_clients` those who wait form groups of their own."""
    for name in ENTRIES:
        changes = {**FIVE, "local": {"momentum": 0.0}, "attack": [entry(name, clients=[0, 1, 2])]}
        alone, together = (
            ran(**changes, model={"name": "mlp"}, engine={"local": {"batch_clients": n}}).server.value for n in (1, 2)
        )
        torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)


def test_resume(tmp_path: Path) -> None:
    config = tiny(**{**FIVE, "rounds": {**FIVE["rounds"], "checkpoint_every": 1}}, attack=[entry("alie")])
    begun = Federation(config, tmp_path / "parts")
    begun.step()
    begun.close()
    whole = simulate(config, tmp_path / "whole")
    assert simulate(config, tmp_path / "parts", resume=True).sha256() == whole.sha256()


@dataclass(frozen=True)
class Short(Attack):
    """Returns a number too few."""

    def update(self, honest: Tensor, client: Any, known: Tensor | None) -> Tensor:
        return honest[1:]


def test_a_lie_of_another_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ATTACKS, "short", Short)
    with pytest.raises(RoundFailed, match=r"Short.update returned a tensor \[\d+\] float32. Return a tensor \[\d+\]"):
        simulate(tiny(attack=[{"short": {"fraction": 0.5}}]), tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attack": ["alie"]}, "alie: needs either a fraction of the clients or clients by number"),
        ({"attack": [{"alie": {"fraction": 0.1, "clients": [1]}}]}, "needs either a fraction"),
        (
            {"attack": [{"sign_flip": {"fraction": 0.1}}], "client": ["scaffold"], "local": {"momentum": 0.0}},
            "scaffold sends a second vector",
        ),
        ({"attack": [{"alie": {"fraction": 0.1}}], "client": ["fedamp"]}, "fedamp sends each client another model"),
        ({"attack": ["alei"]}, "Did you mean 'alie'"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny(**changes)


def test_a_client_that_is_not_there(tmp_path: Path) -> None:
    """How many there are is known where the data are."""
    with pytest.raises(ConfigError, match=r"attack\.0\.sign_flip: client 8 is none of the 8, which count from 0"):
        simulate(tiny(attack=[{"sign_flip": {"clients": [3, 8]}}]), tmp_path)


def test_what_is_sent_alone() -> None:
    assert SignFlip(3.0, fraction=0.5).update(torch.tensor([1.0, -2.0]), None, None).tolist() == [-3.0, 6.0]  # type: ignore[arg-type]
