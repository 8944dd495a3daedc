"""The code of a user: a run records it, and does not go on with another unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kernel
import numpy as np
import pytest
import torch
import yaml
from command import Python, python
from torch import nn

import raysim
from raysim.config import ConfigError
from raysim.definition import definition_of, values_of
from raysim.registry import KINDS, REGISTRY

HELPERS = """
import torch

SCALE = 1.0

def squash(x):
    return torch.tanh(SCALE * x)

def never_named():
    return 1
"""
TRAIN = '''
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import helpers
import raysim

WIDTH = 8
rounds = int(sys.argv[2])


@raysim.model()
class MyNet(nn.Module):
    def __init__(self, inputs: raysim.Inputs):
        super().__init__()
        self.hidden = nn.Linear(int(np.prod(inputs.shape)), WIDTH)
        self.fc = nn.Linear(WIDTH, inputs.classes)

    def forward(self, x):
        return self.fc(helpers.squash(self.hidden(x.flatten(1))))


def factor():
    return 0.5


@raysim.method("client")
@dataclass(frozen=True)
class Slow(raysim.ClientMethod):
    """Shorter steps."""

    def correct_grad(self, run: raysim.LocalRun) -> None:
        run.grad.mul_(factor())


@raysim.metric()
def certainty(outputs, y):
    return outputs.softmax(1).amax(1)


@raysim.dataset()
def two(samples: int = 60):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 2 * samples)
    x = (rng.normal(size=(2 * samples, 3)) + y[:, None]).astype("float32")
    return (x[:samples], y[:samples]), (x[samples:], y[samples:])


@raysim.partition()
def in_turn(labels, rng, clients: int = 3):
    return [np.arange(i, len(labels), clients) for i in range(clients)]


@raysim.task()
@dataclass(frozen=True)
class Twice(raysim.Classification):
    def losses(self, outputs, y):
        return 2 * super().losses(outputs, y)


@raysim.instrument()
@dataclass(frozen=True)
class Norm(raysim.Instrument):
    def observe(self, done, population):
        yield self.note("norm", done.after.norm())


SETTINGS = {
    "name": "own", "data": {"name": "two", "partition": "in_turn", "task": "twice"}, "model": {"name": "mynet"},
    "rounds": {"total": 2}, "local": {"batch_size": 10, "lr": 0.1}, "client": ["slow"],
    "evaluate": {"metrics": ["certainty"]}, "record": {"instruments": ["norm"]}, "engine": "local",
}  # fmt: skip
if __name__ == "__main__":
    if sys.argv[1] == "run":
        run = raysim.run(SETTINGS, out=sys.argv[3], rounds__total=rounds, engine=eval(sys.argv[4]))
    else:
        run = raysim.resume(sys.argv[3], rounds__total=rounds, accept_changed_code=sys.argv[1] == "accept")
    print(run.result["sha256"])
'''


def records(run: Path) -> dict[str, dict[str, Any]]:
    """What the manifest says of each entry, under its kind, with its text."""
    found = {one["kind"]: one for one in json.loads((run / "manifest.json").read_text())["code"]}
    for one in found.values():
        one["source"] = (run / one["text"]).read_text() if one["text"] else None
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script of a user's and a module beside it."""
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_script(project: Path, cluster: Any) -> None:
    """Recorded alike by both engines; unchanged code goes on to the same bits, changed code stops and says so."""
    script, engines = project / "train.py", ("'local'", "{'ray': {'clients_per_actor': 3}}")
    for name, engine in zip(("run", "ray"), engines, strict=True):
        ran = python("train.py", "run", 2, name, engine, folder=project, RAY_ADDRESS=cluster.address)
        assert ran.end() == 0, ran.err
    whole = python("train.py", "run", 4, "whole", engines[0], folder=project).out.splitlines()[-1]
    found = records(project / "run")
    assert found == records(project / "ray")
    assert {kind: one["name"] for kind, one in found.items()} == {
        "model": "mynet", "client": "slow", "metric": "certainty", "dataset": "two", "partition": "in_turn", "task": "twice",
        "instrument": "norm",
    }  # fmt: skip
    for one in found.values():
        assert one["file"] == "train.py" and not one["given"]
        assert one["sha256"] == hashlib.sha256(one["source"].encode()).hexdigest()
        assert "rounds = int" not in one["source"] and "raysim.run(" not in one["source"]
    text = found["model"]["source"]
    assert "WIDTH = 8" in text and "def squash" in text and "SCALE = 1.0" in text  # what the class names
    assert "never_named" not in text and "class Slow" not in text

    edit(script, "rounds = int(sys.argv[2])", "rounds = int(sys.argv[2]) + 0")  # no entry names it
    same = python("train.py", "resume", 3, "run", folder=project)
    assert same.end() == 0, same.err
    assert "has changed" not in same.err

    edit(script, "return 0.5", "return 0.25")
    stopped = python("train.py", "resume", 4, "run", folder=project)
    assert stopped.end() != 0
    assert "run: the client method 'slow' (train.py) has changed since the run began" in stopped.err
    assert "    -    return 0.5\n    +    return 0.25\n" in stopped.err
    assert "--accept-changed-code" in stopped.err and "accept_changed_code=True" in stopped.err
    assert "the model" not in stopped.err
    edit(script, "return 0.25", "return 0.5")
    again = python("train.py", "resume", 4, "run", folder=project)
    assert again.out.splitlines()[-1] == whole

    edit(project / "helpers.py", "SCALE = 1.0", "SCALE = 2.0")
    stopped = python("train.py", "resume", 5, "run", folder=project)
    assert "the model 'mynet' (train.py) has changed since the run began" in stopped.err
    assert "    -SCALE = 1.0\n    +SCALE = 2.0\n" in stopped.err
    for name in ("run", "ray"):
        before = records(project / name)["model"]
        accepted = python("train.py", "accept", 5, name, folder=project, RAY_ADDRESS=cluster.address)
        assert accepted.end() == 0, accepted.err
        events = raysim.load(project / name)["events"].to_pylist()
        [told] = [event for event in events if "accepted" in event["message"]]
        assert "the model 'mynet' (train.py) has changed since the run began" in told["message"]
        assert records(project / name)["model"]["sha256"] != before["sha256"]
        assert (project / name / before["text"]).read_text() == before["source"]  # both stay
    assert python("train.py", "resume", 6, "run", folder=project).end() == 0  # accepted once and for all


