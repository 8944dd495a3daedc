"""A run that was interrupted ends with the bits of one that was not, for every method that remembers something."""

import pytest
from case import Case, cases
from conftest import play, tiny

from raysim.core.client import overrides
from raysim.federation import Federation


def remembers(case: Case) -> bool:
    """Whether its clients keep something between rounds, or its server may."""
    config = tiny(**case.changes)
    keeps = any(
        m.keeps_params or m.peer_models or m.personal_layers or overrides(m, "new_state") or m.server_steps()
        for m in config.client
    )
    return bool(keeps or config.server)


STATEFUL = {name: case for name, case in cases().items() if remembers(case)}


@pytest.mark.parametrize("case", STATEFUL.values(), ids=STATEFUL.keys())
def test_resumed_after_two_rounds(case: Case, tmp_path):
    """From its checkpoint: the process that comes back knows nothing else."""
    changes = dict(case.changes)
    changes["rounds"] = {**changes.get("rounds", {}), "checkpoint_every": 1}
    config = tiny(**changes)
    whole = play(config, tmp_path / "whole").sha256()
    begun = Federation(config, tmp_path / "parts")
    begun.step()
    begun.step()
    begun.close()
    assert begun.sha256() != whole
    assert play(config, tmp_path / "parts", resume=True).sha256() == whole
