"""The benchmarks that run every method leave none out, and what they would run is a valid configuration."""

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from raysim.config import from_dict
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
    played = {}

    def score(raw, folder):
        played[folder.name] = raw
        return {"score": scores[folder.name], "curve": [], "seconds": 0.0}

    monkeypatch.setattr(learns, "score", score)
    ill, cured = learns.contest(["fedavgm"], 10, 8, tmp_path)
    assert (ill["method"], ill["note"]) == ("fedavgm", learns.CASES["fedavgm"].note)
    assert (cured["method"], cured["ratio"], cured["note"]) == ('fedavgm {"beta": 0.5}', 0.9, "")
    assert [played[name]["server"] for name in list(scores)[1:]] == [[{"fedavgm": {}}], [{"fedavgm": {"beta": 0.5}}]]
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
