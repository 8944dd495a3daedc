"""Devices and traces of FedScale and FLASH, as files in their form, and the tables that are made of them."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from raysim.cli.app import app
from raysim.core.availability import Trace
from raysim.core.simulated import Column, SimulatedClock
from raysim.data import DataError
from raysim.data.devices import read_devices

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "clock.json").read_text())["cases"]


def converted(folder: Path, held: Any) -> str:
    (file := folder / "theirs").write_bytes(held.encode() if isinstance(held, str) else pickle.dumps(held))
    done = CliRunner().invoke(app, ["data", "devices", str(file), str(folder / "ours.parquet")])
    assert done.exit_code == 0, done.output
    return str(folder / "ours.parquet")


def test_devices(tmp_path: Path) -> None:
    """Its own answer for the second of two devices; client 3 is the device of client 1."""
    [case] = [case for case in CASES if case["rule"] == "fedscale_device"]
    inputs, expect = case["inputs"], case["expect"]
    device = {name: inputs[name] for name in ("computation", "communication")}
    file = converted(tmp_path, {12: device, 2: {"computation": 1.0, "communication": 1.0}})
    clock = SimulatedClock(**{name: Column(file, name) for name in ("speed", "up", "down")})
    size = np.full(2, float(inputs["model_bytes"]))
    made = clock.seconds(0, [1, 3], np.full(2, inputs["samples"]), size, size)
    np.testing.assert_allclose(made.train, expect["compute_seconds"], rtol=1e-12)
    np.testing.assert_allclose(made.up + made.down, expect["transfer_seconds"], rtol=1e-12)


def test_traces(tmp_path: Path) -> None:
    """Its own answers for the second of two traces. A spell that ends before it begins is none."""
    [case] = [case for case in CASES if case["rule"] == "availability_trace"]
    inputs = case["inputs"]
    spells = {"active": [*inputs["active"], 1190], "inactive": [*inputs["inactive"], 1100]}
    trace = {"duration": 9, **spells, "finish_time": inputs["finish_time"], "model": "phone"}
    whole = {"duration": 9, "active": [0], "inactive": [10**6], "finish_time": 500, "model": "phone"}
    clock = SimulatedClock(availability=Trace(converted(tmp_path, {"10": trace, "9": whole})))
    at = np.array(inputs["seconds"], float)
    for client, wanted in ((1, case["expect"]["available"]), (0, [True] * len(at))):
        assert clock.state(0, np.full(len(at), client), at)[0].tolist() == wanted


WATCHED = """
2020-01-02 00:00:10\tbattery_charged_on
2020-01-02 00:00:20\twifi
2020-01-02 00:00:20\t80%
2020-01-02 00:00:30\tscreen_lock
2020-01-02 00:00:40\tSCREEN_UNLOCK
2020-01-02 00:01:00\tscreen_lock
2020-01-02 00:01:10\t4G
2020-01-02 00:01:30\twifi
2020-01-02 00:01:50\tscreen_off
"""


def test_state_changes(tmp_path: Path) -> None:
    """FLASH's phone is ready from second 30 to 40, 60 to 70 and 90 to 110, and again every 100 seconds."""
    other = "2020-01-03 00:00:00\twifi\n2020-01-03 00:10:00\tunknown\n"  # never charges: it has no spell
    phones = {"b7": {"guid": "x", "model": "phone", "messages": WATCHED}, "a": {"messages": other}}
    clock = SimulatedClock(availability=Trace(converted(tmp_path, json.dumps(phones))))
    at = np.array([5, 10, 11, 29, 30, 40, 41, 65, 95, 100, 111, 130, 205], float)
    ready, lasts = clock.state(0, np.zeros(len(at), int), at)
    wanted = [True, True, False, False, True, True, False, True, True, True, False, True, True]
    assert ready.tolist() == wanted
    np.testing.assert_allclose(lasts[[2, 4]], [30, 40])


@pytest.mark.parametrize(
    ("held", "fault"),
    [
        ("{", "is no JSON"),
        (json.dumps({"a": {"messages": "yesterday\twifi"}}), "client 0 cannot be read"),
        (json.dumps({"a": {"messages": ""}}), "holds no devices and no traces"),
        ({}, "holds no devices and no traces"),
        (
            {1: {"computation": 1.0, "communication": 1.0}, 2: {"active": [0], "inactive": [1], "finish_time": 2}},
            "some of both",
        ),
        ({1: {"speed": 1}}, "client 1 has neither of computation, active"),
        ({1: {"computation": 0, "communication": 1}}, "client 1 cannot be read"),
        ({1: {"active": [0, 5], "inactive": [1], "finish_time": 9}}, "client 1 cannot be read"),
        ({1: 3}, "client 1 cannot be read"),
        ({1: {"computation": Path("x"), "communication": 1}}, "refused to unpickle"),
    ],
)
def test_files_of_another_form(tmp_path: Path, held: Any, fault: str) -> None:
    (file := tmp_path / "theirs").write_bytes(held.encode() if isinstance(held, str) else pickle.dumps(held))
    with pytest.raises(DataError, match=fault):
        read_devices(file)
