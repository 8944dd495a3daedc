"""The benchmarks that run every method leave none out, and what they would run is a valid configuration."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from raysim.config import from_dict
from raysim.federation import Federation
from raysim.methods import CLIENTS, STEPS, WEIGHTINGS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ROLES = {"client": CLIENTS, "weighting": WEIGHTINGS, "server": STEPS}


@pytest.fixture
def benchmark(monkeypatch):
    """Imports one by its file, because `methods` is also a folder of tests."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
        spec.loader.exec_module(module)
        return module

    before = {role: dict(entries) for role, entries in ROLES.items()}
    yield load
    for role, entries in ROLES.items():  # without what a benchmark added of its own
        entries.clear()
        entries.update(before[role])


@pytest.mark.parametrize("name", ["methods", "learns"])
def test_every_method_is_covered(name, benchmark):
    cases = benchmark(name).CASES
    assert cases.keys() == {*CLIENTS, *WEIGHTINGS, *STEPS}
    assert [method for method, case in cases.items() if method not in ROLES[case.role]] == []
    assert [method for method, case in cases.items() if not case.work] == []


def test_what_is_timed_is_configured(benchmark):
    methods = benchmark("methods")
    args = Namespace(clients=8, samples=100, model="fedavg_cnn")
    for name, case in methods.CASES.items():
        config = methods.configuration(args, case.sections(name))
        assert [type(method) for method in getattr(config, case.role)] == [ROLES[case.role][name]]
        assert config.local == methods.configuration(args, {}).local or "local" in case.changes


def test_what_should_learn_is_configured(benchmark):
    """A method and the FedAvg beside it have the same clients with the same data, and are judged by the same models."""
    learns = benchmark("learns")
    for name, case in learns.CASES.items():
        config, plain = (from_dict(learns.sections(case, method, 50, 8)) for method in (name, None))
        assert [type(method) for method in getattr(config, case.role)] == [ROLES[case.role][name]]
        assert (config.data, config.rounds, config.evaluate) == (plain.data, plain.rounds, plain.evaluate)
        assert plain.client == plain.weighting == plain.server == ()
        assert config.rounds.cohort_size(config.data.partition.clients) == (20 if case.everyone else 10)


def test_a_method_that_does_not_learn_is_told(benchmark, tmp_path, monkeypatch):
    learns = benchmark("learns")
    reached = {"feddisco": 0.79, "fednova": 0.81, "FedAvg-0": 1.0}
    monkeypatch.setattr(
        learns, "score", lambda raw, folder: {"score": reached[folder.name], "curve": [], "seconds": 0.0}
    )
    low, high = learns.contest(["feddisco", "fednova"], 10, 8, tmp_path)
    assert (low["ratio"], low["note"]) == (0.79, "NOT EXPLAINED")
    assert (high["ratio"], high["note"]) == (0.81, "")


def test_a_method_that_can_be_cured_has_a_row_more(benchmark, tmp_path, monkeypatch):
    """With the reason in the first, and its fields in the second."""
    learns = benchmark("learns")
    scores = {"FedAvg-0": 1.0, "fedavgm": 0.1, 'fedavgm {"beta": 0.5}': 0.9}
    ran = {}

    def score(raw, folder):
        ran[folder.name] = raw
        return {"score": scores[folder.name], "curve": [], "seconds": 0.0}

    monkeypatch.setattr(learns, "score", score)
    ill, cured = learns.contest(["fedavgm"], 10, 8, tmp_path)
    assert (ill["method"], ill["note"]) == ("fedavgm", learns.CASES["fedavgm"].note)
    assert (cured["method"], cured["ratio"], cured["note"]) == ('fedavgm {"beta": 0.5}', 0.9, "")
    assert [ran[name]["server"] for name in list(scores)[1:]] == [[{"fedavgm": {}}], [{"fedavgm": {"beta": 0.5}}]]
    scores["fedavgm"] = 0.8
    assert len(list(learns.contest(["fedavgm"], 10, 8, tmp_path))) == 1  # it is not ill


def test_cures_are_configured(benchmark):
    learns = benchmark("learns")
    for name, case in learns.CASES.items():
        if case.cured:
            assert case.note
            ill, cured = (from_dict(learns.sections(setting, name, 50, 8)) for setting in (case, case.cured))
            assert ill != cured
            assert (ill.data, ill.rounds) == (cured.data, cured.rounds)


def test_table3_has_the_papers_models_and_methods(benchmark):
    table3 = benchmark("table3")
    assert set(table3.PAPER) == {"simple_cnn", "resnet20", "vit", "wrn56_4", "densenet121"}
    assert {"fedavg", "fedlws", "ccn", "feddisco", "ldawa", "fednova", "fedldf"} == set(table3.METHODS)
    for name, sections in table3.METHODS.items():
        config = table3.configuration("simple_cnn", "local", sections)
        assert [*config.weighting, *config.server] or name == "fedavg"


