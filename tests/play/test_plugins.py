"""Somebody's own model, data, partition, loss, metric, method and instrument: in a script, in a notebook's cell, in a package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

import raysim


@raysim.method("client")
@dataclass(frozen=True)
class SignSGD(raysim.ClientMethod):
    """Steps follow the sign of the gradient."""

    scale: float = 1e-2

    def correct_grad(self, run: raysim.LocalRun) -> None:
        run.grad.sign_().mul_(self.scale)


@raysim.model()
class Net(nn.Module):
    def __init__(self, inputs: raysim.Inputs, width: int = 16):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(inputs.shape)), width), nn.Tanh())
        self.head = nn.Linear(width, inputs.classes)

    def forward(self, x):
        return self.head(self.features(x))


class Points(torch.utils.data.Dataset):
    """Two moons' worth of nothing: the class is the sign of the first coordinate."""

    def __init__(self, n: int, seed: int):
        self.x = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.x[i, 0] > 0)


@raysim.dataset()
def points(samples: int = 200):
    return Points(samples, 0), Points(100, 1)


@raysim.partition()
def in_turn(labels, rng, clients: int = 4):
    return [np.arange(i, len(labels), clients) for i in range(clients)]


@raysim.task()
@dataclass(frozen=True)
class Focal(raysim.Classification):
    """Samples that are well classified count less."""

    gamma: float = 1.0

    def losses(self, outputs, y):
        logs = super().losses(outputs, y)
        return (1 - torch.exp(-logs)) ** self.gamma * logs


@raysim.metric(higher_is_better=False)
def doubt(outputs, y):
    return 1 - outputs.softmax(1).amax(1)


@raysim.instrument()
@dataclass(frozen=True)
class Drift(raysim.Instrument):
    """How far the model has moved."""

    def observe(self, done, population):
        yield self.note("norm", (done.after - done.before).norm())


def settings(engine):
    return {
        "name": "own", "engine": engine,
        "data": {"name": {"points": {"samples": 120}}, "partition": {"in_turn": {"clients": 3}}, "task": "focal"},
        "model": {"name": "net", "options": {"width": 8}}, "rounds": {"total": 3},
        "local": {"batch_size": 10, "lr": 0.5}, "client": [{"signsgd": {"scale": 0.1}}],
        "evaluate": {"metrics": ["doubt"]}, "record": {"instruments": ["drift"]},
    }


if __name__ == "__main__":
    import sys

    runs = {engine: raysim.run(settings(engine), out=f"{sys.argv[1]}/{engine}") for engine in ("local", "ray")}
    assert runs["local"].result["sha256"] == runs["ray"].result["sha256"]
    assert runs["ray"].result["final"] > 0.85, runs["ray"].result
    doubts = [run["rounds"]["metric.doubt"].to_pylist() for run in runs.values()]
    assert doubts[0] == doubts[1] and doubts[0][0] > doubts[0][-1] > 0, doubts
    assert [n["method"] for n in runs["ray"]["notes"].to_pylist()] == ["drift"] * 3
    assert isinstance(runs["ray"].model()(torch.zeros(2, 5)), torch.Tensor)
    print("all well")
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def test_in_a_script(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, script, script.parent], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.stdout.endswith("all well\n"), done.stdout + done.stderr