def test_a_process_that_does_not_know_the_code(project: Path) -> None:
    """It names the file to import, and not what else there is."""
    assert python("train.py", "run", 2, "run", "'local'", folder=project).end() == 0
    asked = python("-c", "import raysim; raysim.load('run').model()", folder=project)
    way = (
        "was defined in train.py. In Python import that file first, as in `import train, raysim; raysim.resume('run')`."
    )
    assert f"run: the model 'mynet' {way}" in asked.err
    assert "Did you mean" not in asked.err
    imported = "import sys; sys.argv = ['train.py', 'no', '1', 'no']; import train, raysim\n"
    asked = python("-c", f"{imported}print(raysim.load('run').model().fc.in_features)", folder=project)
    assert asked.out.splitlines()[-1] == "8"
    for command in (("-c", "import raysim; raysim.resume('run')"), ("-m", "raysim", "resume", "run")):
        asked = python(*command, folder=project)
        assert asked.end()
        for what in ("model 'mynet'", "client method 'slow'", "metric 'certainty'", "data set 'two'", "task 'twice'"):
            assert f"the {what} {way}" in asked.err
    assert asked.end() == 2 and "Traceback" not in asked.err


OBJECTS = """
import sys
import numpy as np
import raysim
from dataclasses import dataclass
from torch import nn

class Net(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.fc = nn.Linear(int(np.prod(inputs.shape)), inputs.classes)

    def forward(self, x):
        return self.fc(x.flatten(1))

@dataclass(frozen=True)
class Half(raysim.ClientMethod):
    def correct_grad(self, run):
        run.grad.mul_(0.5)

def doubt(outputs, y):
    return 1 - outputs.softmax(1).amax(1)

OWN = dict(model=lambda inputs: Net(inputs, width=4), client=[Half()], metrics=[doubt])
SETTINGS = {
    "data": {"name": "digits", "partition": {"iid_equal": {"clients": 4}}}, "rounds": {"total": 1},
    "local": {"batch_size": 64, "lr": 0.1}, "engine": "local",
}  # fmt: skip
"""
PLAY = "raysim.run(SETTINGS, out='run', **OWN)\n"
RESUME = "raysim.resume('run', rounds__total=2, **OWN)\n"


def test_objects(tmp_path: Path) -> None:
    """A function without a name is recorded without the statement around it, which may be the one that starts the run."""
    script = tmp_path / "objects.py"
    script.write_text(OBJECTS + PLAY)
    assert python("objects.py", folder=tmp_path).end() == 0
    found = records(tmp_path / "run")
    assert {kind: (one["name"], one["file"], one["given"]) for kind, one in found.items()} == {
        "model": ("model", "objects.py", True), "client": ("half", "objects.py", True), "metric": ("doubt", "objects.py", True)
    }  # fmt: skip
    assert "class Net(nn.Module)" in found["model"]["source"] and "Half" not in found["model"]["source"]
    asked = python("-c", "import raysim; raysim.load('run').model()", folder=tmp_path)
    assert (
        "was given as an object of objects.py. In Python give it to `raysim.resume('run', ...)` again, or register it first: "
        "`raysim.model('model')(...)`."
    ) in asked.err
    script.write_text(OBJECTS.replace("metrics=[doubt]", "metrics=[doubt, ]") + RESUME)
    assert python("objects.py", folder=tmp_path).end() == 0
    script.write_text(OBJECTS.replace("width=4", "width=5") + RESUME.replace("2", "3"))
    stopped = python("objects.py", folder=tmp_path)
    assert "the model 'model' (objects.py) has changed since the run began" in stopped.err
    assert "-(lambda inputs: Net(inputs, width=4))" in stopped.err


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@dataclass(frozen=True)
class Rates:
    mu: float


