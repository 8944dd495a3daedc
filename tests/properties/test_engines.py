"""The same bits on any engine, with any packing, for every method."""

import pytest
from case import cases
from conftest import play, tiny

from raysim.engine.ray_engine import ray_engine

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_ray_is_in_process(name, tmp_path, cluster):
    changes = CASES[name].changes
    local = play(tiny(**changes), tmp_path / "local")
    remote = play(tiny(**changes, engine={"ray": {"clients_per_actor": 2}}), tmp_path / "ray", make_engine=ray_engine)
    assert remote.sha256() == local.sha256()
