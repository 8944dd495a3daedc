"""When clients can be asked: the kinds of availability, waiting for clients, and clients that leave before they are done."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import simulate, table, tiny

from raysim.api.functions import resume
from raysim.config import ConfigError
from raysim.core.availability import Always, Availability, Bernoulli, Diurnal, Markov, Trace
from raysim.core.rng import uniform
from raysim.core.simulated import SimulatedClock
from raysim.federation import Federation
from raysim.federation.failures import RoundFailed

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "clock.json").read_text())["cases"]
DAY = 86400.0
CLOCK: dict[str, Any] = {"speed": 10, "up": 1e5, "down": 1e5}


class Hours(Availability):
    """Client i is available in the hours i to i + 2, and again a day later."""

    def state(self, clients: np.ndarray, at: np.ndarray, u: Any) -> tuple[np.ndarray, np.ndarray]:
        since = (at - 3600.0 * clients) % DAY
        available = since < 7200
        return available, at + np.where(available, 7200, DAY) - since


HOURS = SimulatedClock(speed=1, availability=Hours())


def states(kind: Availability, clients: int, at: float, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(clients)
    return kind.state(numbers, np.full(clients, at), lambda i: uniform(seed, numbers, i))


@pytest.mark.parametrize(
    ("kind", "share"), [(Bernoulli(0.3, 60), 0.3), (Markov(100, 300), 0.25), (Diurnal(0.4, 1000), 0.4), (Always(), 1.0)]
)
def test_so_many_are_available_at_any_time(kind: Availability, share: float) -> None:
    """Whatever was asked before: the state is a function of the client and the time."""
    for at in (0.0, 5555.5, 12345.0, 70.0):
        available, until = states(kind, 20_000, at)
        assert available.mean() == pytest.approx(share, abs=0.015)
        assert (until > at).all()
        again, then = states(kind, 20_000, at)
        assert (available == again).all() and (until == then).all()


@pytest.mark.parametrize("kind", [Bernoulli(0.3, 60), Markov(100, 300), Diurnal(0.4, 1000)])
def test_a_state_lasts_until_it_says(kind: Availability) -> None:
    numbers = np.arange(2000)
    at = np.full(2000, 777.0)

    def state(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return kind.state(numbers, at, lambda i: uniform(5, numbers, i))

    available, until = state(at)
    just_before, same_end = state(at + 0.999 * (until - at))
    assert (just_before == available).all()
    np.testing.assert_allclose(same_end, until, rtol=1e-9)
    if not isinstance(kind, Bernoulli):  # whose next draw may be the same
        assert (state(until + 1e-6)[0] == ~available).all()


def test_times_of_a_markov_chain_are_exponential() -> None:
    available, until = states(Markov(100, 300), 50_000, 4000.0)
    for on, mean in ((True, 100), (False, 300)):
        rest = until[available == on] - 4000  # memoryless: what is left has the same law
        assert rest.mean() == pytest.approx(mean, rel=0.03) and rest.std() == pytest.approx(mean, rel=0.03)


def written(folder: Path, *rows: tuple[float, ...], names: str = "client,start,stop,period") -> str:
    file = folder / "spells.csv"
    file.write_text("\n".join([names, *(",".join(map(str, row)) for row in rows)]))
    return str(file)


def test_a_measured_trace(tmp_path: Path) -> None:
    """FedScale's own answers, asked in any order, for two clients of which the second has no trace of its own."""
    [case] = [case for case in CASES if case["rule"] == "availability_trace"]
    inputs = case["inputs"]
    spells = zip(inputs["active"], inputs["inactive"], strict=True)
    clock = SimulatedClock(
        availability=Trace(written(tmp_path, *((7, *spell, inputs["finish_time"]) for spell in spells)))
    )
    at, wanted = np.array(inputs["seconds"], float), np.array(case["expect"]["available"])
    for client in (0, 1):
        for order in (np.arange(len(at)), np.argsort(-at)):
            available, until = clock.state(0, np.full(len(at), client), at[order])
            assert (available == wanted[order]).all() and (until > at[order]).all()


