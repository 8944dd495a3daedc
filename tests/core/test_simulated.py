"""Simulated time, from a client's traits to the columns of a run."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case import Traced
from conftest import simulate, table, tiny
from sabotage import Fails

from raysim.config import ConfigError
from raysim.core.hooks import HookError
from raysim.core.local_run import LocalRun
from raysim.core.selection import Asked, Selection
from raysim.core.simulated import Column, Constant, HalfNormal, LogNormal, Pareto, Range, SimulatedClock, Trait, Zipf
from raysim.federation import Federation
from raysim.federation.failures import RoundFailed
from raysim.methods import CLIENTS, SELECTIONS

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "clock.json").read_text())["cases"]


def seconds(case: dict[str, Any], up: float, down: float, epochs: int) -> np.ndarray:
    """Of the clients asked, one clock each: traits are numbers there."""
    inputs, found = case["inputs"], []
    by_id = {client["id"]: client for client in inputs["clients"]}
    for client in (by_id[c] for c in inputs["asked"]):
        clock = SimulatedClock(**{name: Constant(client[name]) for name in ("speed", "up", "down", "latency")})
        made = clock.seconds(0, [0], np.array([epochs * client["samples"]]), np.array([up]), np.array([down]))
        found.append(made.total[0])
    return np.array(found)


def test_seconds() -> None:
    case = next(case for case in CASES if "seconds" in case["expect"])
    inputs = case["inputs"]
    found = seconds(case, inputs["bytes_up"], inputs["bytes_down"], inputs["epochs"])
    assert dict(zip(map(str, inputs["asked"]), found, strict=True)) == pytest.approx(
        case["expect"]["seconds"], rel=1e-12
    )


def test_twice_as_fast() -> None:
    """Without a latency half the seconds."""
    amounts = (np.array([70.0, 9.0]), np.array([300.0, 20.0]), np.array([500.0, 50.0]))
    slow, fast = (
        SimulatedClock(speed=LogNormal(7.0 * n, 0.5), up=Constant(11 * n), down=Constant(13 * n)).seconds(
            0, [0, 1], *amounts
        )
        for n in (1, 2)
    )
    np.testing.assert_array_equal(slow.total, 2 * fast.total)


def test_barrier() -> None:
    """Statistics of all clients go up first; then the server says who sends what."""
    [case] = [case for case in CASES if case["rule"] == "barrier"]
    inputs = case["inputs"]
    until = seconds(case, inputs["bytes_statistics"], inputs["bytes_down"], inputs["epochs"])
    upload = seconds(case, inputs["bytes_sent"], inputs["bytes_mask"], 0)
    assert until.max() == pytest.approx(case["expect"]["until_plan"], rel=1e-12)
    assert dict(zip(map(str, inputs["asked"]), upload, strict=True)) == pytest.approx(
        case["expect"]["upload"], rel=1e-12
    )
    assert until.max() + upload.max() == pytest.approx(case["expect"]["round"], rel=1e-12)


def test_a_network_has_its_bandwidths_in_the_median() -> None:
    """4G: 25 Mbit/s down and 8 up, 0.06 s: a megabyte takes 0.32 s down and 1 s up."""
    n = 4000
    made = SimulatedClock(network="4g").seconds(3, range(n), np.zeros(n), np.full(n, 1e6), np.full(n, 1e6))
    found = [np.median(part) for part in (made.down, made.up, made.latency)]
    assert found == pytest.approx([0.32, 1.0, 0.06], rel=0.05)
    assert np.log(made.up).std() == pytest.approx(0.5, rel=0.05)
    assert SimulatedClock(network="4g", up=LogNormal(1e6, 0.5)) == SimulatedClock(network="4g"), (
        "as a config.yaml says it"
    )
    with pytest.raises(ValueError, match="network 4g and up both say what up is"):
        SimulatedClock(network="4g", up=Constant(1e6))


def test_a_client_has_its_traits_in_any_company() -> None:
    clock = SimulatedClock(speed=LogNormal(75.0, 0.6), latency=Constant(0.5))
    none, samples = np.zeros(4), np.full(4, 100.0)
    whole = clock.seconds(3, [0, 5, 7, 9], samples, none, none)
    alone = clock.seconds(3, [7], samples[:1], none[:1], none[:1])
    assert whole.train[2] == alone.train[0]
    assert len({*whole.train}) == 4
    many = clock.seconds(3, range(4000), np.full(4000, 75.0), np.zeros(4000), np.zeros(4000)).train
    assert np.median(1 / many) == pytest.approx(1, rel=0.05)
    assert np.log(many).std() == pytest.approx(0.6, rel=0.05)


@pytest.mark.parametrize(
    ("trait", "median", "least", "most"),
    [
        (Range(10.0, 30.0), 20, 10, 30),
        (Pareto(100.0, 1.0), 50, 1, 100),
        (Pareto(8.0, 2.0), 8 / 2**0.5, 0.08, 8),
        (HalfNormal(2.0, 3.0), 2 + 3 * 0.67449, 2, np.inf),
    ],
)
def test_traits(trait: Trait, median: float, least: float, most: float) -> None:
    clock = SimulatedClock(speed=trait)
    speeds = 1 / clock.seconds(0, range(4000), np.ones(4000), np.zeros(4000), np.zeros(4000)).train
    assert np.median(speeds) == pytest.approx(median, rel=0.06)
    assert least <= speeds.min() * (1 + 1e-12)
    assert speeds.max() <= most * (1 + 1e-12)


def test_zipf() -> None:
    """With a = 2: k with probability 6 / π² / k². A client whose draw is 100 or more has a hundredth."""
    one, two, hundred = (
        6 / np.pi**2,
        7.5 / np.pi**2,
        1 - 6 / np.pi**2 * (np.pi**2 / 6 - (1 / np.arange(1, 100.0) ** 2).sum()),
    )
    u = np.array([0, one - 1e-9, one + 1e-9, two - 1e-9, two + 1e-9, hundred - 1e-9, hundred + 1e-9, 1 - 1e-12])
    wanted = [60, 60, 30, 30, 20, 60 / 99, 0.6, 0.6]
    np.testing.assert_allclose(Zipf(60.0, 2.0).of(np.arange(8), u), wanted)


def test_measured_devices(tmp_path: Path) -> None:
    """FedScale's device: 97 ms of inference a sample and 4500 kbit/s. With two rows, clients 1 and 3 are the second."""
    [case] = [case for case in CASES if case["rule"] == "fedscale_device"]
    inputs, expect = case["inputs"], case["expect"]
    speed, rate = 1000 / (3 * inputs["computation"]), inputs["communication"] * 1024 / 8
    assert [speed, rate] == pytest.approx([expect["speed"], expect["bytes_per_second"]], rel=1e-12)
    file = tmp_path / "devices.csv"
    file.write_text(f"speed,rate\n9,9\n{speed!r},{rate!r}\n")
    traits = {
        name: Column(str(file), column) for name, column in (("speed", "speed"), ("up", "rate"), ("down", "rate"))
    }
    size = np.full(2, float(inputs["model_bytes"]))
    made = SimulatedClock(**traits).seconds(0, [1, 3], np.full(2, inputs["samples"]), size, size)
    np.testing.assert_allclose(made.train, expect["compute_seconds"], rtol=1e-12)
    np.testing.assert_allclose(made.up + made.down, expect["transfer_seconds"], rtol=1e-12)


