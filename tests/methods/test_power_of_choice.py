"""Power-of-choice: who is asked for a loss, who is chosen, and what that costs."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case import Traced
from conftest import simulate, table, tiny
from sabotage import kill_before, to_the_end
from torch import nn
from toy import toy_server

from raysim.config import ConfigError
from raysim.core.hooks import HookError
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.core.selection import Asked, Selection
from raysim.core.server import RoundScratch
from raysim.federation import Federation
from raysim.methods import SELECTIONS
from raysim.methods.power_of_choice import PowerOfChoice, highest

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "selection.json").read_text())["cases"]
CLOCK = {"speed": {"lognormal": {"median": 20, "sigma": 1.0}}, "up": 4000, "down": 16000, "latency": 0.1}


def choice(**fields: Any) -> dict[str, Any]:
    return {"rounds": {"selection": {"power_of_choice": fields}}}


@pytest.mark.parametrize("case", [case for case in CASES if case["rule"] == "power_of_choice"])
def test_cases(case: Any) -> None:
    inputs = case["inputs"]
    chosen = highest(inputs["candidates"], np.array(inputs["losses"]), case["params"]["cohort"])
    assert [*chosen] == case["expect"]["cohort"]


def test_equal_losses() -> None:
    """The lower client comes first, and one that failed comes last."""
    assert highest([1, 3, 5, 7], np.array([0.5, 1.0, 0.5, np.nan]), 2) == (1, 3)
    assert highest([1, 3, 5], np.array([np.nan, 0.1, np.nan]), 2) == (1, 3)


class Losing:
    """Clients of which some have a higher loss."""

    here = np.arange(4)

    def losses(self, clients: Any, batch: bool = False) -> np.ndarray:
        return np.array(clients, float)


def test_as_many_candidates_as_a_round_needs() -> None:
    """All of them train, whatever their losses: drawn by their samples, one after the other, within four standard deviations."""
    sizes, rounds, selection, counts = [10, 20, 0, 70], 4000, PowerOfChoice(2), Counter[int]()
    server = toy_server(LayerMap.of(nn.Linear(1, 1)), [0.0], labels=[[n] for n in sizes])
    for t in range(rounds):
        server.scratch = RoundScratch(t)
        counts.update(selection.select(server, 0.5, Losing()).clients)  # type: ignore[arg-type]
    p = np.array(sizes) / 100
    for client, first in enumerate(p):
        second = sum(p[other] * first / (1 - p[other]) for other in range(4) if other != client)
        expected = first + second
        assert abs(counts[client] - rounds * expected) <= 4 * (rounds * expected * (1 - expected)) ** 0.5


def test_the_highest_of_all(ran: Any) -> None:
    """With all clients as candidates those with the highest losses of the traced model train, and count alike."""
    run = ran(**choice(candidates=8), record={"traces": "rounds"})
    rows = table(run.folder, "clients")
    model = run.spec.network()[0]
    for t in range(3):
        now = rows["round"] == t
        before = {name: torch.from_numpy(value).float() for name, value in Traced(run.folder, t, run).before.items()}
        model.load_state_dict(before)
        model.eval()
        losses = []
        for client in range(8):
            samples = run.partition.train[client]
            x = run.data.transform(torch.from_numpy(run.data.x[samples]))
            with torch.no_grad():
                outputs = model(x)
            losses.append(float(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(run.data.y[samples]))))
        by_client = dict(zip(rows["client"][now], rows["utility"][now], strict=True))
        assert [by_client[client] for client in range(8)] == pytest.approx(losses, rel=1e-5)
        chosen = [*np.sort(np.argsort(losses)[-3:])]
        assert rows["client"][now & (rows["status"] == "ok")].tolist() == chosen
        assert (rows["status"][now & ~np.isin(rows["client"], chosen)] == "asked").all()
        assert rows["weight"][now & (rows["status"] == "ok")].tolist() == pytest.approx([1 / 3] * 3)
        assert {*rows["selected_by"][now & (rows["status"] == "ok")]} == {"loss"}


def test_what_it_costs(ran: Any) -> None:
    """A candidate is sent the model once, and sends a number; the others' work is a third of an epoch's."""
    run = ran(**choice(candidates=5), clock=CLOCK, local={"epochs": 2})
    traffic, rows, rounds = (table(run.folder, name) for name in ("traffic", "clients", "rounds"))
    model = 4 * run.server.layers.S
    everyone = [*range(8)]
    sizes = np.array([len(run.partition.train[client]) for client in everyone])
    speeds = run.config.clock.seconds(3, everyone, np.ones(8), np.zeros(8), np.zeros(8)).train
    clock = 0.0
    for t in range(3):
        now, of = traffic["round"] == t, rows["round"] == t
        clients, chosen = traffic["client"][now], {*rows["client"][of & (rows["status"] == "ok")]}
        assert len(clients) == len({*clients}) == 5 and len(chosen) == 3
        down = (traffic["down_params"] + traffic["down_buffers"])[now]
        assert (down == model).all()
        sent = (traffic["up_params"] + traffic["up_buffers"])[now]
        assert (sent == np.where(np.isin(clients, [*chosen]), model, 0)).all()
        assert (traffic["up_scalars"][now] == 4).all()
        ask = 0.1 + model / 16000 + sizes[clients] * speeds[clients] / 3 + 4 / 4000
        train = 0.1 + 2 * sizes * speeds + model / 4000
        clock += ask.max() + max(train[client] for client in chosen)
        assert rounds["sim_clock"][t] == pytest.approx(clock)
        shown = dict(zip(rows["client"][of], (rows["sim_down"] + rows["sim_train"] + rows["sim_up"])[of], strict=True))
        expected = {c: a + (train[c] if c in chosen else 0.0) for c, a in zip(clients, ask, strict=True)}
        assert shown == pytest.approx(expected)


@pytest.mark.parametrize("fields", [{"estimate": "full"}, {"estimate": "batch", "candidates": 5}, {"estimate": "last"}])
def test_same_bits(fields: dict[str, Any], tmp_path: Path, warm_ray: Any, monkeypatch: Any) -> None:
    """On one host; on actors of which one dies as it is asked, or trains; and resumed after any round."""
    changes = {"rounds": {**choice(**fields)["rounds"], "total": 4, "checkpoint_every": 1}}
    local = simulate(tiny(**changes), tmp_path / "local")
    federation = Federation(
        tiny(**changes, engine={"ray": {"clients_per_actor": 1}}), tmp_path / "ray", make_engine=warm_ray
    )
    method = "train" if fields["estimate"] == "last" else "call"

    def victim(call: Any) -> int | None:
        asked = call.method == ("train" if method == "train" else "loss")
        return call.host if asked and call.args[0].round_info.t == 1 else None

    killed = kill_before(federation, method, victim, monkeypatch)
    to_the_end(federation)
    assert killed
    assert federation.sha256() == local.sha256()
    begun = Federation(tiny(**changes), tmp_path / "parts")
    begun.step()
    begun.step()
    begun.close()
    resumed = simulate(tiny(**changes), tmp_path / "parts", resume=True)
    assert resumed.sha256() == local.sha256()
    for folder in ("ray", "parts"):
        for column in ("client", "status", "utility"):
            mine, theirs = (table(tmp_path / name, "clients")[column].tolist() for name in (folder, "local"))
            assert np.array(mine).astype(str).tolist() == np.array(theirs).astype(str).tolist()


def test_last_losses(ran: Any) -> None:
    """No candidate is asked; newcomers come first, then those whose last training had the highest loss."""
    run = ran(rounds={**choice(estimate="last", candidates=8)["rounds"], "total": 6}, local={"epochs": 2})
    rows, traffic = table(run.folder, "clients"), table(run.folder, "traffic")
    assert (rows["status"] == "ok").all()
    assert (traffic["up_scalars"] == 4).all()
    notes, seen = table(run.folder, "notes"), dict[int, float]()
    for t in range(6):
        now = rows["round"] == t
        noted = notes["value"][(notes["round"] == t) & (notes["name"] == "loss")]
        np.testing.assert_allclose(noted, [seen[client] for client in sorted(seen)], rtol=1e-6)
        newcomers = [client for client in range(8) if client not in seen]
        known = sorted(seen, key=lambda client: (-seen[client], client))
        assert rows["client"][now].tolist() == sorted([*newcomers, *known][:3])
        seen |= dict(zip(rows["client"][now], (rows["loss_first"] + rows["loss_last"])[now] / 2, strict=True))


@dataclass(frozen=True)
class Unlucky(Selection):
    """Asks all clients."""

    def select(self, server: Any, participation: float, clients: Any) -> Asked:
        clients.losses([*range(len(server.population.sizes))])
        return Asked((0,))


class Unluckier(Unlucky):
    needs = Needs(global_model=True)


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        (Unlucky, r"round 1: Unlucky.select asks clients for their losses. Say so in its class: needs = raysim.Needs"),
        (Unluckier, r"round 1: Unluckier.select asks client \d, which has no samples, for its loss. Those with some"),
    ],
)
def test_own_ones_that_go_wrong(selection: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SELECTIONS, "unlucky", selection)
    data = {"partition": {"dirichlet_counts": {"alpha": 0.02, "clients": 8}}, "allow_empty_clients": True}
    with pytest.raises(HookError, match=sentence):
        simulate(tiny(rounds={"selection": "unlucky"}, data=data), tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (choice(candidates=2), "candidates 2 is fewer than the 3 clients of a round"),
        (choice(candidates=9), "candidates 9 is more than the federation's 8 clients"),
        (choice() | {"client": ["fedamp"]}, "asks for losses of the global model, but fedamp sends each client others"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny(**changes)