def test_a_table_that_changes_stops_a_resume(tmp_path: Path) -> None:
    """Of availability, or of devices; put back, the run goes on."""
    file = Path(written(tmp_path, (0, 0, 1e6), (1, 0, 1e6), names="client,start,stop"))
    devices = tmp_path / "devices.csv"
    devices.write_text("speed\n10\n20\n")
    clock = {
        "speed": {"table": {"file": str(devices), "column": "speed"}},
        "availability": {"table": {"file": str(file)}},
    }
    part = Federation(tiny(clock=clock), tmp_path / "run")
    part.step()
    part.close()
    for setting, of in (("availability", file), ("speed", devices)):
        was = of.read_text()
        of.write_text(was.replace("1", "2"))
        with pytest.raises(ConfigError, match=rf"clock.{setting}: {of} is not what the run in .* began with"):
            resume(tmp_path / "run")
        of.write_text(was)
    assert resume(tmp_path / "run").result["rounds"] == 3


def test_traces_that_do_not_repeat_end(tmp_path: Path) -> None:
    clock = SimulatedClock(availability=Trace(written(tmp_path, (0, 5, 10), (1, 0, 3), names="client,start,stop")))
    available, until = clock.state(0, np.array([0, 1, 2, 3]), np.array([4.0, 4.0, 12.0, 1.0]))
    assert available.tolist() == [False, False, False, True]
    np.testing.assert_allclose(until, [5, np.inf, np.inf, 3])


@pytest.mark.parametrize(
    ("rows", "names", "fault"),
    [
        ([(0, 5)], "client,start", "has no column stop"),
        ([(0, 5, 4)], "client,start,stop", "must begin at 0 or later, end before"),
        ([(0, 5, 9), (0, 8, 12)], "client,start,stop", "not overlap"),
        ([(0, 5, 9, 10), (0, 9, 10, 11)], "client,start,stop,period", "a client has one period"),
    ],
)
def test_tables_that_are_none(tmp_path: Path, rows: list[tuple[float, ...]], names: str, fault: str) -> None:
    clock = CLOCK | {"availability": {"table": {"file": written(tmp_path, *rows, names=names)}}}
    with pytest.raises(ConfigError, match=f"clock.availability: .*{fault}"):
        simulate(tiny(clock=clock), tmp_path / "run")


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    clock = CLOCK | {"availability": {"table": {"file": str(tmp_path / "none.csv")}}}
    with pytest.raises(ConfigError, match=r"clock.availability: .*none.csv cannot be read: No such file"):
        simulate(tiny(clock=clock), tmp_path / "run")


def test_the_server_waits_until_enough_are_there() -> None:
    """By hand: client i is there in the hours i to i + 2."""
    clients = np.array([4, 6, 7])
    now, there = HOURS.opens(0, clients, 0.0, 1)
    assert (now, there.tolist()) == (4 * 3600, [True, False, False])
    now, there = HOURS.opens(0, clients, 0.0, 2)
    assert (now, there.tolist()) == (7 * 3600, [False, True, True])
    assert HOURS.opens(0, clients, 7.5 * 3600, 2)[0] == 7.5 * 3600
    assert HOURS.opens(0, clients, 8.0 * 3600, 2)[0] == DAY + 7 * 3600
    assert HOURS.opens(0, clients, 0.0, 3)[0] == np.inf
    assert HOURS.opens(0, np.array([0, 1]), 3600.0, 3)[0] == np.inf  # both are there, and a third is none


@pytest.mark.parametrize(
    ("interrupt", "lost", "lasts"),
    [
        ("lose", {3: "interrupted"}, 6000.0),  # the server misses it when it should have been done
        ("pause", {}, DAY - 5400 + 4200),  # 1,800 s until 5:00, and the other 4,200 s from 3:00 on, the next day
        ("ignore", {}, 6000.0),
    ],
)
def test_a_client_that_leaves(interrupt: str, lost: dict[int, str], lasts: float) -> None:
    """At 4:30 client 3 has half an hour left, client 4 an hour and a half."""
    clock = SimulatedClock(speed=1, availability=Hours(), interrupt=interrupt)  # type: ignore[arg-type]
    now = 4.5 * 3600
    found, seconds = clock.closed(0, 0, (3, 4), np.array([6000.0, 1200.0]), 2, now)
    assert found == lost
    assert seconds == pytest.approx(lasts)