def made(mu: Any, *, least: Any = None, act: Any = None, base: type = nn.Module) -> type[Any]:
    """A class that has what it was made with in each of the places that there are."""

    class Net(base):  # type: ignore[misc]
        rate = mu

        def __init__(self, width: Any = least) -> None:
            super().__init__()

        @property
        def factor(self) -> Any:
            return mu

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x if act is None else act(x)

    return Net


class Deep(nn.Module):
    depth = 3


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (made(0.5), "mu = 0.5"),
        (made(np.int64(2)), f"mu = {np.int64(2)!r}"),
        (made({"a": [1, 2]}), "mu = {'a': [1, 2]}"),
        (made(Rates(2.0)), "mu = 2.0"),
        (made(0.0, least=3), "width = 3"),
        (made(0.0, act=torch.relu), "act = torch.relu"),
        (made(0.0, act=torch.sin), "act = torch.sin"),
        (made(0.0, act=nn.LeakyReLU(0.25)), "negative_slope = 0.25"),
        (made(0.0, act=partial(torch.clamp, min=2)), "min = 2"),
        (made(0.0, act=halved), "act = halved"),
        (made(0.0, act=halved), "    return x / 2"),
        (made(0.0, base=Deep), "    depth = 3"),
    ],
)
def test_what_a_class_was_made_with_defines_it(now: type[Any], line: str) -> None:
    """As its statement is the same, whatever function made it with what."""
    texts = []
    for entry in (made(0.0), now, now):
        definition = definition_of(entry, True, values_of(entry))
        assert definition and definition.text
        texts.append(definition.text)
    was, text, again = texts
    added, removed = ({*text.splitlines()} - {*was.splitlines()}, {*was.splitlines()} - {*text.splitlines()})
    assert text == again and (line in added or f"# given: {line}" in added)
    assert {line for line in removed if not line.startswith("# given: ")} == set()
    assert len(text) < 3000  # torch's sources are not in it


def pull(mu: float) -> None:
    @raysim.method("client", "pull")
    @dataclass(frozen=True)
    class Pull(raysim.ClientMethod):
        def correct_grad(self, run: raysim.LocalRun) -> None:
            run.grad.mul_(mu)


def test_a_class_that_a_function_makes(tmp_path: Path) -> None:
    from conftest import tiny

    pull(1.0)
    run = raysim.run(tiny(client=["pull"]), out=tmp_path / "run")
    pull(2.0)
    with pytest.raises(ConfigError, match=r"(?s)'pull' .*has changed.*-# given: mu = 1.0.*\+# given: mu = 2.0"):
        raysim.resume(run, rounds__total=5)
    pull(1.0)
    assert raysim.resume(run, rounds__total=5)["rounds"].num_rows == 5


def test_a_notebook(tmp_path: Path) -> None:
    """What the cells that have run define, wherever they stand; a cell that runs again after a change counts."""
    import nbformat

    parts = re.split(r"\n\n(?=\S)", OBJECTS)
    cells = ["import raysim", *parts, "@raysim.model()\ndef own(inputs):\n    return Net(inputs, 3)"]
    play = PLAY.replace("**OWN", "**OWN | {'model': {'name': 'own'}}")
    resume = RESUME.replace("**OWN", "metrics=[doubt], client=[Half()]")
    shown = "try:\n    {}except raysim.ConfigError as error:\n    print(error)"
    cells += [play, resume, parts[2].replace("0.5", "0.25"), shown.format(resume.replace("2", "3"))]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel.execute(notebook, tmp_path)
    found = records(tmp_path / "run")
    assert {one["file"] for one in found.values()} == {None}
    assert "class Net(nn.Module)" in found["model"]["source"] and "return Net(inputs, 3)" in found["model"]["source"]
    printed = "".join(out.text for out in notebook.cells[-1].outputs if out.get("name") == "stdout")
    assert "the client method 'half' has changed since the run began" in printed
    assert "-        run.grad.mul_(0.5)" in printed and "+        run.grad.mul_(0.25)" in printed
    asked = python("-c", "import raysim; raysim.load('run').model()", folder=tmp_path)
    assert "the model 'own' was defined in a notebook" in asked.err and "code/model-own-" in asked.err