@pytest.mark.parametrize(
    ("column", "fault"),
    [
        ("up", "has no column up. It has speed, name"),
        ("speed", "speed must be above 0"),
        ("name", "name must be above 0"),
    ],
)
def test_tables_of_no_devices(column: str, fault: str, tmp_path: Path) -> None:
    (file := tmp_path / "devices.csv").write_text("speed,name\n1,a\n0,b\n3,c\n")
    clock = {"latency": {"table": {"file": str(file), "column": column}}}
    with pytest.raises(ConfigError, match=f"clock.latency: .*{fault}"):
        simulate(tiny(clock=clock), tmp_path / "run")


def test_jitter() -> None:
    """A log-normal factor on all that a client does, another one in every round."""
    amounts, rates = (
        np.full(4000, 100.0),
        {"speed": Constant(10), "up": Constant(20), "down": Constant(50), "latency": Constant(0.5)},
    )
    plain = SimulatedClock(**rates)
    clock = SimulatedClock(**rates, jitter=0.3)
    usual = plain.seconds(3, range(4000), amounts, amounts, amounts).total
    factors = np.array([clock.seconds(3, range(4000), amounts, amounts, amounts, t).total / usual for t in (0, 1)])
    np.testing.assert_allclose(np.log(factors).std(1), 0.3, rtol=0.05)
    np.testing.assert_allclose(np.median(factors, 1), 1, rtol=0.02)
    assert abs(np.corrcoef(np.log(factors))[0, 1]) < 0.05
    parts = clock.seconds(3, [7, 9], amounts[:2], amounts[:2], amounts[:2], np.array([1, 0]))
    np.testing.assert_allclose(parts.total, usual[0] * factors[[1, 0], [7, 9]])
    np.testing.assert_allclose(parts.train / parts.latency, 10 / 0.5)


@dataclass(frozen=True)
class Few(Trait):
    """Forgets most clients."""

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        return u[:1]


def test_a_trait_for_too_few() -> None:
    none = np.zeros(3)
    with pytest.raises(HookError, match=r"Few.of returned a ndarray. Return \[3\], a number >= 0 for each client"):
        SimulatedClock(up=Few()).seconds(0, range(3), none, none, none)


