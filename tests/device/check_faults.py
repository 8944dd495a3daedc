"""What a device that breaks, or is full, does to a run in this process."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from conftest import simulate, tiny
from device import emulated
from device.breaks import Breaks

from raysim.engine.base import MachineFailure
from raysim.federation import Federation, RoundFailed
from raysim.methods import CLIENTS

DEVICE = {"local": {"device": "cuda"}}


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setitem(CLIENTS, "breaks", Breaks)
    yield
    emulated.break_after(-1)
    emulated.set_memory(emulated.MEMORY)


def test_a_broken_device_ends_the_run_which_can_be_resumed(tmp_path: Path) -> None:
    whole = simulate(tiny(engine=DEVICE), tmp_path / "whole").sha256()
    config = tiny(engine=DEVICE, client=[{"breaks": {"folder": str(tmp_path), "t": 1}}], rounds={"checkpoint_every": 1})
    with pytest.raises(MachineFailure, match="device") as caught:
        simulate(config, tmp_path / "run")
    assert "illegal memory access" in str(caught.value)
    assert "in a new process" in str(caught.value)
    emulated.break_after(-1)  # as in a new process
    federation = Federation(config, tmp_path / "run", resume=True)
    assert federation.t == 1
    while federation.step() is not None:
        pass
    federation.close()
    assert federation.sha256() == whole


@pytest.mark.parametrize("room", [1000, 50_000])
def test_a_full_device_is_not_a_clients_fault(room: int, tmp_path: Path) -> None:
    """Whether it is full before a client trains, or while it does: which it is depends on what was freed meanwhile."""
    federation = Federation(tiny(engine=DEVICE, rounds={"on_client_failure": "drop"}), tmp_path)
    federation.step()
    gc.collect()  # of what other tests have left, or it is freed meanwhile and makes room
    emulated.set_memory(emulated.used() + room)
    with pytest.raises((MachineFailure, RoundFailed), match="out of memory"):
        federation.step()
    emulated.set_memory(emulated.MEMORY)
    federation.close()
