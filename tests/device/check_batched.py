"""Clients that train together on the emulated device: the same as one by one, to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
from batched import METHODS, assert_same, trained
from conftest import simulate, tiny
from device import emulated

emulated.install()


@pytest.mark.parametrize("name", METHODS)
def test_a_method(name: str) -> None:
    assert_same(*(trained(together, METHODS[name], device="cuda") for together in (1, 4)))


def test_the_same_bits_again(tmp_path: Path) -> None:
    config = tiny(engine={"local": {"device": "cuda", "batch_clients": 3}})
    found = {simulate(config, tmp_path / str(i)).sha256() for i in range(2)}
    assert len(found) == 1
