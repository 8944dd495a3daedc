"""A user's own entry of every kind: in a script, in a notebook's cell, in a package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel
import pytest
import yaml
from command import python

import raysim
from raysim.registry import KINDS, REGISTRY, NameTaken

OWN = '''
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
        self.places = torch.randn(*inputs.shape)  # of no state_dict: each process draws it anew
        self.hidden = nn.Linear(int(np.prod(inputs.shape)), width)
        self.out = nn.Linear(width, inputs.classes)

    def forward(self, x):
        return self.out(self.hidden(x + self.places / 8).tanh())


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


@raysim.method("transform")
@dataclass(frozen=True)
class Halves(raysim.Compressor):
    """Every element is a multiple of the greatest one's 64th part."""

    def encode(self, part, sender):
        scale = part.values.abs().max() / 64
        part.values = (part.values / scale).round() * scale if scale > 0 else part.values
        part.bits, part.scales = 8, 4


def middle(updates):
    return (updates.amin(0) + updates.amax(0)) / 2


@raysim.method("weighting")
@dataclass(frozen=True)
class MidRange(raysim.Weighting):
    """The middle of the least and the greatest value of each coordinate."""

    def plan(self, cohort, server, prior):
        return prior

    def combine(self, mixture, cohort, server):
        return server.value + cohort.columns(middle, mixture)


@raysim.method("attack")
@dataclass(frozen=True)
class Noise(raysim.Attack):
    """Adds normal noise to the update."""

    scale: float = 1e-3

    def update(self, honest, client, known):
        return honest + self.scale * torch.randn(honest.shape, generator=client.generator("noise"))


@raysim.method("selection")
@dataclass(frozen=True)
class Pairs(raysim.Selection):
    """Two neighbours; and says how well the model does on their samples."""

    needs = raysim.Needs(global_model=True)

    def asked(self, participation, clients):
        return 2

    def select(self, server, participation, clients):
        n = len(server.population.sizes)
        pair = tuple(sorted({server.t % n, (server.t + 1) % n}))
        return raysim.Asked(pair, utility=dict(zip(pair, clients.losses(pair).tolist())))


@raysim.trait()
@dataclass(frozen=True)
class Between(raysim.Trait):
    """Any number between two is equally likely."""

    least: float
    most: float

    def of(self, clients, u):
        return self.least + (self.most - self.least) * u


@raysim.availability()
@dataclass(frozen=True)
class Weekdays(raysim.Availability):
    """Five days of seven; the run begins on a Monday."""

    def state(self, clients, at, u):
        open = at % 604800 < 432000
        return open, at - at % 604800 + np.where(open, 432000, 604800)


@raysim.schedule()
@dataclass(frozen=True)
class Harmonic(raysim.Schedule):
    """1 / (1 + t / n)."""

    n: int = 10

    def factor(self, t, rounds):
        return 1 / (1 + t / self.n)
