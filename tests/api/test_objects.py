"""Data, models, methods and metrics that are given as objects: each gets a name, and all else is as with any other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from command import python
from torch import nn
from torch.utils.data import TensorDataset

import raysim
from raysim.api.lines import header
from raysim.api.preview import preview
from raysim.config import ConfigError
from raysim.core.task import Classification
from raysim.data import DataError, Dataset
from raysim.data.sources import Given
from raysim.methods import QSGD, FedLWS, FedProx
from raysim.models import ModelError
from raysim.registry import REGISTRY

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 2, 80)
X = (RNG.normal(size=(80, 3)) + 2 * Y[:, None]).astype(np.float32)
FRAME = pd.DataFrame(X, columns=["a", "b", "c"]).assign(label=Y, client=[f"ward {i % 4}" for i in range(80)])
BASE: dict[str, Any] = {
    "data": {"partition": "natural"}, "rounds": {"total": 2}, "local": {"batch_size": 10, "lr": 0.1}, "engine": "local",
}  # fmt: skip


SCRIPT = f"""
from __future__ import annotations
import sys
from dataclasses import dataclass
import numpy as np, pandas as pd, torch
from torch import nn
import raysim
from raysim.methods import QSGD, FedLWS, FedProx

class MLP(nn.Module):
    "Its name is one of raysim's."
    def __init__(self, inputs, width=4):
        super().__init__()
        self.features, self.head = nn.Linear(inputs.shape[0], width), nn.Linear(width, inputs.classes)
    def forward(self, x):
        return self.head(self.features(x))

@dataclass(frozen=True)
class Half(raysim.ClientMethod):
    "Half of every gradient, and a state whose annotations are text."
    def new_state(self, layers):
        return Steps(Count())
    def correct_grad(self, run):
        run.grad.mul_(0.5)
        run.state(self).inner.last = run.grad.clone()

@dataclass
class Count:
    last: torch.Tensor | None = None

@dataclass
class Steps:
    inner: Count

def doubt(outputs, y):
    return 1 - outputs.softmax(1).amax(1)

people = pd.read_csv("people.csv")
for engine in ("local", {{"ray": {{"clients_per_actor": 4}}}}):
    run = raysim.run(
        {BASE!r}, data=(people[:60], people[60:]), model={{"name": MLP, "options": {{"width": 5}}}},
        client=[FedProx(mu=0.1), Half()], metrics=[doubt], engine=engine,
    )
    assert run["clients"].num_rows == 8 and len(run["rounds"]["metric.doubt"]) == 2
    print(run.config["model"]["name"], [*map(list, run.config["client"])], run.config["evaluate"]["metrics"], run.result["sha256"])
"""


def test_objects_on_both_engines(tmp_path: Path, cluster: Any) -> None:
    """The same bits, each with the name that a file could have."""
    FRAME.to_csv(tmp_path / "people.csv", index=False)
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    ended = python("script.py", folder=tmp_path, RAY_ADDRESS=cluster.address)
    first, second = ended.out.splitlines()[-2:] if not ended.end() else (ended.err, "")
    assert first == second
    assert first.startswith("own_mlp [['fedprox'], ['half']] ['doubt'] ")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = REGISTRY.own()
    yield
    for one in REGISTRY.own():
        if one not in before:
            del REGISTRY.table(one[0])[one[1]]


@dataclass(frozen=True)
class Quiet(raysim.ClientMethod):
    """It changes nothing."""


def certainty(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return outputs.softmax(1).amax(1)


class Wide(nn.Module):
    """It has arguments of its own, and none for raysim."""

    def __init__(self, hidden: int = 5):
        super().__init__()
        self.body, self.fc = nn.Linear(3, hidden), nn.Linear(hidden, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.body(x).tanh())
        return out


class Five(Wide):
    def __init__(self) -> None:
        super().__init__(5)


class Asking(Wide):
    def __init__(self, inputs: raysim.Inputs, hidden: int = 5):
        super().__init__(hidden)


class Sized(Wide):
    def __init__(self, hidden: int, classes: int):
        super().__init__(hidden)


class Raising(Wide):
    def __init__(self) -> None:
        raise ValueError("no width")


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(2, 2)


class Flat(Five):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 0]


def test_a_class_is_used_with_the_arguments_it_has(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Only a first parameter without a default is given the `Inputs`."""
    made = {
        "own arguments": Wide,
        "none": Five,
        "inputs": Asking,
        "numbers of its own": lambda inputs=3, hidden=5: Wide(hidden),
        "a function of none": lambda: Wide(5),
        "a function of inputs": lambda inputs: Wide(5),
        "partial": partial(Wide, 5),
        "partial by name": partial(Sized, hidden=5, classes=2),
        "options": {"name": Wide, "options": {"hidden": 5}},
    }
    data = raysim.as_dataset(FRAME, test=0.25)
    hashes = {
        name: raysim.run(BASE, data=data, model=model, out=tmp_path / name).result["sha256"]
        for name, model in made.items()
    }
    assert len(set(hashes.values())) == 1, hashes
    ways = "model.options holds values for parameters that have a default; or give a function of no parameters"
    given = "Its first parameter, {}, has no default, and so is given raysim.Inputs. "
    for model, said in {
        Wide(): r"model: it is an instance of Wide, .* Give the class \(model=Wide\), or .* \(model=lambda: Wide\(...\)\)",
        Sized: rf"sized: cannot be made: .* missing 1 .* 'classes'. {given.format('hidden')}{ways}",
        partial(Sized, classes=2): rf"partial: cannot be made: .*\. {given.format('hidden')}{ways}",
        Raising: r"raising: cannot be made: ValueError: no width$",
        Uninitialised: r"uninitialised: cannot be made: AttributeError: cannot assign module before Module.__init__\(\) call",
        Flat: r"model.name: its forward returned \[2\] for 2 samples; return \[B, 2\]",
        int: r"model: the class int is no nn\.Module\.",
        lambda: None: r"model: is made by a function that returns None, and no nn\.Module\.",
    }.items():
        with subtests.test(model=model), pytest.raises((ConfigError, ModelError), match=said):
            raysim.run(BASE, data=data, model=model, out=tmp_path / "refused")


