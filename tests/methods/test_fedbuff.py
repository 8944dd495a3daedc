"""Asynchronous rounds: who returns when, what is stale, and what becomes of older models."""

import json
from collections import Counter
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
from torch import nn
from toy import ToyCohort, toy_server, vector

from raysim.config import ConfigError
from raysim.core.asynchronous import Asynchronous
from raysim.core.hooks import HookError
from raysim.core.layers import LayerMap
from raysim.core.selection import VERSIONS, Asked, Selection
from raysim.core.server import RoundScratch
from raysim.federation import Federation
from raysim.methods import SELECTIONS
from raysim.methods.fedasync import FedAsync
from raysim.methods.fedbuff import FedBuff

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "asynchronous.json").read_text())["cases"]
EQUAL = {"data": {"partition": {"iid_equal": {"clients": 8}}}, "clock": {"latency": 1}}


class Timed:
    """Clients that take so many seconds, in a round that begins `now`."""

    def __init__(self, durations: np.ndarray, now: float | None = 0.0):
        self.durations, self.here, self.now = durations, np.arange(len(durations)), now or 0.0

    def seconds(self, clients: Any) -> np.ndarray:
        return self.durations[list(clients)]

    def losses(self, clients: Any, batch: bool = False) -> np.ndarray:
        raise AssertionError


class Listed:
    """Draws clients in the order of a list. Where a client of the list is several of the run's, one after the other, it is free
    if all of them are."""

    def drawn(self, server: Any, pool: list[int], count: int, draws: int) -> list[int]:
        found, twins = list[int](), server.twins
        while len(found) < count:
            client = server.order.pop(0)
            if {*range(client * twins, (client + 1) * twins)} <= {*pool} - {*found}:
                found.append(client * twins + server.drawn[client] % twins)
                server.drawn[client] += 1
        return found


class ListedBuff(Listed, FedBuff):
    pass


class ListedAsync(Listed, FedAsync):
    pass


def rule(case: Mapping[str, Any]) -> Asynchronous:
    params, staleness = case["params"], dict(case["params"]["staleness"])
    shared = {"concurrency": params["concurrency"], "staleness": staleness.pop("name"), **staleness}
    if case["rule"] == "fedasync":
        return ListedAsync(params["alpha"], **shared)
    return ListedBuff(params["buffer"], params["normalize"], max_staleness=params.get("max_staleness"), **shared)