@pytest.fixture
def given(benchmark):
    peers = benchmark("peers")
    work = peers.Workload("a small W2", 3, 2, 8, (3, 32, 32), 4, "simple_cnn", {})
    return peers.Given.of(work)


def test_a_sweeps_runs_are_judged_by_one_score(benchmark):
    of_results = benchmark("claims").of_results
    ditto = {"final": 0.3, "best": 0.4, "last10": None, "personal": {"final": 0.8, "best": 0.9, "last10": 0.7}}
    fedavg = {"final": 0.4, "best": 0.5, "last10": 0.45}
    _, scores = of_results({"fedavg-seed8": fedavg, "ditto-seed8": ditto})
    assert scores["final accuracy, %"] == {"fedavg": {8: pytest.approx(40)}, "ditto": {8: pytest.approx(30)}}
    assert "ditto" not in scores["accuracy, mean of the last 10 evaluations, %"]
    table, scores = of_results({"ditto-seed8": ditto, "ditto-seed9": ditto})
    assert scores["accuracy of the best round, %"] == {"ditto": {8: pytest.approx(90), 9: pytest.approx(90)}}
    assert "| ditto | 70.00 ± 0.00 | 80.00 ± 0.00 | 90.00 ± 0.00 |" in table


def test_rows_of_a_claim_are_held_against_those_that_are_named_or_the_first(benchmark):
    compared = benchmark("claims").compared
    by_row = {row: {8: 1.0} for row in "abc"} | {"late": {9: 1.0}}
    assert compared(by_row, {"c": ["a", "b"]}) == [("b", "a"), ("c", "a"), ("c", "b")]
    assert compared(by_row, {row: ["a"] for row in by_row}) == [("b", "a"), ("c", "a")]  # all are named
    assert compared(by_row, {"c": ["without this score"]}) == [("b", "a")]


def test_peers_get_raysims_clients_and_first_model(given, benchmark, tmp_path):
    federation = Federation(benchmark("rounds").configuration(given.work, "local"), tmp_path)
    federation.close()
    data, model = federation.data, federation.model()
    assert len(given.x) == len(given.y) == 3 * 8
    for client in range(3):
        rows = federation.partition.train[client]
        ours = given.x[8 * client : 8 * (client + 1)]
        assert torch.equal(ours, data.transform(torch.from_numpy(data.x[rows])))
        assert given.y[8 * client : 8 * (client + 1)].tolist() == data.y[rows].tolist()
        assert torch.equal(given.model(ours), model(ours))


def test_a_simulator_is_given_its_work_and_plays_in_turns(given, benchmark, tmp_path, monkeypatch):
    """The real script beside it is this one's stand-in: it subtracts the number of the round from every parameter."""
    peers = benchmark("peers")
    (tmp_path / "with_flower.py").write_text(
        f"""import sys
sys.path.insert(0, {str(peers.SCRIPTS)!r})
from shared import given
from turns import Turns
turns, work = Turns(), given()
parameters = [p.detach().numpy() for p in work.model.parameters()]
x, y = work.shuffled(1, 0)
assert sorted(x.flatten(1).sum(1).tolist()) == sorted(work.x[8:16].flatten(1).sum(1).tolist())
for ran in range(turns.rounds):
    turns.after(ran, lambda: parameters)
    parameters = [p - (ran + 1) for p in parameters]
turns.after(turns.rounds, lambda: parameters)
"""
    )
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    given.lay_out("flower", tmp_path / "given", processes=2)
    simulator = peers.Simulator("flower", sys.executable, tmp_path / "given")
    try:
        simulator.start(rounds=3, processes=2)
        simulator.simulate()
        simulator.measure()
        assert (len(simulator.parameters), simulator.processes) == (0, 1)
        simulator.simulate()
    finally:
        simulator.close()
    assert len(simulator.seconds) == 3 and simulator.pss_bytes > 2**20
    for first, last in zip(given.model.parameters(), simulator.parameters, strict=True):
        torch.testing.assert_close(torch.from_numpy(last), first.detach() - 6)


def test_a_simulator_that_ends_early_is_named_with_its_last_words(benchmark, tmp_path, monkeypatch):
    peers = benchmark("peers")
    (tmp_path / "with_pfl.py").write_text("raise SystemExit('no such strategy')")
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    simulator = peers.Simulator("pfl", sys.executable, tmp_path)
    with pytest.raises(peers.Refused, match=r"(?s)pfl ended before its turn.*no such strategy"):
        simulator.start(rounds=3, processes=2)
    simulator.close()


def test_simulators_that_do_other_work_are_not_compared(benchmark):
    peers = benchmark("peers")
    peers.check(2.3, {"raysim": 1.3, "flower": 1.25, "pfl": 1.35})
    for loss in (1.45, 1.15, float("nan")):
        with pytest.raises(peers.Refused, match="pfl does not do raysim's work"):
            peers.check(2.3, {"raysim": 1.3, "flower": 1.25, "pfl": loss})
    with pytest.raises(peers.Refused, match="did not fall"):
        peers.check(2.3, {"raysim": 2.3, "flower": 2.3})