def test_what_no_process_can_be_sent_is_named(tmp_path: Path, cluster: Any) -> None:
    lock = threading.Lock()

    def locked() -> nn.Module:
        with lock:
            return Wide()

    given: dict[str, Any] = {"engine": "ray", "data": raysim.as_dataset(FRAME, test=0.25), "model": locked}
    said = r"the model 'locked' cannot be sent to Ray's processes \(TypeError: cannot pickle '_thread.lock' object\)"
    with pytest.raises(ConfigError, match=said):
        raysim.run(BASE, **given, address=cluster.address, out=tmp_path / "run")


def linear(inputs: raysim.Inputs) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs.shape[0], inputs.classes))


def test_what_is_given_again_goes_on(tmp_path: Path) -> None:
    """A process that was not given the samples says so; one that is given others, too."""
    equal = {"data": {"partition": {"iid_equal": {"clients": 4}}}}
    data = (TensorDataset(torch.tensor(X), torch.tensor(Y)), TensorDataset(torch.tensor(X), torch.tensor(Y)))
    run = raysim.run(BASE | equal, data=data, model=lambda inputs: nn.Sequential(nn.Linear(3, 2)), out=tmp_path / "run")
    assert run.config["model"]["name"] == "model"
    code = f"import raysim; raysim.resume({str(run.folder)!r}, rounds__total=3)"
    ended = python("-c", code, folder=tmp_path)
    assert "were an object in Python; give it again: raysim.resume(FOLDER, data=...)" in ended.err
    longer = raysim.resume(run, rounds__total=3, data=data)
    assert longer.rounds == 3
    straight = raysim.run(
        BASE | equal, data=raysim.as_dataset(data), model={"name": "model"}, out=tmp_path / "straight", rounds__total=3
    )
    assert longer.result["sha256"] == straight.result["sha256"]
    with pytest.raises(ConfigError, match=r"data\.name"):
        raysim.resume(run, rounds__total=4, data=((X + 1, Y), (X, Y)))


@dataclass(frozen=True)
class Focal(Classification):
    """Its metrics are functions, which have another address in each process."""

    gamma: float = 2.0


def test_a_task_is_known_again_in_another_process(tmp_path: Path) -> None:
    code = "import numpy, raysim; from dataclasses import dataclass; from raysim.data.sources import Given\n"
    code += "@dataclass(frozen=True)\nclass Focal(raysim.Classification):\n    gamma: float = 2.0\n"
    code += "x, y = numpy.eye(2, dtype='float32'), numpy.array([0, 1])\n"
    code += "print(Given.of(raysim.as_dataset((x, y), task=Focal(), test=0)).digest)"
    digests = [
        Given.of(raysim.as_dataset((np.eye(2, dtype="float32"), np.array([0, 1])), task=task, test=0)).digest
        for task in (Focal(), Focal(gamma=1.0))
    ]
    assert digests[0] == python("-c", code, folder=tmp_path).out.strip() != digests[1]


