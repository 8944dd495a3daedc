"""Every table and figure of the papers, played on a handful of samples of the right shape, and drawn.

What a cell's code does hangs on its methods and switches, the shape of its data, its partition and its network, not on the
size of a number. So a cell is played if its methods (with all that is recorded), or its data, partition and network, have
not been met before in any file; else the run that had those methods stands for it. Of a table with several axes every choice
comes, each with the first choices of the other axes. A slow network is replaced by a small one, with BatchNorm; that each
can be built and trained is the business of tests/models.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OPTIONS, play
from safetensors.numpy import save_file
from test_configs import OF_PAPERS, label, without_table

from raysim.analysis import MEASURES
from raysim.analysis.measure import write
from raysim.config import Config, ConfigError, from_dict, name_in, to_dict
from raysim.data import SOURCES, Dataset
from raysim.federation.saved import SavedRun
from raysim.report import NoData
from raysim.report.figures import FIGURES, Portrait, draw
from raysim.report.runs import Run
from raysim.sweep.grid import runs
from raysim.sweep.items import Cell, Item
from raysim.sweep.text import table_text

SHAPES = {  # of a sample, classes, and natural clients
    "mnist": ((1, 28, 28), 10, 0),
    "fashion_mnist": ((1, 28, 28), 10, 0),
    "cifar10": ((3, 32, 32), 10, 0),
    "cifar100": ((3, 32, 32), 100, 0),
    "tiny-imagenet-200": ((3, 32, 32), 200, 0),  # at half its size: its networks are replaced, and classes are many
    "cinic-10": ((3, 32, 32), 10, 0),
    "femnist": ((1, 28, 28), 62, 20),
    "mnist_dir0.1": ((1, 28, 28), 10, 20),
    "ag_news": ((20,), 4, 0),
    "sogou_news": ((20,), 5, 0),
    "amazon_review.npz": ((5000,), 2, 4),
}
PLAIN = {"simple_cnn", "lenet", "alexnet", "mlp", "fedavg_cnn", "amazon_mlp", "vit"}  # networks without BatchNorm
STEPS = 14  # epochs of what learns on the server: of FedLAW's SWA half are averaged from the seventh on

MEASURED: dict[str, dict[str, Any]] = {"hessian": {"rounds": (1,), "top": 5}, "simplex": {"rounds": (1,)}}


@cache
def handful(name: str) -> Dataset:
    """A sample or more of each class to train on, and as many to test."""
    shape, classes, clients = SHAPES[name]
    n, draw = 160 if classes < 80 else 400, np.random.RandomState(0)
    y = np.arange(n) % classes
    kind: dict[str, Any] = {"scale": 255.0}
    if len(shape) == 3:
        x = draw.randint(0, 256, (n, *shape)).astype(np.uint8)
    elif shape == (20,):
        x, kind = draw.randint(0, 50, (n, *shape)).astype(np.int32), {"vocab": 50}
    else:
        x = draw.rand(n, *shape).astype(np.float32)
    natural = draw.permutation(n) % clients if clients else None
    return Dataset(name, x, y, n // 2, tuple(map(str, range(classes))), natural, **kind)


def named(source: Any) -> str:
    """cifar10, or the folder that a source reads."""
    return str(getattr(source, "path", "") or name_in(SOURCES, source))


def shrunk(config: Config) -> dict[str, Any]:
    """The configuration for a handful of samples: two rounds, so that methods meet what they remember."""
    raw = to_dict(config)
    shape, _, _ = SHAPES[named(config.data.name)]
    raw["rounds"] |= {"total": 2, "evaluate_every": 2, "checkpoint_every": 100}
    raw["local"] |= {"epochs": 1, "batch_size": 64}
    raw["engine"] = {"local": {"device": "cpu"}}
    raw["data"] |= {"allow_empty_clients": True, "root": None}
    raw["data"]["proxy"] |= {"samples": min(20, raw["data"]["proxy"]["samples"])}
    raw["model"] |= {"init": None}
    if raw["model"]["name"] in PLAIN:
        raw["model"] |= {"name": "mlp", "options": {"hidden": [16, 16]}}
    elif len(shape) == 3:
        raw["model"] |= {"name": "tiny_bn_cnn", "options": {}}
    raw["record"] |= {"trace": [0, 1] if raw["record"]["trace"] else []}
    for entry in itertools.chain(raw["client"], raw["weighting"], raw["server"]):
        ((_, options),) = entry.items()
        limits = {"epochs": STEPS, "ft_epochs": 2, "start_round": 1, "stop_round": 1}
        options |= {name: min(most, options[name]) for name, most in limits.items() if options.get(name)}
        options |= {"threshold": 10.0} if "threshold" in options else {}  # ALA's first optimisation is soon at its end
    ((scheme, options),) = raw["data"]["partition"].items()
    options |= {name: min(2, options[name]) for name in ("least", "min_size") if options.get(name)}
    if scheme == "natural":
        return raw
    clients = 10 if scheme == "pathological" else 6
    raw["data"]["partition"] = {scheme: options | {"clients": clients}}
    return raw


def read(raw: dict[str, Any], clients: int | None) -> Config:
    """The configuration, with as many clients as before where a method or an instrument names more than the few."""
    try:
        return from_dict(raw)
    except ConfigError:
        ((_, options),) = raw["data"]["partition"].items()
        options["clients"] = clients
        return from_dict(raw)


def alike(value: Any) -> Any:
    """`value` without its numbers: what they leave is what a run does."""
    if isinstance(value, dict):
        return {key: alike(one) for key, one in value.items()}
    if isinstance(value, list):
        return [alike(one) for one in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def chosen(item: Item) -> list[tuple[Cell, Sequence[Any]]]:
    """Cells in which every choice and every special setting comes at least once."""
    columns, rows = item.table.axes()
    first = {next(iter(axis)) for axis in (*columns, *rows)}
    special = [set(cells.of) for cells in item.table.cells]
    found = []
    for cell, choices in item.plan("full", (8,), ()).items():
        names = {*cell.row, *cell.column}
        met = [of for of in special if of <= names]
        if len(names - first) < 2 or met:
            found.append((cell, choices))
            special = [of for of in special if of not in met]
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the runs so far, by their methods and by their materials."""
    return {}


