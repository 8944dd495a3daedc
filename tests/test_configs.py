"""Every file under configs/ is valid, and so is every cell of the papers' tables, at full and at small scale."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import save_file
from typer.main import get_command

from raysim.analysis import MEASURES
from raysim.cli.app import app
from raysim.config import ConfigError, load, read_entry
from raysim.config.shipped import find
from raysim.data import SOURCES
from raysim.registry import Catalogue
from raysim.report.figures import FIGURES, SingleRunFigure
from raysim.sweep.grid import runs
from raysim.sweep.items import TITLES, Item
from raysim.sweep.table import Scale, Table

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "cluster")
TABLES = [path for path in FILES if path.parent != CONFIGS]


def label(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def without_table(path: Path) -> str:
    """The configuration alone: PyYAML takes longer over comments and table than over all else."""
    body, _, _ = re.sub(r"\A(#.*\n)*", "", path.read_text(encoding="utf-8")).partition("\ntable:\n")
    return body


@cache
def item_of(path: Path) -> Item:
    """The table in a file, which is read once for all tests."""
    return Item(label(path), path)


def check(item: Item, folder: Path) -> None:
    """Load every cell of a table."""
    copy = folder / f"copy-{item.path.name}"
    copy.write_text(without_table(item.path), encoding="utf-8")
    for scale in item.table.scales:
        assert runs(copy, item.plan(scale, (8,), ()).values(), folder / "out")


@pytest.fixture(autouse=True)
def having_the_data(monkeypatch, tmp_path):
    """As if all data and the pretrained models were in their places."""
    for source in SOURCES.values():
        monkeypatch.setattr(source, "check", lambda self, root: None)
    monkeypatch.chdir(tmp_path)
    pretrained()


def pretrained() -> None:
    """The models that table 9 of FedLWS starts from."""
    for name in ("resnet20_cifar10", "resnet20_cifar100", "runs/resnet8/model"):
        path = Path(f"{name}.safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({}, path)


def test_every_file_is_valid(subtests):
    for path in FILES:
        with subtests.test(label(path)):
            load(path)


@pytest.mark.filterwarnings("ignore:pfedme")  # w overshoots θ at the learning rate that the paper has for MNIST
@pytest.mark.parametrize("paper", TITLES)
def test_every_cell_is_valid(paper, tmp_path, subtests):
    for path in (path for path in TABLES if path.parent.name == paper):
        with subtests.test(path.stem):
            check(item_of(path), tmp_path)


def test_headers_say_what_the_file_is(subtests):
    for path in TABLES:
        with subtests.test(label(path)):
            text = path.read_text(encoding="utf-8")
            header = re.match(r"(#.*\n)*", text).group()
            item = item_of(path)
            first = next(iter(item.table.items))
            assert header.startswith(f"# {TITLES[path.parent.name]}, {first}")
            assert f"raysim reproduce {item.name}" in re.sub(r"\s+#?\s*", " ", header)
            assert "\n# Data" in header  # where the data are to be had
            assert f"\nname: {path.parent.name}_{path.stem}\n" in text  # so that folders of runs tell tables apart


def commands(item: Item) -> Iterator[list[str]]:
    """The commands that an item's texts name in brackets, without `raysim`. Of `(raysim plot a RUN --out FIG; also b, c)` they
    are three: what follows `also` takes the place of the name, or is one more setting of `data show`."""
    for bracket in re.findall(r"\(([^()]*raysim [^()]*)\)", " ".join(item.table.items.values())):
        last: list[str] = []
        for part in bracket.split("; "):
            _, found, command = part.partition("raysim ")
            if found:
                yield (last := shlex.split(command))
            elif part.startswith("also "):
                for other in part.removeprefix("also ").split(", "):
                    yield [*last, other] if last[0] == "data" else [last[0], other, *last[2:]]


program = cache(partial(get_command, app))


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """The parameters of a command; a fault of usage is raised."""
    command: Any = program()
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    return command.make_context("raysim", [*words]).params


def test_commands_that_the_items_name_work_as_they_are_typed(subtests):
    """In any folder; what they show is for test_configs_run."""
    for item in map(item_of, TABLES):
        with subtests.test(item.name):
            outside = re.sub(r"\([^()]*\)", "", " ".join(item.table.items.values()))
            assert "raysim " not in outside and "configs/" not in outside, "commands stand in brackets"
            for command in commands(item):
                check_command(item, command)


def check_command(item: Item, command: Sequence[str]) -> None:
    given = parsed(command)
    match command[0]:
        case "plot":
            figure = FIGURES[given["name"].partition(":")[0]]
            several = given["runs"] != [Path("RUN")]
            assert not (isinstance(figure, SingleRunFigure) and several), f"{given['name']} shows one run"
            assert str(given["out"]) == "FIG"
        case "measure":
            read_entry(Catalogue("measure", MEASURES), given["name"], given["overrides"] or ())
        case "data":
            load(find(given["config"]), given["changes"])
            assert given["config"] == item.name
        case other:
            raise AssertionError(f"raysim {other}: has no case here")


def test_commands_after_also_have_the_others_place():
    words = "curves (all: raysim plot a RUN... --out FIG; also b, c:d) of (raysim data show x y=1; also z='{v: 1}')"
    named = Item("x", Path())
    vars(named)["table"] = Table(items={"Figure 1": words}, small=Scale())
    assert [" ".join(command) for command in commands(named)] == [
        *(f"plot {name} RUN... --out FIG" for name in ("a", "b", "c:d")), "data show x y=1", "data show x y=1 z='{v: 1}'",
    ]  # fmt: skip


def test_every_folder_has_a_title():
    assert {path.parent.name for path in TABLES} == set(TITLES)


def test_a_wrong_cell_is_found(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    table = "table: {items: {Table 1: a typo}, rows: {short: {rounds.totl: 5}}, small: {}}"
    wrong.write_text(f"{(CONFIGS / 'quickstart.yaml').read_text(encoding='utf-8')}\n{table}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="totl"):
        check(Item("wrong", wrong), tmp_path)


def test_files_for_clusters_are_what_their_readers_take():
    """Ray's launcher checks its own by a schema; Kubernetes' and Slurm's are checked as far as that is possible without
    them."""
    import jsonschema  # Ray's own requirement

    schema = Path(find_spec("ray.autoscaler").origin).with_name("ray-schema.json")
    jsonschema.validate(yaml.safe_load((CONFIGS / "cluster/launcher.yaml").read_text()), json.loads(schema.read_text()))
    subprocess.run(["bash", "-n", CONFIGS / "cluster/slurm.sh"], check=True)
    job = yaml.safe_load((CONFIGS / "cluster/kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert container["resources"]["limits"] == container["resources"]["requests"]  # or they are killed first
    mounted = [mount["mountPath"] for mount in pods[0]["containers"][0]["volumeMounts"]]
    paths = [word for word in job["spec"]["entrypoint"].split() if word.startswith("/")]
    assert all(any(path.startswith(place) for place in mounted) for path in paths)