def test_who_never_comes_back_is_lost() -> None:
    class Once(Availability):
        def state(self, clients: np.ndarray, at: np.ndarray, u: Any) -> tuple[np.ndarray, np.ndarray]:
            return at < 100, np.where(at < 100, 100.0, np.inf)

    clock = SimulatedClock(speed=1, availability=Once(), interrupt="pause")
    assert clock.closed(0, 0, (0, 1), np.array([90.0, 20.0]), 2, 50.0) == ({0: "interrupted"}, 90.0)


def test_only_who_is_available_is_asked(tmp_path: Path) -> None:
    """On the clock of the tables, and the same after a resume; the round waits while there are none."""
    clock = CLOCK | {"availability": {"markov": {"available": 3, "away": 200}}}
    config = tiny(clock=clock, rounds={"total": 9, "participation": 1.0})
    run = simulate(config, tmp_path / "a")
    rounds, clients = (table(tmp_path / "a", name) for name in ("rounds", "clients"))
    np.testing.assert_allclose(rounds["sim_clock"], np.cumsum(rounds["sim_idle"] + rounds["sim_seconds"]))
    assert (rounds["sim_idle"] > 0).any() and {*clients["status"]} == {"ok", "interrupted"}
    worked = clients["sim_down"] + clients["sim_train"] + clients["sim_up"]
    columns = (clients[name] for name in ("round", "client", "status", "sim_start"))
    for t, client, status, at, did in zip(*columns, worked, strict=True):
        [there], [until] = config.clock.state(config.seed, np.array([client]), np.array([at + 1e-6]))
        assert there  # waiting ends where a spell begins
        if status == "interrupted":
            assert until < rounds["sim_clock"][t]
            assert did == pytest.approx(until - at)  # it has worked until it left
    assert (np.bincount(clients["round"]) > 1).any()
    part = Federation(config, tmp_path / "b")
    for _ in range(4):
        part.step()
    part.close()
    resumed = resume(tmp_path / "b")
    assert resumed.result["sha256"] == run.sha256()
    assert table(tmp_path / "b", "rounds")["sim_clock"].tolist() == rounds["sim_clock"].tolist()


@pytest.mark.parametrize("selection", ["uniform", "poisson", "round_robin", "by_size", "power_of_choice", "oort"])
def test_every_selection_keeps_to_them(selection: str, tmp_path: Path) -> None:
    """And some were away, so that a selection that asks anyone is found."""
    clock = CLOCK | {"availability": {"bernoulli": {"p": 0.3, "every": 5}}}
    config = tiny(clock=clock, rounds={"total": 4, "selection": selection})
    simulate(config, tmp_path)
    clients, everyone = table(tmp_path, "clients"), np.arange(config.clients)
    begins = clients["sim_start"] + 1e-6  # waiting ends where a draw begins
    for client, began in zip(clients["client"], begins, strict=True):
        there, _ = config.clock.state(config.seed, everyone, np.full(len(everyone), began))
        assert there[client] and not there.all()
    assert np.bincount(clients["round"], minlength=4).all()


def test_all_available_is_as_without(tmp_path: Path) -> None:
    """The same bits where the day has no night."""
    clocks = ({}, CLOCK | {"availability": {"diurnal": {"share": 1.0}}})
    first, second = (simulate(tiny(clock=clock), tmp_path / str(i)).sha256() for i, clock in enumerate(clocks))
    assert first == second


def test_never_enough(tmp_path: Path) -> None:
    config = tiny(clock=CLOCK | {"availability": {"diurnal": {"share": 1e-9}}}, rounds={"min_clients": 3})
    with pytest.raises(RoundFailed, match=r"no time at which 3 of the \d+ clients with samples are available"):
        simulate(config, tmp_path)
