"""CUDA graphs on the emulated device: the same bits from fewer launches, and a word where there can be none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from case import cases
from conftest import simulate, table, tiny
from core.test_tape import SETTINGS
from device import emulated
from torch import Tensor, nn

from raysim.core.client import ClientMethod, LocalRun
from raysim.federation.failures import RoundFailed
from raysim.methods import CLIENTS
from raysim.models import MODELS, Inputs

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from launches import STEPS, costs

emulated.install()
ALL = (
    {"fedavg": {}} | {name: case.changes for name, case in cases().items()} | {str(given): given for given in SETTINGS}
)
NAMED = {
    name: changes for name, changes in ALL.items() if not {"server", "weighting"} & changes.keys()
}  # no step is theirs


def on_device(changes: dict[str, Any], **engine: Any) -> Any:
    """Two rounds, with a shorter last batch."""
    return tiny(
        **changes
        | {"rounds": {**changes.get("rounds", {}), "total": 2}, "engine": {"local": {"device": "cuda", **engine}}}
    )


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each graph that has run."""
    seen: list[None] = []
    replay = emulated.Graph.replay
    monkeypatch.setattr(emulated.Graph, "replay", lambda graph: (seen.append(None), replay(graph))[1])
    return seen


@pytest.mark.parametrize("name", NAMED)
def test_the_bits_are_those_without(name: str, tmp_path: Path, replays: list[None]) -> None:
    without = simulate(on_device(NAMED[name]), tmp_path / "without").sha256()
    assert not replays
    captured = simulate(on_device(NAMED[name], cuda_graphs=True), tmp_path / "with")
    assert captured.sha256() == without
    assert replays


def test_a_step_asks_for_few_launches() -> None:
    """x and y go in, the pass runs, loss and latents come out, the model moves; a pass over the data gathers x and y once."""
    assert costs("fedavg", "tiny_bn_cnn", cuda_graphs=True)["step"] == [6 + 2 / STEPS, 1 / STEPS, 0, 0]


class Waits(nn.Module):
    """A model that a user wrote, whose forward asks the host."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((2 * x.cpu()).to(x.device).flatten(1))


class Looks(ClientMethod):
    """A method that has the model."""

    def correct_grad(self, run: LocalRun) -> None:
        assert run.model.training


def test_what_cannot_be_captured_ends_the_run_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "own", Waits)
    with pytest.raises(RoundFailed) as raised:
        simulate(on_device({"model": {"name": "own"}}, cuda_graphs=True, tape="always"), tmp_path)
    why = "CUDA error: operation not permitted when stream is capturing"
    assert f"engine.cuda_graphs: a step cannot be captured: {why}. Leave it out" in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize("what", ["model", "client"])
def test_what_is_not_recorded_is_not_captured_and_says_so_once(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replays: list[None]
) -> None:
    """A user's model, and a method that has the model."""
    monkeypatch.setitem(MODELS, "own", Waits)
    monkeypatch.setitem(CLIENTS, "looks", Looks)
    changes = {"model": {"model": {"name": "own"}}, "client": {"client": ["looks"]}}[what]
    simulate(on_device(changes, cuda_graphs=True), tmp_path)
    assert not replays
    remarks = [line for line in table(tmp_path, "events")["message"] if "cuda_graphs" in line]
    assert remarks == ["round 1: steps are not recorded (engine.tape), so engine.cuda_graphs does nothing"]