def test_a_configuration_keeps_its_objects(tmp_path: Path) -> None:
    """Two that wait have the same words for different objects."""

    def nearness(number: float) -> Any:
        return lambda outputs, y: torch.full((len(y),), number)

    data = raysim.as_dataset(FRAME, test=0.25)
    waiting = {
        width: raysim.read_config(
            BASE, data=data, metrics={"near": nearness(width)}, model=lambda width=width: Wide(width), rounds__total=1
        )
        for width in (4, 9)
    }
    begun = {width: raysim.stream(config, out=tmp_path / f"{width}") for width, config in waiting.items()}
    for width, simulation in begun.items():
        assert [round.metrics["near"] for round in simulation] == [width]
        assert simulation.config.model.name == "model"
        assert len(raysim.run(waiting[width], out=tmp_path / f"again{width}").model().body.weight) == width


def test_objects_in_a_mapping_are_as_those_in_settings() -> None:
    data = {"name": raysim.as_dataset(FRAME, test=0.25), "partition": "natural"}
    given = {"data": data, "model": linear, "client": [Quiet()], "metrics": certainty}
    assert raysim.read_config(BASE | given) == raysim.read_config(BASE, **given)
    assert raysim.read_config(BASE | given, model=Five).model.name == "five"


def test_what_is_wrong_with_an_object_shows_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which samples are for the test"):
        raysim.stream(BASE, data=FRAME, model=linear)
    with pytest.raises(ConfigError, match=r"data\.label: unknown field"):
        raysim.read_config(BASE, data={"label": "y"}, model=linear)
    scaled = [Dataset("d", X, Y, 60, ("0", "1"), scale=scale) for scale in (1.0, 2.0)]
    one, other = (raysim.read_config(BASE, data=data, model=linear).data.name for data in scaled)
    assert one != other


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"client": FedProx}, r"client\.0: FedProx is a class\. Give an object of it: FedProx\(\.\.\.\)\."),
        ({"client": [FedProx]}, r"client\.0: FedProx is a class\. "),
        (
            {"client": [FedLWS()]},
            r"client\.0: FedLWS is not registered as a client method\. It belongs under 'server'\.",
        ),
        (
            {"server": FedProx(mu=0.1)},
            r"server\.0: FedProx is not registered as a server step\. It belongs under 'client'\.",
        ),
        ({"server": [QSGD()]}, r"server\.0: QSGD .* It belongs under 'upload'\."),
        ({"client": [3]}, r"client\.0: must be the name of a client method"),
    ],
)
def test_an_object_in_the_wrong_place_is_named(given: dict[str, Any], says: str) -> None:
    before = REGISTRY.own()
    for ways in ((BASE, given), (BASE | given, {})):
        with pytest.raises(ConfigError, match=says):
            raysim.read_config(ways[0], data=raysim.as_dataset(FRAME, test=0.25), model=linear, **ways[1])
    assert {one[0] for one in REGISTRY.own() if one not in before} <= {"model"}


def test_a_method_without_dataclass_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fading(raysim.ClientMethod):
        x: float = 1.0

    monkeypatch.setitem(REGISTRY.table("client"), "fading", Fading)
    says = r"fading\.x: unknown field .* It takes no fields\. .* Fading itself, write @dataclass\(frozen=True\) above"
    with pytest.raises(ConfigError, match=says):
        raysim.read_config("quickstart", client={"fading": {"x": 2.0}})


def test_samples_of_no_client_are_reported(tmp_path: Path) -> None:
    """Three clients of two classes each have six of ten classes at most: the others' samples are nobody's."""
    changes = {"name": "digits", "partition": {"pathological": {"clients": 3, "classes_per_client": 2}}}
    config = raysim.read_config(BASE | {"data": changes, "model": {"name": "mlp"}}, rounds__total=1)
    run = raysim.run(config, out=tmp_path / "run")
    rows = run["partition"].to_pandas()
    assert sorted(rows["sample"].unique()) == [*range(1797)]
    unused = rows[rows["split"] == "unused"]
    assert (unused["client"] == -1).all()
    assert set(unused["label"]).isdisjoint(rows[rows["split"] == "train"]["label"])
    assert run.manifest["unused_samples"] == len(unused) > 0
    said = f"{len(unused)} of 1,797 samples ({100 * len(unused) / 1797:.2g} %) are given to no client"
    assert said in header(config, run.manifest)
    assert said in preview(config)
    assert "no client" not in header(config, {"unused_samples": 0, "samples": 1797})
