"""Oort: scores, exploration, the pacer, and what is remembered."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case import Traced
from conftest import simulate, table, tiny
from sabotage import kill_before, to_the_end
from test_fedbuff import Timed
from torch import nn
from toy import toy_server

from raysim.config import ConfigError
from raysim.core.layers import LayerMap
from raysim.core.selection import Asked
from raysim.core.server import RoundScratch, Server
from raysim.federation import Federation
from raysim.methods.oort import Oort, preferred

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "selection.json").read_text())["cases"]
CLOCK = {"speed": {"lognormal": {"median": 20, "sigma": 1.0}}, "up": 4000, "down": 16000, "latency": 0.1}


@pytest.mark.parametrize("case", [case for case in CASES if case["rule"] == "oort_score"])
def test_scores(case: Any) -> None:
    inputs, params, expect = case["inputs"], case["params"], case["expect"]
    oort = Oort(clip=params["clip"], penalty=params["penalty"], normalize=params["normalize"])
    utility = np.array(inputs["samples"]) * np.array(inputs["root_mean_square_loss"])
    assert utility.tolist() == pytest.approx(expect["statistical"], rel=1e-9)
    seconds = np.array(inputs["seconds"])
    threshold = preferred(seconds, params["preferred_percentile"])
    assert threshold == expect["preferred_seconds"]
    score = oort.scores(utility, seconds, np.array(inputs["last_round"]), params["round"], threshold)
    assert score.tolist() == pytest.approx(expect["score"], rel=1e-9)
    assert np.argsort(-score).tolist() == expect["order"]


@pytest.mark.parametrize("case", [case for case in CASES if case["rule"] == "oort_exploration"])
def test_exploration(case: Any) -> None:
    start, decay, least = (case["params"][name] for name in ("start", "decay", "least"))
    oort = Oort(start, decay, least)
    expect = case["expect"]["share"]
    assert [oort.share(t) for t in range(len(expect))] == pytest.approx(expect, rel=1e-9)
    assert oort.share(1000) == least


class Reported:
    """A cohort that has reported these losses."""

    def __init__(self, clients: tuple[int, ...], server: Server, loss: Any):
        self.clients, self.sizes = clients, server.population.sizes[list(clients)]
        self.losses = torch.tensor([loss(client) for client in clients], dtype=torch.float64)

    def stat(self, probe: Any) -> torch.Tensor:
        return self.losses


def rounds(
    oort: Oort,
    count: int,
    loss: Any = lambda client, t: 1.0,
    clients: int = 20,
    seconds: Any = None,
    share: float = 0.2,
) -> list[Asked]:
    server = toy_server(LayerMap.of(nn.Linear(1, 1, bias=False)), [0.0], labels=[[5]] * clients)
    made = []
    for t in range(count):
        server.scratch = RoundScratch(t)
        asked = oort.select(server, share, Timed(np.zeros(clients) if seconds is None else np.array(seconds)))
        oort.learn(Reported(asked.clients, server, lambda client, t=t: loss(client, t)), server)  # type: ignore[arg-type]
        made.append(asked)
    return made


def test_only_newcomers() -> None:
    """With ε = 1, until none is left."""
    made = rounds(Oort(1.0, 1.0), 7)
    assert sorted(client for asked in made[:5] for client in asked.clients) == [*range(20)]
    assert {*(by for asked in made[:5] for by in asked.selected_by.values())} == {"explore"}
    assert all({*asked.selected_by.values()} == {"exploit"} and len(asked.clients) == 4 for asked in made[5:])


def test_fast_newcomers_come_first() -> None:
    """One of two, with 1 / t_k: the fast one in 3 of 4 runs, within four standard deviations."""
    first = Counter()
    for seed in range(400):
        server = toy_server(LayerMap.of(nn.Linear(1, 1, bias=False)), [0.0], labels=[[5]] * 2)
        server.seed, server.scratch = seed, RoundScratch(0)
        first.update(Oort().select(server, 0.5, Timed(np.array([1.0, 3.0]))).clients)
    assert abs(first[0] - 300) < 4 * (400 * 0.75 * 0.25) ** 0.5


def test_exploits_great_losses() -> None:
    """Once all have taken part, those whose score is within 0.95 of the last that fits: here the four with the high losses."""
    made = rounds(Oort(1.0, 1.0), 12, lambda client, t: 9.0 if client < 4 else 1.0)
    assert [asked.clients for asked in made[5:]] == [(0, 1, 2, 3)] * 7


def test_slow_clients_are_left_out() -> None:
    """Losses are alike, and the slowest four of twenty count next to nothing."""
    made = rounds(Oort(1.0, 1.0), 30, seconds=[1.0] * 16 + [1000.0] * 4)
    late = [client for asked in made[5:] for client in asked.clients]
    assert max(late) < 16


def test_the_pacer() -> None:
    """Rounds 0 to 9 gather less than none before; 10 to 19 half of that, 20 to 29 more: T moves once."""
    oort = Oort(every=10)
    server = toy_server(LayerMap.of(nn.Linear(1, 1, bias=False)), [0.0], labels=[[5]] * 20)
    seen = []
    for t in range(31):
        server.scratch = RoundScratch(t)
        asked = oort.select(server, 0.2, Timed(np.ones(20)))
        seen.append(float(server.memory[oort]["percentile"]))
        loss = {0: 2.0, 1: 1.0}.get(t // 10, 3.0)
        oort.learn(Reported(asked.clients, server, lambda client, loss=loss: loss), server)  # type: ignore[arg-type]
    assert seen == [30.0] * 20 + [35.0] * 11


def test_what_is_noted(ran: Any) -> None:
    """ε of every round, and T from the second on, which is the seconds of one that has taken part."""
    run = ran(rounds={"selection": "oort", "total": 5}, clock=CLOCK)
    notes, clients = table(run.folder, "notes"), table(run.folder, "clients")
    of = {name: notes["value"][notes["name"] == name] for name in ("exploration", "preferred_seconds")}
    assert of["exploration"] == pytest.approx([0.9 * 0.98 ** (t + 1) for t in range(5)])
    assert len(of["preferred_seconds"]) == 4
    took = clients["sim_down"] + clients["sim_train"] + clients["sim_up"]
    for t in range(1, 5):
        known = took[clients["round"] < t]
        assert np.isclose(
            known, of["preferred_seconds"][t - 1], rtol=1e-3
        ).any()  # but for the few bytes that Oort itself sends


def test_at_most() -> None:
    """A client that has served twice is left alone, until all have."""
    made = rounds(Oort(1.0, 1.0, at_most=2), 15, lambda client, t: 9.0 if client < 4 else 1.0)
    uses = Counter(client for asked in made[:10] for client in asked.clients)
    assert uses == dict.fromkeys(range(20), 2)
    assert all(len(asked.clients) == 4 for asked in made)


def test_losses_of_the_first_epoch(ran: Any) -> None:
    """Without augmentation and in one step an epoch, the root of the mean square is that of the model that was sent."""
    run = ran(
        rounds={"selection": "oort", "participation": 1.0, "total": 1}, local={"batch_size": 1000, "epochs": 2},
        record={"traces": "rounds"},
    )  # fmt: skip
    model = run.spec.network()[0]
    model.load_state_dict({name: torch.from_numpy(t).float() for name, t in Traced(run.folder, 0, run).before.items()})
    model.train()
    for client in range(8):
        samples = run.partition.train[client]
        with torch.no_grad():
            outputs = model(run.data.transform(torch.from_numpy(run.data.x[samples])))
        losses = nn.functional.cross_entropy(outputs, torch.from_numpy(run.data.y[samples]), reduction="none")
        found = float(run.server.memory["oort"]["loss"][client])
        assert found == pytest.approx(float(losses.double().square().mean().sqrt()), rel=1e-4)
    assert (table(run.folder, "traffic")["up_scalars"] == 4).all()


@pytest.mark.parametrize("tape", ["never", "always"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_does_not_change(tape: str, accumulate: int, ran: Any) -> None:
    """Where all take part, Oort's losses are measured, and the bits are FedAvg's; on tapes or not, they are the same."""
    changes = {
        "rounds": {"participation": 1.0}, "local": {"accumulate": accumulate, "epochs": 2}, "engine": {"local": {"tape": tape}},
    }  # fmt: skip
    plain = ran(**changes)
    oort = ran(**{**changes, "rounds": {"participation": 1.0, "selection": "oort"}})
    assert torch.equal(plain.server.value, oort.server.value)
    other = ran(
        **{**changes, "rounds": {"participation": 1.0, "selection": "oort"}, "engine": {"local": {"tape": "never"}}}
    )
    assert torch.equal(oort.server.memory["oort"]["loss"], other.server.memory["oort"]["loss"])


def test_together(ran: Any) -> None:
    """Clients that train together report the losses that they report alone, to rounding."""
    changes = {"rounds": {"participation": 1.0, "selection": "oort"}, "model": {"name": "mlp"}, "local": {"epochs": 2}}
    alone, together = ran(**changes), ran(**changes, engine={"local": {"batch_clients": 4}})
    mine, theirs = (run.server.memory["oort"]["loss"].numpy() for run in (alone, together))
    assert (mine > 0).all()
    np.testing.assert_allclose(mine, theirs, rtol=1e-3)


def test_same_bits(tmp_path: Path, warm_ray: Any, monkeypatch: Any) -> None:
    """On one host; on actors of which one dies; and resumed after any round."""
    settings = {"total": 6, "checkpoint_every": 1, "selection": {"oort": {"exploration": 0.5, "every": 2}}}
    changes = {"rounds": settings, "clock": CLOCK}
    local = simulate(tiny(**changes), tmp_path / "local")
    on_ray = tiny(**changes, engine={"ray": {"clients_per_actor": 1}})
    federation = Federation(on_ray, tmp_path / "ray", make_engine=warm_ray)
    victim = lambda call: call.host if call.args[0].round_info.t == 3 else None  # noqa: E731
    killed = kill_before(federation, "train", victim, monkeypatch)
    to_the_end(federation)
    assert killed
    assert federation.sha256() == local.sha256()
    rows = table(tmp_path / "local", "clients")
    assert {*rows["selected_by"]} == {"exploit", "explore"}
    begun = Federation(tiny(**changes), tmp_path / "parts")
    for _ in range(3):
        begun.step()
    begun.close()
    assert simulate(tiny(**changes), tmp_path / "parts", resume=True).sha256() == local.sha256()
    for folder in ("ray", "parts"):
        other = table(tmp_path / folder, "clients")
        for column in ("client", "selected_by", "utility"):
            np.testing.assert_array_equal(other[column], rows[column])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"least": 0.95}, "least 0.95 is above exploration 0.9"),
        ({"percentile": 101}, "percentile: it is 100 at most"),
        ({"penalty": -1}, "penalty"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny(rounds={"selection": {"oort": fields}})
