"""Every method and every switch on the emulated device: it runs there, and gives what the CPU gives.

The device's kernels are the CPU's, so most runs are equal to the bit. Where raysim itself computes in another order on a
GPU, the difference is that of rounding, grown over the rounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from case import cases
from conftest import tiny
from device import emulated
from properties.test_switches import CATALOGUE, SWITCHES, sections_of

from raysim.federation import Federation, prepare

emulated.install()
ROUNDING = 1e-5  # of a tensor's largest number
# FedBE's teachers depend on distances, which a GPU sums in float64 and a CPU in float32. Adam distils them: it divides a
# gradient by its own size, and so makes whole steps even of a gradient that is rounding alone. Such is that of a bias before
# BatchNorm, which nothing but the running mean sees. The rest of the model agrees.
UNDETERMINED = {"fedbe": ("conv.bias", "running_mean")}


def compare(name: str, changes: dict[str, Any], folder: Path) -> None:
    """Run the method of the method on the device and on the CPU."""
    models = {}
    partitioned = prepare(tiny(**changes))
    for device in ("cuda", "cpu"):
        before, config = emulated.counts(), tiny(**{**changes, "engine": {"local": {"device": device}}})
        federation = Federation(config, folder / device, partitioned=partitioned)
        assert not any(done["clients_failed"] for done in iter(federation.step, None))
        federation.close()
        assert (emulated.counts().since(before).launches > 0) == (device == "cuda")
        models[device] = federation.server.layers.unflatten(federation.server.value)
    for tensor, there in models["cpu"].items():
        if not tensor.endswith(UNDETERMINED.get(name, ())):
            torch.testing.assert_close(
                models["cuda"][tensor],
                there,
                rtol=0,
                atol=ROUNDING * float(there.abs().max()),
                msg=f"{tensor}: {{}}".format,
            )


@pytest.mark.parametrize("name", cases())
def test_a_method(name: str, tmp_path: Path) -> None:
    changes = {**cases()[name].changes}
    changes["data"] = {"client_test_frac": 0.25, **changes.get("data", {})}
    changes["local"] = {**changes.get("local", {}), "batch_size": 24}  # few steps: rounding grows with them
    compare(name, {**changes, "evaluate": {"personal": "after_train"}}, tmp_path)


LATE = {"clock": {"latency": 1, "speed": 20}}
OTHERS: dict[str, dict[str, Any]] = {
    "alie": {"attack": [{"alie": {"z": 1.0, "fraction": 0.3}}], "rounds": {"participation": 0.7}},
    "compressed": {"attack": [{"sign_flip": {"fraction": 0.3}}], "upload": ["error_feedback", {"top_k": 0.1}]},
    "encoded": {"upload": [{"qsgd": {}}], "download": [{"uniform": {"bits": 8}}]},
    "fedbuff": {**LATE, "rounds": {"total": 4, "participation": 0.7, "selection": {"fedbuff": 2}}},
    "fedasync": {**LATE, "rounds": {"total": 4, "participation": 0.7, "selection": "fedasync"}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_happens_to_messages(name: str, tmp_path: Path) -> None:
    local = {"batch_size": 24, "momentum": 0.0}
    compare(name, {**OTHERS[name], "local": local}, tmp_path)


def chooses_code(name: str, switch: str) -> bool:
    """Whether other code runs with the switch. With another number in the place of a number it does not."""
    default = getattr(CATALOGUE[name][1], switch, None)
    return default is None or type(SWITCHES[name].others[switch]) not in (int, float)


@pytest.mark.parametrize(
    ("name", "switch"), [(n, f) for n, s in SWITCHES.items() for f in s.others if chooses_code(n, f)]
)
def test_a_switch(name: str, switch: str, tmp_path: Path) -> None:
    value = SWITCHES[name].others[switch]
    own = {**SWITCHES[name].base, **(value if isinstance(value, dict) else {switch: value})}
    sections = sections_of(name)
    if name in UNDETERMINED:  # in a second round everything would depend on it
        sections["rounds"] = {**sections["rounds"], "total": 1, "evaluate_every": 1}
    compare(name, {**sections, CATALOGUE[name][0]: [{name: own}]}, tmp_path)