@pytest.fixture(autouse=True)
def having_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for source in SOURCES.values():
        monkeypatch.setattr(source, "check", lambda self, root: None)
        monkeypatch.setattr(source, "load", lambda self, root: handful(named(self)))
    for name in ("resnet20_cifar10.safetensors", "resnet20_cifar100.safetensors"):
        save_file({}, tmp_path / name)
    monkeypatch.chdir(tmp_path)


def run_of(config: Config, played: dict[str, Path], folder: Path) -> Path:
    """Where a run that does the same as this configuration has been played."""
    raw = alike(changed := shrunk(config))
    held = SHAPES[named(config.data.name)]
    raw["name"] = ""
    data, model = raw.pop("data"), raw.pop("model")
    materials = json.dumps([held, data["partition"], data["client_test_frac"], model["name"]], sort_keys=True)
    methods = json.dumps([raw, data["proxy"], model["bn_stats"], len(held[0])], sort_keys=True)
    if methods not in played or materials not in played:
        if (materials in played or raw["record"]["trace"]) and len(held[0]) == 3 and not held[2]:
            changed["data"]["name"] = "mnist"  # the quickest images, for the measures of traced runs above all
        play(read(changed, config.clients), folder)
        played[materials] = played[methods] = folder
    return played[methods]


def drawn(item: Item, folders: Sequence[Path]) -> None:
    """Draw all that the file names: what nobody has the data for fails."""
    words = " ".join(item.table.items.values())

    def named_after(verb: str) -> list[str]:
        lists = re.findall(rf"raysim {verb} ((?:[\w:.-]+, )*[\w:.-]+)", words)
        return [name for names in lists for name in names.split(", ")]

    measures = named_after("measure")
    for name in measures:
        write(name, MEASURES[name](**OPTIONS[name] | MEASURED.get(name, {})), SavedRun(folders[-1]))
    runs = [Run(folder) for folder in folders]
    for name in named_after("plot") + measures:
        if isinstance(FIGURES[name.partition(":")[0]], Portrait):
            assert any(shows(name, run) for run in reversed(runs)), f"no run has the data for {name}"
        else:
            draw(name, runs)


def shows(name: str, run: Run) -> bool:
    """Whether a figure of one run can be drawn: a base method has nothing to show of what it does not do."""
    try:
        draw(name, [run])
    except NoData:
        return False
    return True


@pytest.mark.filterwarnings("ignore:pfedme", "error:.*model.bn_stats")
@pytest.mark.parametrize("path", OF_PAPERS, ids=label)
def test_cells_play_and_what_the_file_names_is_drawn(path: Path, played: dict[str, Path], tmp_path: Path) -> None:
    item = Item(label(path), path)
    copy = tmp_path / path.name
    copy.write_text(without_table(path), encoding="utf-8")
    cells = chosen(item)
    found = runs(copy, [choices for _, choices in cells], tmp_path / "runs")
    points = {
        cell: replace(point, folder=run_of(point.config, played, point.folder))
        for (cell, _), point in zip(cells, found, strict=True)
    }
    folders = list(dict.fromkeys(point.folder for point in points.values()))
    for scale in item.table.scales:
        assert "| " in table_text(item, points, scale, ())
    drawn(item, folders)
