"""What methods need of a run, and what is refused."""

import pytest

from raysim.core.client import ClientMethod
from raysim.core.method import FORMER, Needs
from raysim.core.server import ServerStep, Weighting


@pytest.mark.parametrize("base", [ClientMethod, Weighting, ServerStep])
def test_what_stood_in_a_class_of_its_own_is_refused(base: type) -> None:
    for old, new in FORMER.items():
        with pytest.raises(TypeError) as refused:
            type("Mine", (base,), {old: True})
        assert str(refused.value) == f"Mine: write needs = Needs({new}) for {old}; Needs is raysim.Needs"
        assert eval(f"Needs({new})", {"Needs": Needs}) != Needs()