'''
SETTINGS: dict[str, Any] = {
    "name": "own",
    "data": {"name": {"points": {"samples": 120}}, "partition": {"in_turn": {"clients": 3}}, "task": "focal"},
    "model": {"name": "net", "options": {"width": 8}}, "rounds": {"total": 3, "selection": "pairs"},
    "local": {"batch_size": 10, "lr": 0.5, "lr_schedule": [{"harmonic": 20}]},
    "client": [{"signsgd": {"scale": 0.1}}], "weighting": ["midrange"], "upload": ["error_feedback", {"halves": {"least": 8}}],
    "attack": [{"noise": {"clients": [1]}}], "clock": {"speed": {"between": {"least": 10, "most": 20}}, "availability": "weekdays"},
    "evaluate": {"metrics": ["doubt"]}, "record": {"instruments": ["drift"]},
}  # fmt: skip
ON_RAY = {"ray": {"clients_per_actor": 3}}  # one actor: its start takes longer than the runs
RUN = f"""
def ran(engine):
    run = raysim.run({SETTINGS!r}, out=f"out/{{engine}}", engine={{"local": "local", "ray": {ON_RAY!r}}}[engine])
    doubts = run["rounds"]["metric.doubt"].to_pylist()
    assert run.result["final"] > 0.85 and doubts[0] > doubts[-1] > 0, doubts
    assert [note["method"] for note in run["notes"].to_pylist()] == ["drift"] * 3
    clients, traffic = run["clients"].to_pandas(), run["traffic"].to_pandas()
    assert clients.client.tolist() == [0, 1, 1, 2, 0, 2]
    assert (clients.attack.notna() == (clients.client == 1)).all()
    assert (clients.samples / 15 < clients.sim_train).all() and (clients.sim_train < clients.samples / 7.5).all()
    assert (clients.utility > 0).all()
    assert (traffic.up_scales > 0).all() and (traffic.up_params < traffic.down_params / 3).all()
    assert isinstance(run.model()(torch.zeros(2, 5)), torch.Tensor)
    return run.result["sha256"]
"""
PRINT = "print(ran('local'), ran('ray'), sep='\\n')"
ENTRIES = {
    "methods": ("SignSGD", "Halves", "MidRange", "Noise", "Pairs"), "models": ("Net",), "datasets": ("points",),
    "partitions": ("in_turn",), "tasks": ("Focal",), "metrics": ("doubt",), "instruments": ("Drift",), "traits": ("Between",),
    "availabilities": ("Weekdays",), "schedules": ("Harmonic",),
}  # fmt: skip
BUILD = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n[project]\nname = "mine"\nversion = "1"\n'


@pytest.fixture
def environment(cluster: Any) -> dict[str, str]:
    """Of a process that joins this session's cluster, in which nothing but raysim is known."""
    return os.environ | {"RAY_ADDRESS": cluster.address}


def lines(*command: object, **settings: Any) -> list[str]:
    """What a Python process prints."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_in_a_script(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN + RUN + f'if __name__ == "__main__":\n    {PRINT}\n')
    ended = python("mine.py", folder=tmp_path, RAY_ADDRESS=cluster.address)
    assert ended.end() == 0, ended.output
    local, ray = ended.out.splitlines()[-2:]
    assert local == ray


def test_in_a_notebook(environment: dict[str, str], tmp_path: Path) -> None:
    """Each definition in a cell of its own. The one of the method is run again after a change."""
    import nbformat

    parts = OWN.split("\n\n\n")
    method = next(part for part in parts if "SignSGD" in part)
    cells = [parts[0], method.replace("1e-2", "1e-3"), *parts[1:], RUN, PRINT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel.execute(notebook, tmp_path, env=environment)
    printed = "".join(out.text for out in notebook.cells[-1].outputs if out.get("name") == "stdout")
    local, ray = printed.splitlines()[-2:]
    assert local == ray


def test_in_an_installed_package(tmp_path: Path) -> None:
    """Found by its entry points alone, from the command line; in a cluster of its own, whose nodes have the package."""
    package, site = tmp_path / "package", tmp_path / "site"
    (package / "mine").mkdir(parents=True)
    (package / "mine" / "__init__.py").write_text(OWN)
    groups = [
        f'[project.entry-points."raysim.{group}"]\n' + "\n".join(f'{name.lower()} = "mine:{name}"' for name in names)
        for group, names in ENTRIES.items()
    ]
    (package / "pyproject.toml").write_text(BUILD + "\n".join(groups))
    quiet = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    lines("-m", "pip", "install", *quiet, "--target", site, package)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(SETTINGS))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(site), environment.get("PYTHONPATH", "")])
    hashes = [
        json.loads((tmp_path / name / "result.json").read_text())["sha256"]
        for name, engine in (("local", "local"), ("ray", json.dumps(ON_RAY)))
        if lines(
            "-m", "raysim", "run", "own.yaml", "--out", name, "--set", f"engine={engine}", env=environment, cwd=tmp_path
        )
    ]
    assert hashes[0] == hashes[1]


CELL = """
import numpy as np
import raysim
from dataclasses import dataclass
from torch import nn

@raysim.metric()
def again_metric(outputs, y):
    return outputs.amax(1)

@raysim.model()
def again_model(inputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(inputs.shape)), inputs.classes))

@raysim.dataset()
def again_data(samples: int = 40):
    raise NotImplementedError

@raysim.partition()
def again_partition(labels, rng, clients: int = 2):
    return np.array_split(np.arange(len(labels)), clients)

@raysim.task()
@dataclass(frozen=True)
class AgainTask(raysim.Classification):
    factor: float = FACTOR

@raysim.method("client")
@dataclass(frozen=True)
class AgainMethod(raysim.ClientMethod):
    pass

@raysim.instrument()
@dataclass(frozen=True)
class AgainInstrument(raysim.Instrument):
    pass
"""


def test_a_cell_can_run_again_and_its_last_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:  # what is registered here is forgotten afterwards
        for part in ("_entries", "_origins", "own"):
            monkeypatch.setattr(REGISTRY.table(kind), part, getattr(REGISTRY.table(kind), part).copy())
    for factor in (1.0, 2.0):
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(CELL.replace("FACTOR", str(factor)), scope)
    assert REGISTRY.table("task")["againtask"].factor == 2.0
    assert REGISTRY.table("client")["againmethod"] is scope["AgainMethod"]
    with pytest.raises(NameTaken, match=r"'accuracy_of_all' of __main__\.other"):
        exec(
            "import raysim\n@raysim.metric('accuracy_of_all')\ndef one(outputs, y): ...\n"
            "@raysim.metric('accuracy_of_all')\ndef other(outputs, y): ...",
            {"__name__": "__main__"},
        )


BRACKETS = ("model", "dataset", "partition", "metric", "task", "instrument", "schedule", "trait", "availability")


@pytest.mark.parametrize("decorator", BRACKETS)
def test_a_decorator_without_brackets_is_refused(decorator: str) -> None:
    with pytest.raises(TypeError, match=rf"write @raysim\.{decorator}\(\), with brackets, above <class .*Path'>"):
        getattr(raysim, decorator)(Path)


def test_a_method_needs_a_role() -> None:
    with pytest.raises(ValueError, match=r'no role of a method; .* Write @raysim\.method\("client"\)'):
        raysim.method(Path)  # type: ignore[arg-type]
