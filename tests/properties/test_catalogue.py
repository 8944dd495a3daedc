"""A method counts when it stands everywhere. The benchmarks that run every method: tests/test_benchmarks.py."""

import test_case
import test_edges
import test_switches
from case import cases
from typer.testing import CliRunner

from raysim.cli.app import app
from raysim.methods import CLIENTS, STEPS, WEIGHTINGS

CATALOGUE = {**CLIENTS, **WEIGHTINGS, **STEPS}


def test_every_method_has_a_case():
    assert cases().keys() == CATALOGUE.keys()
    assert len(CATALOGUE) == len(CLIENTS) + len(WEIGHTINGS) + len(STEPS)


def test_every_case_is_in_every_property():
    for module in (test_case, test_edges):
        assert module.CASES.keys() == CATALOGUE.keys(), module.__name__
    assert test_switches.SWITCHES.keys() == CATALOGUE.keys()


def test_every_case_is_recomputed():
    assert [name for name, case in cases().items() if case.recompute is None] == []


def test_every_method_is_one_file_with_a_source():
    for name, cls in CATALOGUE.items():
        assert cls.__module__.rpartition(".")[0] == "raysim.methods", name
        assert cls.__doc__ and len(cls.__doc__.splitlines()[0]) > 20, name


def test_every_method_is_listed():
    result = CliRunner().invoke(app, ["list", "methods"])
    assert result.exit_code == 0
    assert {line.split()[1] for line in result.output.splitlines()} == CATALOGUE.keys()
