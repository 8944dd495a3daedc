"""A method counts when it stands everywhere."""

from case import cases

from raysim.methods import CLIENTS, STEPS, WEIGHTINGS


def test_every_method_has_a_case():
    assert cases().keys() == {*CLIENTS, *WEIGHTINGS, *STEPS}


def test_every_case_is_recomputed():
    assert [name for name, case in cases().items() if case.recompute is None] == []