def test_what_has_no_source(tmp_path: Path) -> None:
    """Text that was executed: recorded as unknown, and said so."""
    code = f"import raysim, warnings\nexec({OBJECTS!r})\n"
    assert python("-c", code + PLAY, folder=tmp_path).end() == 0
    for one in records(tmp_path / "run").values():
        assert (one["file"], one["sha256"], one["text"]) == (None, None, None)
    went_on = python("-c", code + RESUME, folder=tmp_path)
    assert went_on.end() == 0, went_on.err
    assert "the source of the client method 'half' is not known" in went_on.err


def test_an_older_run_has_no_record(project: Path) -> None:
    assert python("train.py", "run", 2, "run", "'local'", folder=project).end() == 0
    path = project / "run/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["code"]
    path.write_text(json.dumps(manifest))
    went_on = python("train.py", "resume", 3, "run", folder=project)
    assert went_on.end() == 0 and "the source of the model 'mynet' is not known" in went_on.err
    assert "the source of" not in python("train.py", "resume", 4, "run", folder=project).err  # from now on it is


def test_an_edit_after_the_import_is_not_what_runs(project: Path) -> None:
    """The text is that which was read when the entry was registered."""
    changed = (
        "import train, pathlib; path = pathlib.Path('train.py')\npath.write_text(path.read_text().replace('0.5', '9'))"
    )
    simulate = "import raysim; raysim.run(train.SETTINGS, out='run')"
    ran = python("-c", f"import sys; sys.argv = ['', '', '1']\n{changed}\n{simulate}", folder=project)
    assert ran.end() == 0, ran.err
    assert "return 0.5" in records(project / "run")["client"]["source"]
    assert "return 9" in (project / "train.py").read_text()


def test_a_sweep_stops_as_well(project: Path) -> None:
    """Code of an installed package, which the command line knows; several runs at a time, each in a process of its own."""
    info = project / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[raysim.methods]\nslow = mine:Slow\n")
    module = "from dataclasses import dataclass\nimport raysim\n\n" + TRAIN[TRAIN.index("def factor") :]
    (project / "mine.py").write_text(module[: module.index("@raysim.metric")].replace('@raysim.method("client")\n', ""))
    (project / "own.yaml").write_text(
        yaml.safe_dump(
            {
                "data": {"name": "digits", "partition": {"iid_equal": {"clients": 4}}}, "model": {"name": "mlp"},
                "rounds": {"total": 1}, "local": {"batch_size": 64, "lr": 0.1}, "client": ["slow"], "engine": "local",
            }
        )
    )  # fmt: skip
    path = {"PYTHONPATH": os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])}

    def sweep(*more: str) -> Python:
        words = ("-m", "raysim", "sweep", "own.yaml", "--out", "out", *more)
        return python(*words, folder=project, **path)

    assert sweep("--seeds", "1,2").end() == 0
    assert records(project / "out/seed1")["client"]["file"] == "mine.py"
    edit(project / "mine.py", "0.5", "0.25")
    complete = sweep("--seeds", "1,2")
    assert complete.end() == 0, complete.err  # nothing is left to be run
    stopped = sweep("--seeds", "1,2,3,4", "--parallel", "2")
    assert stopped.end() == 2 and not (project / "out/seed3").exists()
    assert "out/seed1: the client method 'slow' (mine.py) has changed since the run began" in stopped.err
    accepted = sweep("--seeds", "1,2,3,4", "--parallel", "2", "--accept-changed-code")
    assert accepted.end() == 0, accepted.err
    assert "0.25" in records(project / "out/seed3")["client"]["source"]

    extend = ("-m", "raysim", "resume", "out/seed1", "rounds.total=2")
    stopped = python(*extend, folder=project, **path)
    assert stopped.end() == 2 and "--accept-changed-code" in stopped.err and "Traceback" not in stopped.err
    went_on = python(*extend, "--accept-changed-code", folder=project, **path)
    assert went_on.end() == 0, went_on.err
    assert "accepted: out/seed1: the client method 'slow' (mine.py) has changed" in went_on.err


def test_a_run_of_raysims_own_parts_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is read for it, and no text parsed."""
    from conftest import tiny

    def none(*_: object) -> None:
        raise AssertionError("there is no code of a user")

    own = {kind: set(REGISTRY.table(kind)) - REGISTRY.table(kind).own for kind in KINDS}
    for kind, names in own.items():
        assert not {name for name in names if REGISTRY.table(kind).definition(name)}, kind
    monkeypatch.setattr("raysim.definition._lines", none)
    run = raysim.run(tiny(client=["fedala"], server=["fedavgm"]), out=tmp_path / "run")
    assert json.loads((run.folder / "manifest.json").read_text())["code"] == []
    assert not (run.folder / "code").exists()
    raysim.resume(run, rounds__total=4)