def following(case: Mapping[str, Any], twins: int) -> Any:
    """The server of a case, each of whose clients is so many."""
    clients = len(case["inputs"]["durations"])
    server: Any = toy_server(LayerMap.of(nn.Linear(1, 1, bias=False)), [0.0], labels=[[1]] * (twins * clients))
    server.order, server.twins, server.drawn = list(case["inputs"]["order_of_draws"]), twins, Counter[int]()
    return server


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c['rule']}{i}") for i, c in enumerate(CASES)])
def test_cases(case: Mapping[str, Any]) -> None:
    """All their events. A case may use two updates of a client in one round: it is another client with the same seconds and
    target each time that it is drawn."""
    twins, inputs, expect, selection = 10, case["inputs"], list(case["expect"]["returns"]), rule(case)
    durations, targets = np.repeat(inputs["durations"], twins), inputs["targets"]
    server, models = following(case, twins), [inputs["start"]]
    ended: float | None = 0.0
    while expect:
        wanted = []
        while not wanted or "version" not in wanted[-1]:
            wanted.append(expect.pop(0))
        used, t = [task for task in wanted if task["used"]], len(models) - 1
        server.scratch = RoundScratch(t)
        asked = selection.select(server, 1.0, Timed(durations, ended))
        ended = asked.ends
        assert ended == wanted[-1]["seconds"]
        rows = zip(asked.clients, asked.starts, asked.versions, strict=True)
        found = sorted((start + durations[c], c // twins, version) for c, start, version in rows)
        assert found == [(task["seconds"], task["client"], task["sent"]) for task in used]
        tasks = sorted(used, key=lambda task: (task["client"], task["seconds"]))  # as in `asked`
        weight = selection.weight(np.array([t - task["sent"] for task in tasks]))
        assert weight.tolist() == pytest.approx([task["weight"] for task in tasks], rel=1e-12)
        server.value, server.scratch.asked = vector([models[-1]]), asked
        server.memory[VERSIONS] = {str(version): vector([model]) for version, model in enumerate(models)}
        updates = [[0.5 * (targets[task["client"]] - models[task["sent"]])] for task in tasks]
        cohort: Any = ToyCohort(server, updates, [1] * len(tasks))
        cohort.clients = asked.clients
        [weighting] = selection.weightings()
        plan = weighting.plan(cohort, server, cohort.uniform())
        value = weighting.combine(plan, cohort, server)
        models.append(float(cohort.reduce(plan) if value is None else value))
        exact = 1e-9 if isinstance(selection, FedBuff) else 1e-6  # a model is mixed in with a share in float32
        assert models[-1] == pytest.approx(wanted[-1]["theta"], rel=exact, abs=exact)


def test_a_second_update_of_a_client_waits() -> None:
    """In the fifth round of the first case client 6 returns after 10.25 and after 11 s. The case uses both, and the round ends
    with client 3 after 11.5 s; here the second one is used in the sixth round."""
    case, asked = CASES[0], list[Asked]()
    selection, server, durations = rule(case), following(case, 1), np.array(case["inputs"]["durations"])
    for t in range(6):
        server.scratch = RoundScratch(t)
        asked.append(selection.select(server, 1.0, Timed(durations, asked[-1].ends if asked else 0.0)))
    late = [task for task in case["expect"]["returns"] if task["sent"] == 4]
    assert [(task["client"], task["seconds"]) for task in late] == [(6, 10.25), (6, 11.0), (3, 11.5)]
    tasks = [zip(each.clients, each.versions, each.repeats, each.starts, strict=True) for each in asked]
    fifth, sixth = ({client: task for client, *task in each} for each in tasks[4:])
    assert fifth[6] == [4, 0, 9.5] and fifth[3] == [4, 0, 9.5]
    assert asked[4].ends is not None and asked[4].ends > 11.5
    assert sixth[6] == [4, 1, 10.25]


def test_every_task_returns_or_is_in_flight() -> None:
    """Of each client: how often it was sent a model is how often it was used, and it may be under way once more."""
    durations, sent, used = np.array([9.0, 1.5, 4.0, 2.0, 0.7, 3.1]), Counter[int](), Counter[int]()

    class Counted(FedBuff):
        def drawn(self, server: Any, pool: list[int], count: int, draws: int) -> list[int]:
            sent.update(found := super().drawn(server, pool, count, draws))
            return found

    ended: float | None = 0.0
    selection, server = Counted(2, concurrency=3), toy_server(LayerMap.of(nn.Linear(1, 1)), [0.0], labels=[[1]] * 6)
    for t in range(40):
        server.scratch = RoundScratch(t)
        asked = selection.select(server, 1.0, Timed(durations, ended))
        ended = asked.ends
        used.update(asked.clients)
        flying = Counter(server.memory[selection]["tasks"][:, 0].tolist())
        assert sent == used + flying
    assert used.keys() == {*range(6)}


def test_nothing_is_stale_among_equals(ran: Any) -> None:
    """With B = M = K, and clients that take the same time, the bits are FedAvg's with uniform weights."""
    uniform = ran(**EQUAL, weighting=[{"fedavg": {"weights": "uniform"}}])
    buffered = ran(**EQUAL, rounds={"selection": {"fedbuff": {"buffer": 3}}})
    assert buffered.sha256() == uniform.sha256()
    assert table(buffered.folder, "rounds")["sim_clock"].tolist() == [1.0, 2.0, 3.0]
    versions = table(buffered.folder, "clients")
    assert (versions["version"] == versions["round"]).all()


UNEQUAL: dict[str, Any] = {
    "clock": {"speed": {"lognormal": {"median": 20, "sigma": 1.0}}, "up": 4000, "down": 16000, "latency": 0.1},
    "rounds": {"total": 6, "participation": 0.6, "selection": {"fedbuff": {"buffer": 2}}},
}


@pytest.mark.parametrize("more", [{}, {"client": [{"fedala": {"threshold": 9}}]}, {"client": ["ditto"]}], ids=str)
def test_by_hand(more: dict[str, Any], ran: Any) -> None:
    """Every round of a run from its traces. An update is what has changed of the model that was sent, into which FedALA mixes
    the client's own: it begins between the two, and somewhere at neither."""
    run = ran(**UNEQUAL, **more, record={"traces": "rounds"})
    clients, rounds = table(run.folder, "clients"), table(run.folder, "rounds")
    stale, mixed, trained = 0, False, dict[int, Any]()
    for t in range(6):
        round_, now = Traced(run.folder, t, run), clients["round"] == t
        sent = clients["version"][now].astype(int)
        starts = [Traced(run.folder, v, run).before for v in sent]
        weight = (1.0 + t - sent) ** -0.5
        np.testing.assert_allclose(round_.note("fedbuff", "staleness_weight"), weight)
        stale += int((sent < t).sum())
        for name in round_.before:
            models = [client.model[name] for client in round_.clients]
            if name.endswith("num_batches_tracked"):
                expected = np.max(models, axis=0)
            elif name in round_.parameters:
                moved = [w * (m - s[name]) for w, m, s in zip(weight, models, starts, strict=True)]
                expected = round_.before[name] + sum(moved) / 2
            else:
                expected = sum(w * m for w, m in zip(weight / weight.sum(), models, strict=True))
            np.testing.assert_allclose(round_.after[name], expected, atol=2e-6, err_msg=f"{t} {name}")
        for client, start in zip(round_.clients, starts, strict=True):
            for name in start:
                if own := trained.get(client.id) if "fedala" in str(more) else None:
                    low, high = np.minimum(start[name], own[name]), np.maximum(start[name], own[name])
                    mixed = mixed or bool(((client.init[name] > low) & (client.init[name] < high)).any())
                    if name in round_.parameters:
                        assert ((client.init[name] >= low - 1e-6) & (client.init[name] <= high + 1e-6)).all()
                else:
                    np.testing.assert_array_equal(client.init[name], start[name])
            trained[client.id] = client.model
    assert stale >= 3
    assert mixed == ("fedala" in str(more))
    assert (np.diff(rounds["sim_clock"]) >= 0).all()


def test_shrunk_by_hand(ran: Any) -> None:
    """FedLWS on the buffer: τ is the mean distance of the updates, each of the model that was sent, from their mean."""
    run = ran(**UNEQUAL, server=[{"fedlws": 0.05}], record={"traces": "rounds"})
    clients, notes = table(run.folder, "clients"), table(run.folder, "notes")
    found = notes["value"][notes["name"] == "model_tau"]
    for t in range(6):
        round_ = Traced(run.folder, t, run)
        starts = [Traced(run.folder, v, run).before for v in clients["version"][clients["round"] == t].astype(int)]
        updates = np.array([
            np.concatenate([(client.model[name] - start[name]).ravel() for name in round_.parameters])
            for client, start in zip(round_.clients, starts, strict=True)
        ])  # fmt: skip
        assert found[t] == pytest.approx(np.linalg.norm(updates - updates.mean(0), axis=1).mean(), rel=1e-4)
    assert (clients["version"] < clients["round"]).any()


def mixing(**fields: Any) -> dict[str, Any]:
    return {**UNEQUAL, "rounds": {**UNEQUAL["rounds"], "selection": {"fedasync": fields}}}


def test_one_model_at_a_time_by_hand(ran: Any) -> None:
    run = ran(**mixing(alpha=0.5), record={"traces": "rounds"})
    clients = table(run.folder, "clients")
    for t in range(6):
        round_, sent = Traced(run.folder, t, run), int(clients["version"][t])
        [client], share = round_.clients, 0.5 * (1 + t - sent) ** -0.5
        for name, before in round_.before.items():
            counts = name.endswith("num_batches_tracked")
            expected = client.model[name] if counts else (1 - share) * before + share * client.model[name]
            np.testing.assert_allclose(round_.after[name], expected, atol=2e-6)
    assert (clients["version"] < clients["round"]).any()


def test_one_client_after_another(ran: Any) -> None:
    """With α = 1 and one client at a time the model goes from hand to hand."""
    run = ran(**mixing(alpha=1.0, concurrency=1), record={"traces": "rounds"})
    for t in range(1, 6):
        [client], [last] = Traced(run.folder, t, run).clients, Traced(run.folder, t - 1, run).clients
        for name in client.init:
            np.testing.assert_allclose(client.init[name], last.model[name], atol=1e-6)


def test_same_bits_on_actors_of_which_one_dies(tmp_path: Path, warm_ray: Any, monkeypatch: Any) -> None:
    changes = {**UNEQUAL, "rounds": {**UNEQUAL["rounds"], "selection": {"fedbuff": {"buffer": 4, "concurrency": 6}}}}
    local = simulate(tiny(**changes), tmp_path / "local")
    federation = Federation(
        tiny(**changes, engine={"ray": {"clients_per_actor": 2}}), tmp_path / "ray", make_engine=warm_ray
    )

    def victim(call: Any) -> int | None:
        return call.host if call.args[0].starts else None

    killed = kill_before(federation, "train", victim, monkeypatch)
    to_the_end(federation)
    assert killed
    assert federation.sha256() == local.sha256()


def test_who_trains_together_begins_at_one_model(tmp_path: Path, warm_ray: Any, monkeypatch: Any) -> None:
    """Whatever lies between them in the cohort. A host has whole groups, and each client trains once."""
    selection = {"fedbuff": {"buffer": 4, "concurrency": 6}}
    changes = {**UNEQUAL, "model": {"name": "mlp"}, "rounds": {**UNEQUAL["rounds"], "selection": selection}}
    local = simulate(tiny(**changes, engine={"local": {"batch_clients": 2}}), tmp_path / "local")
    actors = {"ray": {"clients_per_actor": 2, "batch_clients": 2}}
    federation = Federation(tiny(**changes, engine=actors), tmp_path / "ray", make_engine=warm_ray)
    trained, train = list[tuple[int, tuple[int, ...]]](), federation.engine.train
    groups = set[tuple[int, ...]]()

    def seen(call: Any) -> Any:
        request = call.args[0]
        trained.extend((federation.t, group) for group in request.groups)
        for group in request.groups:
            assert len({request.starts.get(client) for client in group}) == 1
        groups.update(request.groups)
        return train(call)

    monkeypatch.setattr(federation.engine, "train", seen)
    to_the_end(federation)
    assert any(b - a > 1 for a, *rest in groups for b in rest)  # with another client between them
    assert sorted(trained) == sorted({*trained})
    assert federation.sha256() == local.sha256()


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("more", [{}, {"client": ["fedala"], "local": {"state": "persist"}}], ids=["plain", "states"])
def test_resumed_with_clients_under_way(after: int, more: dict[str, Any], tmp_path: Path) -> None:
    changes = {**UNEQUAL, **more, "rounds": {**UNEQUAL["rounds"], "checkpoint_every": 1}}
    begun = Federation(tiny(**changes), tmp_path / "parts")
    for _ in range(after):
        begun.step()
    assert len(begun.server.memory["versions"]) >= 1
    begun.close()
    whole = simulate(tiny(**changes), tmp_path / "whole")
    resumed = simulate(tiny(**changes), tmp_path / "parts", resume=True)
    assert resumed.sha256() == whole.sha256()
    for name in ("sim_clock", "accuracy"):
        np.testing.assert_array_equal(
            table(tmp_path / "parts", "rounds")[name], table(tmp_path / "whole", "rounds")[name]
        )


def test_models_are_let_go(ran: Any) -> None:
    """The server keeps those that clients still train, and no others."""
    run = ran(**{**UNEQUAL, "rounds": {**UNEQUAL["rounds"], "total": 12}})
    memory = run.server.memory
    flying = {str(version) for _, version, _ in memory["fedbuff"]["tasks"].tolist()}
    asked = run.server.scratch.asked
    assert isinstance(asked, Asked)
    assert memory["versions"].keys() == flying | {str(v) for v in asked.versions}
    assert len(memory["versions"]) <= 2 + 4  # B and M


def test_what_is_too_old_is_dropped(ran: Any) -> None:
    changes = {**UNEQUAL["rounds"], "total": 10, "selection": {"fedbuff": {"buffer": 2, "max_staleness": 0}}}
    rows = table(ran(**{**UNEQUAL, "rounds": changes}).folder, "clients")
    used = rows["status"] == "ok"
    assert ((rows["version"] == rows["round"]) == used).all() and used.sum() == 10 * 2


SHORT = {
    **UNEQUAL["rounds"],
    "total": 10,
    "participation": 0.5,
    "selection": {"fedbuff": {"buffer": 1, "max_staleness": 1}},
}


@pytest.mark.parametrize("more", [{}, {"upload": [{"qsgd": {"levels": 7}}]}], ids=["plain", "encoded"])
def test_what_is_dropped_has_been_sent(more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was sent a model has come back, with all its bytes, or is under way. A run that goes on writes the same rows."""
    sent, drawn = Counter[int](), FedBuff.drawn
    with monkeypatch.context() as patch:
        patch.setattr(FedBuff, "drawn", lambda *args: (sent.update(found := drawn(*args)), found)[1])
        run = simulate(tiny(**{**UNEQUAL, **more, "rounds": SHORT}), tmp_path / "whole")
    rows, traffic, rounds = (table(run.folder, name) for name in ("clients", "traffic", "rounds"))
    flying = Counter(run.server.memory["fedbuff"]["tasks"][:, 0].tolist())
    assert Counter(rows["client"].tolist()) + flying == sent
    stale = rows["status"] == "stale"
    assert stale.sum() > 4 and (rows["status"][~stale] == "ok").all()
    assert (rows["round"] - rows["version"] > 1).tolist() == stale.tolist()
    assert np.isnan(rows["weight"][stale]).all() and (rows["samples"] == run.partition.sizes[rows["client"]]).all()
    assert (traffic["client"].tolist(), traffic["round"].tolist()) == (rows["client"].tolist(), rows["round"].tolist())
    for name in traffic.keys() - {"client", "round", "transport_up", "transport_down"}:
        assert len({*traffic[name].tolist()}) == 1, name  # every message has as many bytes
    assert (traffic["up_scales"] > 0).all() == bool(more)
    for way in ("up", "down"):
        once = sum(int(traffic[name][0]) for name in traffic if name.startswith(f"{way}_"))
        assert rounds[f"bytes_{way}"].tolist() == (once * np.bincount(rows["round"])).tolist()
    back = rows["sim_start"] + rows["sim_down"] + rows["sim_train"] + rows["sim_up"]
    ends = np.array([0.0, *rounds["sim_clock"]])
    assert (ends[rows["round"]] - 1e-9 <= back).all() and (back <= ends[rows["round"] + 1] + 1e-9).all()
    assert rounds["clients_failed"].tolist() == np.bincount(rows["round"][stale], minlength=10).tolist()
    begun = Federation(tiny(**{**UNEQUAL, **more, "rounds": {**SHORT, "checkpoint_every": 1}}), tmp_path / "parts")
    for _ in range(5):
        begun.step()
    begun.close()
    again = {**UNEQUAL, **more, "rounds": {**SHORT, "checkpoint_every": 1}}
    assert simulate(tiny(**again), tmp_path / "parts", resume=True).sha256() == run.sha256()
    for name in ("clients", "traffic"):
        parts, whole = table(tmp_path / "parts", name), table(run.folder, name)
        for column in whole.keys() - {"seconds"}:
            np.testing.assert_array_equal(parts[column], whole[column])


def test_a_place_of_a_dropped_update_is_filled() -> None:
    """By hand: two clients take one and 2.5 seconds, every update is a round, and an older one is dropped."""
    asked = rounds_of(FedBuff(1, max_staleness=0, concurrency=2), [1.0, 2.5], 6)
    assert [each.ends for each in asked] == [1, 2, 3, 4, 5, 6]
    assert {each.clients for each in asked} == {(0,)}
    assert [each.dropped for each in asked] == [(), (), ((1, 0, 0.0),), (), (), ((1, 2, 2.5),)]


def rounds_of(selection: Asynchronous, durations: list[float], rounds: int) -> list[Asked]:
    """The first ones, of clients that take so long."""
    server: Any = toy_server(LayerMap.of(nn.Linear(1, 1, bias=False)), [0.0], labels=[[1]] * len(durations))
    asked: list[Asked] = []
    for t in range(rounds):
        server.scratch = RoundScratch(t)
        asked.append(selection.select(server, 1.0, Timed(np.array(durations), asked[-1].ends if asked else 0.0)))
    return asked


def test_rounds_of_a_period() -> None:
    """By hand: every three seconds, with what is there. Client 0 returns each second, and one of its updates is used a round."""
    first, second, third = rounds_of(FedBuff(3, period=3.0, concurrency=3), [1.0, 2.5, 7.0], 3)
    assert [each.ends for each in (first, second, third)] == [3, 6, 9]
    assert (first.clients, first.versions, first.starts) == ((0, 1), (0, 0), (0, 0))
    assert (second.clients, second.versions, second.repeats, second.starts) == ((0, 1), (0, 0), (1, 1), (1, 2.5))
    assert (third.clients, third.versions, third.starts) == ((0, 1, 2), (1, 1, 0), (3, 5, 0))
    [alone] = rounds_of(FedBuff(1, period=2.0, concurrency=1), [5.0], 1)
    assert (alone.clients, alone.ends) == ((0,), 5)  # none is there after two seconds
    [both] = rounds_of(FedBuff(1, period=5.0, concurrency=2), [1.0, 2.0], 1)
    assert (both.clients, both.ends) == ((0, 1), 5)  # from the fourth second on both wait with a second update


def test_who_would_be_too_old_is_waited_for() -> None:
    """By hand: client 2 takes ten seconds, and its model may be one round old."""
    wait = FedBuff(2, max_staleness=1, on_stale="wait", concurrency=3)
    first, second = rounds_of(wait, [1.0, 1.0, 10.0], 2)
    assert (first.clients, first.ends) == ((0, 1), 1)
    assert (second.clients, second.versions, second.ends) == ((0, 1, 2), (1, 1, 0), 10)


def test_weights_of_sizes() -> None:
    """(1/2) Σ (n / 2) Δ of clients with one and three samples."""
    server: Any = toy_server(LayerMap.of(nn.Linear(1, 1, bias=False)), [1.0], labels=[[1], [3]])
    server.scratch = RoundScratch(0, asked=Asked((0, 1), (0, 0)))
    cohort: Any = ToyCohort(server, [[4.0], [8.0]], [1, 3])
    plan = FedBuff(2, weights="size").weightings()[0].plan(cohort, server, cohort.uniform())
    assert float(cohort.reduce(plan)) == pytest.approx(1 + (0.5 * 4 + 1.5 * 8) / 2)


def test_a_period_runs_and_is_resumed(tmp_path: Path) -> None:
    selection = {"fedbuff": {"buffer": 4, "period": 3.0, "concurrency": 6, "weights": "size"}}
    changes = {**UNEQUAL, "rounds": {**UNEQUAL["rounds"], "selection": selection, "checkpoint_every": 2}}
    whole = simulate(tiny(**changes), tmp_path / "whole")
    ends = table(tmp_path / "whole", "rounds")["sim_clock"]
    assert (np.diff(ends) >= 3 - 1e-9).all()
    begun = Federation(tiny(**changes), tmp_path / "parts")
    for _ in range(2):
        begun.step()
    begun.close()
    assert simulate(tiny(**changes), tmp_path / "parts", resume=True).sha256() == whole.sha256()


def test_a_selection_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how many end a round and who gets a free place; a resumed run is the undisturbed one."""

    @dataclass(frozen=True)
    class LargestFirst(Asynchronous):
        updates = 2

        def drawn(self, server: Any, pool: list[int], count: int, draws: int) -> list[int]:
            return sorted(pool, key=lambda client: -int(server.population.sizes[client]))[:count]

    monkeypatch.setitem(SELECTIONS, "largest_first", LargestFirst)
    rounds = {"total": 4, "selection": {"largest_first": {"concurrency": 3}}}
    whole = simulate(tiny(clock=UNEQUAL["clock"], rounds=rounds), tmp_path / "whole")
    rows = table(tmp_path / "whole", "clients")
    largest = np.argsort(-whole.partition.sizes, kind="stable")[:3]
    assert len(rows["round"]) == 4 * 2 and {*rows["client"][rows["round"] == 0]} < {*largest}
    simulate(tiny(clock=UNEQUAL["clock"], rounds={**rounds, "total": 2, "checkpoint_every": 1}), tmp_path / "parts")
    longer = tiny(clock=UNEQUAL["clock"], rounds=rounds)
    assert simulate(longer, tmp_path / "parts", resume=True).sha256() == whole.sha256()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            mixing() | {"weighting": ["feddisco"]},
            "fedasync: mixes in one model at a time, so that feddisco has nothing",
        ),
        ({"clock": {}}, "fedbuff: needs to know how long clients take"),
        (
            {"rounds": {**UNEQUAL["rounds"], "selection": {"fedbuff": {"buffer": 2, "on_stale": "wait"}}}},
            "on_stale: wait needs a max_staleness of 1 or more",
        ),
        ({"weighting": [{"fedldf": 1}]}, "fedldf: compares or chooses among clients that began at one model"),
        ({"client": ["scaffold"], "local": {"momentum": 0.0}}, "scaffold: corrects clients that began at one model"),
        ({"client": ["fedamp"]}, "fedamp: sends each client another model"),
        ({"server": [{"fedlws": {"lws_stats": "all"}}]}, "fedlws: compares models that began at one"),
        ({"server": ["feddf"], "data": {"proxy": {"samples": 8}}}, "feddf: compares models that began at one"),
        ({"download": ["bf16"]}, "fedbuff lets clients train from older models"),
        (
            {"rounds": {"min_clients": 2, "selection": {"fedbuff": {"buffer": 5, "period": 0.9}}}},
            r"rounds\.min_clients: is 2, but with fedbuff a period may end with one update\. Set it to 1, or",
        ),
        (
            {"rounds": {**UNEQUAL["rounds"], "selection": {"fedbuff": {"buffer": 9}}}},
            "more clients than the federation's 8",
        ),
        ({"clock": {"speed": 0}}, "clock: the value of speed is 0"),
        ({"clock": {"speed": "fast"}}, "no trait 'fast'"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny(**{**UNEQUAL, **changes})


def test_a_step_that_compares_models_is_told_why(tmp_path: Path) -> None:
    """One of the user's, of which raysim knows nothing."""
    run = Federation(tiny(**UNEQUAL), tmp_path)
    run.step()
    seen: list[str] = []
    reduce = type(run.aggregator).reduce

    def compare(aggregator: Any, mixture: Any, cohort: Any, server: Any) -> Any:
        with pytest.raises(
            ValueError, match=r"began at models of different rounds\. Only their updates can be compared"
        ):
            cohort.distances(server.value)
        seen.append("")
        return reduce(aggregator, mixture, cohort, server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.aggregator), "reduce", compare)
        run.step()
    run.close()
    assert seen
    assert torch.isfinite(run.server.value).all()


@dataclass(frozen=True)
class Wrong(Selection):
    """Returns what it is told to."""

    def select(self, server: Any, participation: float, clients: Any) -> Asked:
        return SELECTED[0]


SELECTED: list[Any] = []


@pytest.mark.parametrize(
    ("selected", "sentence"),
    [
        (
            Asked((2, 1)),
            r"returned the clients \[2, 1\]. It must be some of the 8 clients, which count from 0, each once and",
        ),
        (Asked((1, 1)), r"returned the clients \[1, 1\]"),
        (Asked((1, 8)), r"returned the clients \[1, 8\]"),
        ((1, 2), r"Wrong.select returned a tuple. Return raysim.Asked\(clients\)"),
    ],
)
def test_a_selection_of_what_is_not_there(
    selected: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SELECTIONS, "wrong", Wrong)
    SELECTED[:] = [selected]
    with pytest.raises(HookError, match=sentence):
        simulate(tiny(rounds={"selection": "wrong"}), tmp_path)