CLOCK = {"speed": 50, "up": 2000, "down": 8000, "latency": 0.25}
FOMO: dict[str, Any] = {
    "client": ["fedfomo"],
    "data": {"client_val_frac": 0.2},
    "rounds": {"total": 5},
}  # models of others
STILL: dict[str, Any] = {"local": {"momentum": 0.0, "weight_decay": 0.0}}


@pytest.mark.parametrize(
    ("changes", "sends"),
    [
        ({}, "up_buffers"),
        ({"model": {"bn_stats": "local"}, "evaluate": {"global": False}}, ""),  # statistics stay
        ({"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}}, "up_vectors"),
        ({"weighting": ["ccn"]}, "up_scalars"),  # latents travel with the model
        ({"weighting": [{"random_layer": 1}]}, "up_buffers"),
        ({"weighting": [{"hdfl": 2}]}, "up_buffers"),
    ],
    ids=["buffers", "without buffers", "vectors", "latents", "random layers", "hdfl"],
)
def test_a_round_takes_as_long_as_its_slowest_client(changes: dict[str, Any], sends: str, ran: Any) -> None:
    """One phase, in which bytes count as they are sent. The bits are those of a run without a clock."""
    run, plain = ran(clock=CLOCK, **changes), ran(**changes)
    assert run.sha256() == plain.sha256()
    rounds, clients, traffic = (table(run.folder, name) for name in ("rounds", "clients", "traffic"))
    assert np.isnan(table(plain.folder, "rounds")["sim_clock"]).all()
    up = sum(traffic[name] for name in traffic if name.startswith("up_"))
    down = sum(traffic[name] for name in traffic if name.startswith("down_"))
    assert traffic[sends].any() if sends else not traffic["up_buffers"].any()
    np.testing.assert_allclose(clients["sim_up"], up / 2000)
    np.testing.assert_allclose(clients["sim_down"], 0.25 + down / 8000)
    np.testing.assert_allclose(clients["sim_train"], clients["samples"] / 50)
    total = clients["sim_down"] + clients["sim_train"] + clients["sim_up"]
    longest = [total[clients["round"] == t].max() for t in range(3)]
    np.testing.assert_allclose(rounds["sim_seconds"], longest)
    np.testing.assert_allclose(rounds["sim_clock"], np.cumsum(longest))
    results = (json.loads((each.folder / "result.json").read_text()) for each in (run, plain))
    assert [result["sim_seconds"] for result in results] == [rounds["sim_clock"][-1], None]


@pytest.mark.parametrize(
    ("client", "more"),  # samples of a pass are read from the traces, or they are so many of the client's own
    [
        ({"fedala": {"epochs": 2, "fraction": 0.5}}, None),
        ({"ditto": 3}, None),
        ({"fedrep": 2}, None),
        ({"finetune": 2}, None),
        ({"scaffold": "option_1"}, 1),
        ({"pfedme": {"inner_steps": 3}}, 4),
        ("moon", 4 / 3),  # two models that only go forward, in two epochs
        ("fedphp", 2 / 3),
    ],
    ids=str,
)
def test_passes_besides_the_epochs_count(client: Any, more: float | None, tmp_path: Path) -> None:
    """In the third round, when FedALA's weights have settled."""
    local = {"epochs": 2, "momentum": 0.0, "weight_decay": 0.0}
    changes = {"client": [client], "local": local, "rounds": {"participation": 1.0}, "record": {"traces": "rounds"}}
    run = simulate(tiny(clock={"speed": 50}, **changes), tmp_path)
    clients = table(tmp_path, "clients")
    for traced in Traced(tmp_path, 2, run).clients:
        [took] = clients["sim_train"][(clients["round"] == 2) & (clients["client"] == traced.id)]
        passed = sum(map(len, traced.steps)) if more is None else (2 + more) * traced.samples
        assert took * 50 == pytest.approx(passed)


@pytest.mark.parametrize(
    ("client", "drop_last"),
    [(None, True), ("perfedavg", False), ("perfedavg", True), ({"scaffold": "option_1"}, True), ("ditto", True),
     ({"fedala": {"fraction": 0.5}}, True)],
    ids=str,
)  # fmt: skip
def test_samples_that_no_batch_has_take_no_time(
    client: Any, drop_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients of the third round are counted as they are computed."""
    seen, real = Counter[int](), LocalRun.gradient

    def gradient(run: LocalRun, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        if run.t == 2:
            seen[run.client] += len(y)
        return real(run, x, y, *args, **kwargs)

    monkeypatch.setattr(LocalRun, "gradient", gradient)
    local = {"epochs": 2, "batch_size": 7, "momentum": 0.0, "weight_decay": 0.0, "drop_last": drop_last}
    changes = {"client": [client] if client else [], "local": local, "rounds": {"participation": 1.0}}
    run = simulate(tiny(clock={"speed": 50}, model={"name": "mlp"}, **changes), tmp_path)
    rows = table(tmp_path, "clients")
    last = rows["round"] == 2
    took = dict(zip(rows["client"][last].tolist(), (50 * rows["sim_train"][last]).tolist(), strict=True))
    assert took == pytest.approx(dict(seen))
    if client is None:
        assert took == pytest.approx({c: 2 * (n - n % 7 if n >= 7 else n) for c, n in enumerate(run.partition.sizes)})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clock": {"availability": {"diurnal": {"share": 0.5, "period": 9}}, "interrupt": "ignore"}},
        {"rounds": {"selection": {"fedbuff": {"buffer": 2}}}},
    ],
    ids=["rounds", "clients come and go", "fedbuff"],
)
def test_the_server_takes_time(changes: dict[str, Any], ran: Any) -> None:
    """At the end of each round: two epochs of its 40 samples at 16 a second, and 0.5 s. Then the next one begins."""
    clock = {**CLOCK, "server_seconds": 0.5, "server_speed": 16, **changes.get("clock", {})}
    proxy = {"data": {"proxy": {"samples": 40}}, "server": [{"server_ft": {"epochs": 2}}]}
    run = ran(**{**changes, **proxy, "clock": clock})
    rounds, clients = table(run.folder, "rounds"), table(run.folder, "clients")
    ends = clients["sim_start"] + clients["sim_down"] + clients["sim_train"] + clients["sim_up"]
    begins = rounds["sim_clock"] - rounds["sim_seconds"]
    last = np.array([ends[clients["round"] == t].max() for t in range(3)])
    np.testing.assert_allclose(rounds["sim_clock"], np.maximum(last, begins) + 5.5)
    np.testing.assert_allclose(begins[1:], rounds["sim_clock"][:-1] + rounds["sim_idle"][1:])
    sent_in = np.nan_to_num(clients["version"], nan=clients["round"]).astype(int)
    assert (clients["sim_start"] >= begins[sent_in] - 1e-9).all()


def test_the_server_alone_takes_time(ran: Any) -> None:
    run = ran(clock={"server_seconds": 0.5})
    np.testing.assert_allclose(table(run.folder, "rounds")["sim_clock"], [0.5, 1.0, 1.5])


def test_who_waits_for_all_statistics(ran: Any) -> None:
    """FedLDF has two phases: each begins when the last client has ended the one before, and each has a latency."""
    run = ran(clock=CLOCK, weighting=[{"fedldf": 1}])
    rounds, clients, traffic = (table(run.folder, name) for name in ("rounds", "clients", "traffic"))
    np.testing.assert_allclose(
        clients["sim_down"], 0.5 + sum(traffic[n] for n in traffic if n.startswith("down_")) / 8000
    )
    first = 0.25 + (traffic["down_params"] + traffic["down_buffers"]) / 8000 + clients["samples"] / 50
    first = first + traffic["up_scalars"] / 2000
    then = 0.25 + traffic["down_masks"] / 8000 + (traffic["up_params"] + traffic["up_buffers"]) / 2000
    wanted = [first[clients["round"] == t].max() + then[clients["round"] == t].max() for t in range(3)]
    np.testing.assert_allclose(rounds["sim_seconds"], wanted)


def test_a_fifth_of_the_upload(ran: Any) -> None:
    """FedLDF with each layer of one of five clients: a fifth of FedAvg's seconds to send parameters, besides its barrier."""
    five, sums = {"clock": CLOCK, "rounds": {"participation": 0.7}}, []
    for changes in ({}, {"weighting": [{"fedldf": 1}]}):
        run = ran(**five, **changes)
        clients, traffic = table(run.folder, "clients"), table(run.folder, "traffic")
        others = sum(traffic[name] for name in traffic if name.startswith("up_") and name != "up_params")
        sums.append((clients["sim_up"] - others / 2000).sum())
    assert sums[1] == pytest.approx(0.2 * sums[0])


def test_rounds_that_close_early() -> None:
    """With the return of the last that is needed, at the deadline, and with the last event where fewer return."""
    cases = [case for case in CASES if case["rule"] == "round_seconds"]
    took = np.array([cases[0]["expect"]["seconds"][str(c)] for c in cases[0]["inputs"]["asked"]])
    for case in cases:
        clock, expect = SimulatedClock(deadline=case["params"]["deadline"]), case["expect"]
        lost, lasts = clock.closed(0, 0, case["inputs"]["asked"], took, case["params"]["cohort"])
        assert lost == dict.fromkeys(expect["late"], "late")
        assert {*case["inputs"]["asked"]} - {*lost} == {*expect["used"]}
        assert lasts == pytest.approx(expect["round"], rel=1e-12)
    assert SimulatedClock().closed(0, 0, (1, 2), np.array([1.0, 1.0]), 1) == ({2: "late"}, 1.0)  # ties by number
    [case] = [case for case in CASES if case["rule"] == "over_select"]
    pairs = case["inputs"]["cohort_and_share"]
    assert [SimulatedClock(over_select=share).asks(k) for k, share in pairs] == case["expect"]["asked"]


def test_clients_drop_out_at_any_instant_of_their_work() -> None:
    clock, clients = SimulatedClock(dropout=0.25), range(4000)
    lost, lasts = clock.closed(3, 1, clients, np.full(4000, 10.0), 4000)
    assert len(lost) == pytest.approx(1000, rel=0.1) and {*lost.values()} == {"dropped out"}
    assert lasts == 10
    alone, missed = clock.closed(3, 1, (client := min(lost),), np.array([10.0]), 1)
    assert alone == {client: "dropped out"} and 0 <= missed <= 10
    missed_at = [clock.closed(3, 1, (client,), np.array([10.0]), 1)[1] for client in lost]
    assert np.mean(missed_at) == pytest.approx(5, rel=0.1)


@dataclass(frozen=True)
class Those(Selection):
    """The clients that another run has used."""

    clients: tuple[tuple[int, ...], ...]

    def select(self, server: Any, participation: float, seconds: Any) -> Asked:
        return Asked(self.clients[server.t])


@pytest.mark.parametrize(
    "changes",
    [
        {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
        {"client": ["fedala"]},
        {"client": ["ditto"]},
        {"client": ["fedrep"], "evaluate": {"global": False}},
        {"upload": ["error_feedback", {"top_k": 0.1}]},
    ],
    ids=["scaffold", "fedala", "ditto", "fedrep", "error feedback"],
)
def test_who_is_lost_changes_nothing_but_the_tables(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits, of clients' states too, are those of a run that asked only the others; who was late has sent, who dropped out
    has not."""
    clock = CLOCK | {
        "speed": {"lognormal": {"median": 20, "sigma": 1}},
        "over_select": 0.7,
        "dropout": 0.3,
        "deadline": 60,
    }
    run = simulate(tiny(**changes, clock=clock), tmp_path / "lossy")
    rounds, clients, traffic = (table(tmp_path / "lossy", name) for name in ("rounds", "clients", "traffic"))
    used = clients["status"] == "ok"
    assert {*clients["status"]} == {"ok", "late", "dropped out"}
    by_round = [tuple(clients["client"][used & (clients["round"] == t)].tolist()) for t in range(3)]
    assert all(1 <= len(some) <= 3 for some in by_round)
    assert [int((clients["round"] == t).sum()) for t in range(3)] == [6, 6, 6]  # 3 and seven tenths, rounded up
    monkeypatch.setitem(SELECTIONS, "those", Those)
    only = simulate(tiny(**changes, rounds={"selection": {"those": {"clients": by_round}}}), tmp_path / "only")
    assert run.sha256() == only.sha256()

    sent = {(t, c): n for t, c, n in zip(traffic["round"], traffic["client"], traffic["up_params"], strict=True)}
    status = {(t, c): s for t, c, s in zip(clients["round"], clients["client"], clients["status"], strict=True)}
    assert {s: {sent[key] > 0 for key in status if status[key] == s} for s in ("ok", "late", "dropped out")} == {
        "ok": {True}, "late": {True}, "dropped out": {False}
    }  # fmt: skip
    assert (traffic["down_params"] > 0).all()
    assert (rounds["sim_seconds"] <= 60 + 1e-9).all()
    np.testing.assert_allclose(rounds["sim_clock"], np.cumsum(rounds["sim_seconds"]))


def test_who_is_lost_works_until_then(ran: Any) -> None:
    """The late one does all that it was asked for; who drops out has begun a part when the one before was done."""
    run = ran(clock=CLOCK | {"over_select": 0.7, "dropout": 0.3}, rounds={"total": 8})
    clients, traffic = table(run.folder, "clients"), table(run.folder, "traffic")
    size = float((traffic["down_params"] + traffic["down_buffers"])[0])
    whole = np.stack([np.full(len(clients["round"]), 0.25 + size / 8000), clients["samples"] / 50])
    whole = np.append(whole, [np.full(len(clients["round"]), size / 2000)], axis=0)
    did = np.stack([clients[name] for name in ("sim_down", "sim_train", "sim_up")])
    late, dropped = (clients["status"] == why for why in ("late", "dropped out"))
    assert late.sum() > 3 and dropped.sum() > 3
    np.testing.assert_allclose(did[:, late], whole[:, late])
    part, full = did[:, dropped], whole[:, dropped]
    assert ((part <= full + 1e-9) & (part.sum(0) < full.sum(0))).all()
    assert ((part[1:] == 0) | np.isclose(part[:-1], full[:-1])).all()
    assert (part[2] == 0).any() and (part[1] > 0).any()


LOSSY: dict[str, Any] = {
    "speed": {"lognormal": {"median": 20, "sigma": 1}}, "up": 2000, "down": 8000, "over_select": 0.7, "dropout": 0.2, "jitter": 0.3,
    "availability": {"markov": {"available": 60, "away": 20}},
}  # fmt: skip


@pytest.mark.parametrize("weighting", [[], [{"random_layer": 1}]], ids=["fedavg", "random layers"])
def test_time_is_the_same_on_any_hosts(weighting: list[Any], tmp_path: Path, warm_ray: Any) -> None:
    """Where clients are late, drop out and leave."""
    changes = {"clock": LOSSY, "weighting": weighting, "rounds": {"total": 5, "participation": 0.5}}
    local = simulate(tiny(**changes), tmp_path / "local")
    actors = tiny(**changes, engine={"ray": {"clients_per_actor": 1}})
    ray = simulate(actors, tmp_path / "ray", make_engine=warm_ray)
    assert ray.sha256() == local.sha256()
    assert {*table(tmp_path / "local", "clients")["status"]} >= {"ok", "late", "dropped out"}
    for name in ("rounds", "clients"):
        mine, theirs = table(tmp_path / "local", name), table(tmp_path / "ray", name)
        for column in ("client", "status", *(column for column in mine if column.startswith("sim_"))):
            if column in mine:
                np.testing.assert_array_equal(mine[column], theirs[column])


FEW = {"speed": {"lognormal": {"median": 20, "sigma": 1}}, "up": 2000, "down": 8000, "dropout": 0.6}


def test_others_are_asked_where_too_few_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on, all bytes count, and the bits are those of a run that asked only the clients used."""
    data = {"partition": {"iid_equal": {"clients": 40}}}
    rounds: dict[str, Any] = {"min_clients": 2, "participation": 0.075}
    config = tiny(clock=FEW, rounds=rounds, data=data)
    run = simulate(config, tmp_path / "few")
    clients, traffic, of_rounds = (table(tmp_path / "few", name) for name in ("clients", "traffic", "rounds"))
    asked = np.bincount(clients["round"])
    assert asked.max() > 3 and {*clients["status"]} >= {"ok", "dropped out", "abandoned"}
    used = clients["status"] == "ok"
    by_round = [tuple(clients["client"][used & (clients["round"] == t)].tolist()) for t in range(3)]
    assert all(2 <= len(some) <= 3 for some in by_round)
    monkeypatch.setitem(SELECTIONS, "those", Those)
    only = simulate(
        tiny(data=data, rounds={**rounds, "selection": {"those": {"clients": by_round}}}), tmp_path / "only"
    )
    assert run.sha256() == only.sha256()

    sent = {(t, c): n for t, c, n in zip(traffic["round"], traffic["client"], traffic["up_params"], strict=True)}
    rows = [*zip(clients["round"], clients["client"], clients["status"], strict=True)]
    assert len(rows) == len(sent) == len({row[:2] for row in rows})
    assert all((sent[t, c] > 0) == (status in ("ok", "abandoned")) for t, c, status in rows)
    began = np.concatenate([[0.0], of_rounds["sim_clock"][:-1]])
    np.testing.assert_allclose(of_rounds["sim_clock"] - began, of_rounds["sim_seconds"])
    for t in range(3):
        here = clients["round"] == t
        starts = clients["sim_start"][here]
        assert starts.min() == began[t]
        returned = (starts + sum(clients[f"sim_{part}"][here] for part in ("down", "train", "up")))[used[here]]
        assert returned.max() <= of_rounds["sim_clock"][t] + 1e-9
        assert (len({*starts}) > 1) == (asked[t] > 3)  # those who were asked later began later
    assert (starts[used[here]] >= starts.max()).all()


@pytest.mark.parametrize(("on_few", "asked"), [("retry", 8), ("proceed", 3)])
def test_where_none_returns_the_model_stays(on_few: str, asked: int, tmp_path: Path) -> None:
    """Each of the eight clients is asked once at most; all are late, so each attempt lasts until its deadline."""
    clock = {"speed": 1e-3, "deadline": 1.0, "on_few": on_few}
    run = simulate(tiny(clock=clock, rounds={"total": 1}), tmp_path)
    assert table(run.folder, "clients")["status"].tolist() == ["late"] * asked
    assert table(run.folder, "layers")["update_norm"].max() == 0
    assert table(run.folder, "rounds")["sim_seconds"].tolist() == [3.0 if on_few == "retry" else 1.0]
    if on_few == "retry":
        assert "the model stays as it is" in table(run.folder, "events")["message"][0]


def test_each_attempt_asks_its_own_candidates(tmp_path: Path) -> None:
    """Of eight clients six are asked for a loss, and three of them for a model, which is late after a second. Then it is all five
    that are left, two of them new, and then two. A number takes four seconds to send."""
    selection = {"power_of_choice": {"candidates": 6}}
    run = simulate(
        tiny(clock={"up": 1, "down": 1000, "deadline": 1.0}, rounds={"total": 1, "selection": selection}), tmp_path
    )
    clients = table(run.folder, "clients")
    assert clients["status"].tolist() == ["late"] * 8
    model = 4 * run.server.layers.S / 1000
    assert table(run.folder, "rounds")["sim_seconds"][0] == pytest.approx((model + 5) + (model + 5) + 5)
    starts = np.repeat([0, model + 5, 2 * (model + 5)], [3, 3, 2])
    np.testing.assert_allclose(np.sort(clients["sim_start"]), starts)


def test_clients_without_samples_are_not_given_up(tmp_path: Path) -> None:
    """They were asked for nothing, also where the round then asks others."""
    partition = {"dirichlet_counts": {"alpha": 0.1, "clients": 60, "min_size": 0}}
    rounds = {"total": 3, "participation": 0.15, "min_clients": 3}
    clock = {"speed": 100, "latency": 1, "dropout": 0.6}
    simulate(tiny(data={"partition": partition, "allow_empty_clients": True}, rounds=rounds, clock=clock), tmp_path)
    clients = table(tmp_path, "clients")
    assert "abandoned" in clients["status"]
    assert {*clients["status"][clients["samples"] == 0]} == {"has no training samples"}


def test_nobody_is_left_to_ask(tmp_path: Path) -> None:
    """Of an availability that a table gives."""
    (tmp_path / "spells.csv").write_text("client,start,stop\n" + "".join(f"{i},0,1e6\n" for i in range(8)))
    clock = {"speed": 1e-3, "deadline": 1.0, "availability": {"table": {"file": str(tmp_path / "spells.csv")}}}
    run = simulate(tiny(clock=clock, rounds={"total": 1, "participation": 1.0}), tmp_path / "run")
    assert table(run.folder, "clients")["status"].tolist() == ["late"] * 8


def test_a_run_that_stops_where_too_few_return(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match=r"round 1: of 3 clients fewer than 1, .* another run with clock\.on_few"):
        simulate(tiny(clock={"speed": 1e-3, "deadline": 1.0, "on_few": "stop"}), tmp_path)


def test_who_is_late_sends_as_much_as_the_others(ran: Any) -> None:
    """Top-k sends the same number of bytes for every model, and fewer than a client receives."""
    run = ran(clock=CLOCK | {"over_select": 0.7}, upload=["top_k"])
    traffic = table(run.folder, "traffic")
    assert "late" in table(run.folder, "clients")["status"]
    up, down = (sum(traffic[name] for name in traffic if name.startswith(way)) for way in ("up_", "down_"))
    assert len({*(up - traffic["up_scalars"])}) == 1 and (up < down).all()
    assert (traffic["bytes"] == up + down).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"client": ["fedrep"], "upload": ["bf16"]},
        {"client": ["scaffold"], "upload": ["bf16"], **STILL},
        {"weighting": ["ccn"]},
        {"model": {"bn_stats": "local"}},
        {"model": {"bn_stats": "recalibrate"}, "data": {"proxy": {"samples": 40}}},
    ],
    ids=["the head", "vectors", "latents", "statistics", "statistics that only the server sends"],
)
def test_who_is_late_sends_what_the_others_do(changes: dict[str, Any], ran: Any) -> None:
    run = ran(clock=CLOCK | {"over_select": 0.7}, **changes, evaluate={"global": False})
    traffic, clients = table(run.folder, "traffic"), table(run.folder, "clients")
    sent = {s: by_status(clients, traffic, s) for s in ("ok", "late")}
    assert sent["ok"] == sent["late"] and len(sent["ok"]) == 1
    late = clients["status"] == "late"
    [(up, down)] = sent["late"]
    np.testing.assert_allclose(clients["sim_up"][late], up / 2000)
    np.testing.assert_allclose(clients["sim_down"][late], 0.25 + down / 8000)


@pytest.mark.parametrize(
    "changes",
    [
        {"client": ["scaffold"], **STILL},
        {"client": ["scaffold"], "upload": [{"top_k": 0.1}], "download": [{"uniform": {"bits": 8}}], **STILL},
        {"download": ["top_k"], "rounds": {"total": 5}},
        {"client": ["fedrep"], "download": [{"uniform": {"bits": 8}}], "evaluate": {"global": False}},
        {"weighting": ["feddisco", "ccn"]},  # label counts, once, and latents
        {"weighting": [{"random_layer": 1}]},
        {"model": {"bn_stats": "first"}},
        {"model": {"bn_stats": "local"}, "client": ["moon"], "upload": ["bf16"], "evaluate": {"global": False}},
        FOMO,
        {"rounds": {"selection": "by_size"}},
        {"rounds": {"selection": "oort"}},
        {"rounds": {"selection": "power_of_choice"}, "download": ["bf16"]},
    ],
    ids=str,
)
def test_a_deadline_that_loses_no_client_changes_nothing(changes: dict[str, Any], ran: Any) -> None:
    """What clients are expected to be sent and to send is what they are sent and send."""
    plain, closes = ran(clock=CLOCK, **changes), ran(clock=CLOCK | {"deadline": 1e9}, **changes)
    assert plain.sha256() == closes.sha256()
    for name in ("rounds", "clients", "traffic"):
        one, other = table(plain.folder, name), table(closes.folder, name)
        for column in one.keys() - {"wall", "seconds"}:
            if column.startswith(("sim_", "up_", "down_", "client", "bytes")):
                np.testing.assert_allclose(one[column], other[column], rtol=1e-12, err_msg=f"{name}.{column}")


def test_what_is_expected_does_not_depend_on_the_round(ran: Any, tmp_path: Path) -> None:
    """It is found out once in a process, and a run that is resumed has a model and a control variate of a later round."""
    changes = {"client": [{"fedadp": {"keep": 0.5}}, "scaffold"], "clock": CLOCK | {"deadline": 1e9}, **STILL}
    trained = ran(**changes)
    vars(trained.run).pop("message")
    fresh = Federation(tiny(**changes), tmp_path)
    found = [trained.run.message, fresh.run.message]
    fresh.close()
    one, other = ((each.model_bytes.tolist(), each.vector_bytes, each.mask_bytes) for each in found)
    assert one == other


def test_another_shows_what_is_sent_where_a_client_fails(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setitem(CLIENTS, "fails", Fails)
    least = int(ran().run.partition.sizes.argmin())
    clock = CLOCK | {"deadline": 1e9}
    simulate(tiny(client=[{"fails": {"how": "refuses", "client": least}}], clock=clock), tmp_path / "one")
    with pytest.raises(RoundFailed, match=r"for a trial, .* none came back: .* holds no sense"):
        simulate(tiny(client=[{"fails": {"how": "refuses"}}], clock=clock), tmp_path / "all")


def test_who_is_late_was_sent_the_models_of_others(ran: Any) -> None:
    run = ran(clock=CLOCK | {"over_select": 0.7}, **FOMO)
    traffic, clients = table(run.folder, "traffic"), table(run.folder, "clients")
    down = sum(traffic[name] for name in traffic if name.startswith("down_"))
    of = dict(zip(zip(traffic["round"], traffic["client"], strict=True), down, strict=True))
    late = clients["status"] == "late"
    sent = [of[key] for key in zip(clients["round"][late], clients["client"][late], strict=True)]
    assert max(sent) >= 2 * min(sent)
    np.testing.assert_allclose(clients["sim_down"][late], 0.25 + np.array(sent) / 8000)


def by_status(clients: Any, traffic: Any, status: str) -> set[tuple[int, int]]:
    """Bytes up and down of each of the clients with that status."""
    up, down = (sum(traffic[name] for name in traffic if name.startswith(way)) for way in ("up_", "down_"))
    keys = zip(clients["round"], clients["client"], clients["status"], strict=True)
    chosen = {(t, client) for t, client, its in keys if its == status}
    rows = zip(traffic["round"], traffic["client"], up.tolist(), down.tolist(), strict=True)
    return {(sent, received) for t, client, sent, received in rows if (t, client) in chosen}


def test_who_fails_is_not_waited_for(ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the client with the most samples, which is the slowest, diverges in the last round."""
    monkeypatch.setitem(CLIENTS, "fails", Fails)
    plain = table(ran().folder, "clients")
    drawn = {
        client: n
        for t, client, n in zip(*(plain[name] for name in ("round", "client", "samples")), strict=True)
        if t == 2
    }
    slowest = max(drawn, key=lambda client: drawn[client])
    fails = {"fails": {"how": "diverges", "client": int(slowest), "t": 2}}
    simulate(tiny(client=[fails], clock={"speed": 50}), tmp_path)
    assert table(tmp_path, "rounds")["clients_failed"].tolist() == [0, 0, 1]
    others = max(n for client, n in drawn.items() if client != slowest)
    assert others < drawn[slowest]
    assert table(tmp_path, "rounds")["sim_seconds"][2] == pytest.approx(others / 50)


def test_a_deadline_waits_for_all_that_were_drawn(ran: Any) -> None:
    """Also where these are more than the three that a round has on average."""
    run = ran(clock=CLOCK | {"deadline": 1e9}, rounds={"selection": "poisson"})
    clients = table(run.folder, "clients")
    assert np.bincount(clients["round"]).max() > 3
    assert {*clients["status"]} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"clock": {"dropout": 0.1}}, "clock: loses clients, but nothing takes time"),
        ({"clock": CLOCK | {"deadline": 9}, "weighting": [{"fedldf": 1}]}, "fedldf needs all of them"),
        (
            {"clock": CLOCK | {"over_select": 1}, "rounds": {"selection": {"fedbuff": 2}}},
            "fedbuff has no round that could do without some",
        ),
    ],
)
def test_losses_that_cannot_be(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        tiny(**changes)
