"""Options that no method can use are refused: by the configuration, or before a client trains where the network tells."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from conftest import simulate, tiny

from raysim.config import ConfigError
from raysim.core.client import ClientMethod
from raysim.core.server import ServerStep, Weighting
from raysim.federation import RoundFailed, prepare
from raysim.registry import REGISTRY

PROXY = {"data": {"proxy": {"samples": 8}}}
FRACTION, POSITIVE, NOT_NEGATIVE = "a number >= 0 and < 1", "a number > 0", "a number >= 0"


@pytest.mark.parametrize(
    ("stack", "method", "option", "value", "allowed"),
    [
        ("weighting", "fedlaw", "lr", -1, POSITIVE),
        ("weighting", "fedlaw", "betas", [0.5, 1], f"a list [{FRACTION}, {FRACTION}]"),
        ("weighting", "fedlaw", "batch_size", 0, "a whole number > 0"),
        ("weighting", "adaptive_gws", "eta", 0, POSITIVE),
        ("weighting", "attentive_law", "stop_round", -2, "a whole number >= 0 or null"),
        ("weighting", "feddisco", "a", -1, NOT_NEGATIVE),
        ("weighting", "feddisco", "b", -1, NOT_NEGATIVE),
        ("weighting", "ccn", "temperature", 0, POSITIVE),
        ("weighting", "ldawa", "warmup", -1, "a whole number >= 0"),
        ("server", "server_ft", "epochs", -1, "a whole number >= 0"),
        ("server", "feddf", "lr", 0, POSITIVE),
        ("server", "feddf", "temperature", 0, POSITIVE),
        ("server", "fedbe", "betas", [5, 0.5], f"a list [{FRACTION}, {FRACTION}]"),
        ("server", "fedbe", "samples", -1, "a whole number >= 0"),
        ("server", "fedavgm", "beta", 1, FRACTION),
        ("server", "fedavgm", "eta", -1, POSITIVE),
        ("server", "fedadam", "initial", -1, f"{NOT_NEGATIVE} or null"),
        ("server", "fedadam", "beta2", 1, FRACTION),
        ("server", "fedyogi", "epsilon", 0, POSITIVE),
        ("server", "fedadagrad", "eta", 0, POSITIVE),
        ("server", "step_size", "eta", 0, POSITIVE),
        ("server", "awd", "smoothing", 1, FRACTION),
        ("server", "awd", "strength", -1, NOT_NEGATIVE),
        ("server", "adadecay", "strength", -1, NOT_NEGATIVE),
        ("server", "fixed_shrink", "gamma", 0, POSITIVE),
    ],
)
def test_out_of_range(stack, method, option, value, allowed):
    with pytest.raises(ConfigError) as refusal:
        tiny(**{stack: [{method: {option: value}}]}, **PROXY)
    [fault] = refusal.value.faults
    assert f"{stack}.0.{method}.{option}" in fault
    assert f"must be {allowed}, but is" in fault


def test_limits_that_are_in_range():
    """Of the papers, or ends of a range."""
    server = [
        {"fedadam": {"eta": 1.5, "beta1": 0, "initial": 0}},
        {"awd": {"strength": 0}},
        {"fixed_shrink": {"gamma": 1}},
    ]
    tiny(weighting=[{"feddisco": {"a": 0, "b": 0}}, {"ldawa": {"warmup": 0, "base": "size"}}], server=server, **PROXY)
    tiny(
        weighting=[{"attentive_law": {"stop_round": 0, "betas": [0, 0.999]}}],
        server=[{"server_ft": {"epochs": 0}}],
        **PROXY,
    )


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"weighting": [{"feddisco": {"target": [0.5, 0.5]}}]},
            "feddisco: target has 2 shares, but the data have 4 cl",
        ),
        ({"weighting": [{"ccn": {"activation": "pre"}}], "model": {"name": "resnet8"}}, "ccn: activation is pre, but"),
        ({"model": {"layer_by": "block", "blocks": ["conv1"]}}, "model.blocks: no pattern matches the tensor 'conv2"),
    ],
    ids=str,
)
def test_what_only_network_or_data_tell(changes, fault):
    with pytest.raises(ConfigError, match=fault):
        prepare(tiny(**changes))


@dataclass(frozen=True)
class Blast(ServerStep):
    def apply(self, target, mixture, cohort, server):
        return target * math.inf


@dataclass(frozen=True)
class Blaster(ClientMethod):
    def server_steps(self):
        return (Blast(),)


@dataclass(frozen=True)
class Vast(Weighting):
    """Finite factors of a model that is not."""

    stage: ClassVar[str] = "rescale"

    def plan(self, cohort, server, prior):
        return prior.scaled(torch.tensor(1e60, dtype=torch.float64))


@pytest.mark.parametrize("by", ["server: blast", "client: blaster", "weighting: vast"])
def test_a_model_of_the_servers_that_is_not_finite_ends_the_run(by, tmp_path, monkeypatch):
    for cls in (Blast, Blaster, Vast):
        monkeypatch.setitem(REGISTRY.table(cls.role), cls.__name__.lower(), cls)
    stack, name = by.split(": ")
    with pytest.raises(RoundFailed, match=rf"round 1: {by} made a model that is not finite \(NaN or Inf\)"):
        simulate(tiny(**{stack: [name]}), tmp_path)
