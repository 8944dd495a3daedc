"""Schedules against PyTorch's, and runs whose rates follow them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import simulate, tiny
from torch.optim import lr_scheduler

import raysim
from raysim.config import ConfigError
from raysim.core.hooks import HookError
from raysim.core.rates import Cosine, Exponential, Schedule, Steps, WarmUp, scheduled
from raysim.federation import Federation, MakeEngine
from raysim.federation.builder import learning_rate
from raysim.registry import REGISTRY

RATE, ROUNDS = 0.3, 8


def of_pytorch(make: Any, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], RATE)
    schedule, found = make(optimizer, **options), []
    for _ in range(ROUNDS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("schedules", "expected"),
    [
        ([], [RATE] * ROUNDS),
        ([Exponential(0.9)], of_pytorch(lr_scheduler.ExponentialLR, gamma=0.9)),
        ([Cosine()], of_pytorch(lr_scheduler.CosineAnnealingLR, T_max=ROUNDS)),
        ([Cosine(end=0.1)], of_pytorch(lr_scheduler.CosineAnnealingLR, T_max=ROUNDS, eta_min=0.1 * RATE)),
        ([Steps(after=(2, 5), decay=0.5)], of_pytorch(lr_scheduler.MultiStepLR, milestones=[2, 5], gamma=0.5)),
        ([WarmUp(4)], [RATE * share for share in (0.25, 0.5, 0.75, 1, 1, 1, 1, 1)]),
        ([WarmUp(2), Steps(after=(3,), decay=0.1)], [RATE * share for share in (0.5, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.1)]),
    ],
)
def test_rates(schedules: Sequence[Schedule], expected: list[float]) -> None:
    assert [scheduled(RATE, schedules, t, ROUNDS) for t in range(ROUNDS)] == pytest.approx(expected, rel=1e-12)


def test_decay_and_the_exponential_schedule_are_one(tmp_path: Path, warm_ray: MakeEngine) -> None:
    """The local rate on both engines, and both beside another schedule."""

    def sha256(make_engine: MakeEngine | None = None, **local: Any) -> str:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        engine = "local" if make_engine is None else "ray"
        return simulate(tiny(local=local, engine=engine), folder, make_engine=make_engine).sha256()

    decayed = sha256(lr_decay=0.5)
    assert sha256(lr_decay=1.0, lr_schedule=[{"exponential": {"decay": 0.5}}]) == decayed
    assert sha256(warm_ray, lr_decay=1.0, lr_schedule=[{"exponential": {"decay": 0.5}}]) == decayed
    assert sha256(lr_decay=1.0) != decayed
    warm = ["cosine", {"warm_up": {"rounds": 2}}]
    expected = [0.1 * 0.5**t * (1 + math.cos(math.pi * t / 3)) / 2 * min(1, (t + 1) / 2) for t in range(3)]
    federation = Federation(tiny(local={"lr_decay": 0.5, "lr_schedule": warm}), tmp_path / "warm")
    with closing(federation):
        assert [learning_rate(federation.config, t) for t in range(3)] == pytest.approx(expected, rel=1e-12)


def test_models_that_would_begin_after_the_last_round_are_tested(tmp_path: Path) -> None:
    """No round has the rate of 0 that the cosine would reach then."""
    changes = {"data": {"client_test_frac": 0.25}, "evaluate": {"personal": "after_init"}}
    config = tiny(**changes, local={"lr_decay": 0.5, "lr_schedule": ["cosine"]})
    simulate(config, tmp_path)
    assert learning_rate(config, 3) == learning_rate(config, 2)
    warm = tiny(local={"lr_decay": 0.5, "lr_schedule": [{"warm_up": {"rounds": 2}}]})
    assert learning_rate(warm, 3) == pytest.approx(0.1 * 0.5**3)  # such a run may be extended


@dataclass(frozen=True)
class Halved(Schedule):
    """Half in every round; remembers nothing, so that it can be pickled."""

    by: float = 0.5

    def factor(self, t: int, rounds: int) -> float:
        assert 0 <= t < rounds
        return self.by


@pytest.fixture
def halved() -> Any:
    REGISTRY.register("schedule", "halved", Halved)
    yield
    del REGISTRY.table("schedule")["halved"]


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("step", ["step_size", "fedavgm", "fedadam", "fedadagrad", "fedyogi"])
def test_steps_of_the_server(step: str, tmp_path: Path) -> None:
    def sha256(**options: Any) -> str:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        return simulate(tiny(server=[{step: options}]), folder).sha256()

    assert sha256(eta=0.5, eta_schedule=["halved"]) == sha256(eta=0.25)
    assert sha256(eta=0.5, eta_schedule=[{"exponential": {"decay": 0.5}}]) != sha256(eta=0.5)


@pytest.mark.usefixtures("halved")
@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_a_factor_is_a_number_above_0(factor: float) -> None:
    with pytest.raises(HookError, match=rf"round 3: Halved\.factor returned {factor}\. Return a number above 0\."):
        scheduled(RATE, [Halved(factor)], 2, ROUNDS)


def test_what_is_wrong_in_a_file() -> None:
    for wrong, sentence in {
        "cosin": r"local\.lr_schedule\.0: there is no schedule 'cosin'\. Did you mean 'cosine'",
        "steps": r"local\.lr_schedule\.0\.steps\.after: is missing",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            tiny(local={"lr_schedule": [wrong]})


def test_a_run_with_a_cosine_is_not_extended(tmp_path: Path) -> None:
    for name, changes in {
        "local": {"local": {"lr_schedule": ["cosine"]}},
        "server": {"server": [{"fedavgm": {"eta_schedule": ["cosine"]}}]},
    }.items():
        raysim.run(tiny(**changes, rounds={"total": 2}), out=tmp_path / name, progress=False)
        with pytest.raises(ConfigError, match=r"rounds\.total was 2 when the run began, and cosine computes with it"):
            raysim.resume(tmp_path / name, rounds__total=3)
    raysim.run(tiny(local={"lr_schedule": [{"warm_up": {"rounds": 3}}]}, rounds={"total": 2}), out=tmp_path / "w")
    assert raysim.resume(tmp_path / "w", rounds__total=3).rounds_done == 3


def test_a_run_that_began_before_there_were_schedules_goes_on(tmp_path: Path) -> None:
    """Its manifest does not have the settings that raysim did not have."""
    run = raysim.run(tiny(rounds={"total": 2}), out=tmp_path / "run", progress=False)
    path = run.folder / "manifest.json"
    text = path.read_text()
    for setting in ('"lr_schedule": []', '"augment": []'):
        assert setting in text
        text = text.replace(f"{setting},", "")
    path.write_text(text)
    assert raysim.resume(run.folder, rounds__total=3).rounds_done == 3
