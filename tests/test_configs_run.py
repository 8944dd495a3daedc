"""Every table and figure of the papers, at every scale, ran on a handful of samples of the right shape, and drawn.

What a cell's code does hangs on its methods and switches, the shape of its data, its partition and its network, not on the
size of a number, unless that is 0. So a cell is run if its methods (with all that is recorded), or its data,
partition and network, have not been met before in any file; else the run that had those methods stands for it. Of a table
with several axes every choice comes, each with the first choices of the other axes. A slow network is replaced by a small
one, with BatchNorm; that each can be built and trained is the business of tests/models. But every cell's methods are asked
whether they fit the network that the file names, and its layers are those that a score must find.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OPTIONS, simulate
from test_configs import CONFIGS, TABLES, commands, item_of, pretrained, without_table
from torch import nn
from typer.testing import CliRunner

from raysim import machine
from raysim.analysis import MEASURES
from raysim.analysis.measure import write
from raysim.cli.app import app
from raysim.config import STACKS, Config, ConfigError, from_dict, name_in, to_dict
from raysim.core.layers import LayerMap
from raysim.data import SOURCES, Dataset
from raysim.federation.saved import SavedRun
from raysim.models import Inputs, build
from raysim.report import NoData, summary
from raysim.report.canvas import Canvas
from raysim.report.figures import FIGURES, SingleRunFigure, draw
from raysim.report.runs import Run
from raysim.sweep.grid import runs
from raysim.sweep.items import TITLES, Cell, Item
from raysim.sweep.scores import BETWEEN, Measure, key_of, scored
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
    "digits": ((1, 8, 8), 10, 0),
    "ag_news": ((20,), 4, 0),
    "sogou_news": ((20,), 5, 0),
    "amazon_review.npz": ((5000,), 2, 4),
    "cifar10_subset": ((3, 32, 32), 10, 0),
    "ag_news_subset": ((20,), 4, 0),
}
ROUNDS = 2  # of a run here, so that methods meet what they remember
PLAIN = {"simple_cnn", "lenet", "alexnet", "mlp", "fedavg_cnn", "amazon_mlp", "vit"}  # networks without BatchNorm
STEPS = 14  # epochs of what learns on the server: of FedLAW's SWA half are averaged from the seventh on

MEASURED: dict[str, dict[str, Any]] = {"hessian": {"rounds": (1, 2), "top": 5}, "simplex": {"rounds": (2,)}}


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


@cache
def crowd(name: str) -> Dataset:
    """As many samples as a split needs that nobody trains on: blank ones."""
    shape, classes, _ = SHAPES[name]
    y = np.arange(20_000) % classes
    return Dataset(name, np.zeros((len(y), *shape), np.uint8), y, len(y) // 2, tuple(map(str, range(classes))))


def named(source: Any) -> str:
    """cifar10, or the folder that a source reads."""
    return str(getattr(source, "path", "") or name_in(SOURCES, source))


def shrunk(config: Config) -> dict[str, Any]:
    """The configuration for a handful of samples and `ROUNDS`."""
    raw = to_dict(config)
    shape, _, _ = SHAPES[named(config.data.name)]
    raw["rounds"] |= {"total": ROUNDS, "evaluate_every": 1, "checkpoint_every": 100}
    raw["local"] |= {"epochs": 1, "batch_size": 64}
    raw["engine"] = {"local": {"device": "cpu"}}
    raw["data"] |= {"allow_empty_clients": True, "root": None}
    raw["data"]["client_val_frac"] = min(0.2, raw["data"]["client_val_frac"])
    raw["data"]["proxy"] |= {"samples": min(20, raw["data"]["proxy"]["samples"])}
    raw["model"] |= {"init": None}
    if raw["model"]["name"] in PLAIN:
        raw["model"] |= {"name": "mlp", "options": {"hidden": [16, 16]}}
    elif len(shape) == 3:
        raw["model"] |= {"name": "tiny_bn_cnn", "options": {}}
    raw["record"] |= {"traces": [1, 2] if raw["record"]["traces"] else []}
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
    """`value` with the signs of its numbers: what they leave is what a run does, and 0 often turns something off."""
    if isinstance(value, dict):
        return {key: alike(one) for key, one in value.items()}
    if isinstance(value, list):
        return [alike(one) for one in value]
    return int(np.sign(value)) if isinstance(value, int | float) and not isinstance(value, bool) else value


def chosen(item: Item, scale: str) -> dict[Cell, Sequence[Any]]:
    """Cells in which every choice and every special setting comes at least once."""
    columns, rows = item.axes(scale)
    first = {next(iter(axis)) for axis in (*columns, *rows)}
    special = [set(cells.of) for cells in (*item.table.cells, *item.table.scales[scale].cells)]
    found = {}
    for cell, choices in item.plan(scale, (8,), ()).items():
        names = {*cell.row, *cell.column}
        met = [of for of in special if of <= names]
        if len(names - first) < 2 or met:
            found[cell] = choices
            special = [of for of in special if of not in met]
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the runs so far, by their methods and by their materials."""
    return {}


@pytest.fixture(autouse=True)
def having_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for source in SOURCES.values():
        monkeypatch.setattr(source, "check", lambda self, root: None)
        monkeypatch.setattr(source, "files", lambda self, root: ())
        monkeypatch.setattr(source, "load", lambda self, root: handful(named(self)))
    monkeypatch.chdir(tmp_path)
    pretrained()


def run_of(config: Config, ran: dict[str, Path], folder: Path) -> Path:
    """Where a run that does the same as this configuration has been run."""
    raw = alike(changed := shrunk(config))
    held = SHAPES[named(config.data.name)]
    raw["name"] = ""
    data, model = raw.pop("data"), raw.pop("model")
    materials = json.dumps([held, data["partition"], data["client_test_frac"], model["name"]], sort_keys=True)
    everyone = config.rounds.participation == 1
    methods = json.dumps([raw, everyone, data["proxy"], model["bn_stats"], len(held[0])], sort_keys=True)
    if methods not in ran or materials not in ran:
        if (materials in ran or raw["record"]["traces"]) and len(held[0]) == 3 and not held[2]:
            changed["data"]["name"] = "mnist"  # the quickest images, for the measures of traced runs above all
        simulate(read(changed, config.clients), folder)
        ran[materials] = ran[methods] = folder
    return ran[methods]


@cache
def network(model: str, options: str, inputs: Inputs, *layers: Any) -> tuple[nn.Module, LayerMap]:
    """A model without its numbers, and its layers."""
    with torch.device("meta"):
        built = build(model, inputs, **json.loads(options))
    return built, LayerMap.of(built, *layers)


def network_of(config: Config) -> tuple[nn.Module, LayerMap]:
    """The model that the configuration names, which a run here may not have."""
    model, data = to_dict(config)["model"], handful(named(config.data.name))
    inputs = Inputs(data.sample_shape, data.outputs, data.vocab)
    return network(model["name"], json.dumps(model["options"]), inputs, model["layer_by"], tuple(model["blocks"]))


def score(measure: Measure, config: Config, run: Run, rival: Run | None) -> float | None:
    """What the run of a cell came to: None where it has nothing, and where the configuration's own run could not have it.

    A score that asks for more than two rounds gets what they have: of a window the rounds up to the last one, and in place
    of bytes that are never sent those that were.
    """
    name, argument, options = key_of(measure)
    total, possible = config.rounds.total, True
    match name:
        case "note":
            first, last = options.get("rounds", (1, 1))
            layers = network_of(config)[1].names if "layers" in options else ()
            possible = first <= total and (not layers or any(re.search(options["layers"], layer) for layer in layers))
            short = {"rounds": (min(first, ROUNDS), min(last, ROUNDS)), "layers": ".", "client": 0}
            options = {option: short[option] for option in options}
        case "gap" | "best over" | "final over":  # with itself every run has one
            possible, argument = rival is not None and rival is not run, (rival,)
        case "accuracy after":
            tested = {total, *range(0, total, config.rounds.evaluate_every)}
            possible, argument = argument[0] in tested, (ROUNDS,)
        case "converged":
            possible, argument = argument[0] < total, (0,)
        case "error at MB":
            models = total * config.rounds.cohort_size(config.clients or 0)
            possible = argument[0] <= 4e-6 * network_of(config)[1].P * models
            argument = (summary.total(run, "MB up"),)
        case "MB to error" | "simulated s to error":  # a handful of samples teaches nothing
            argument = (100,)
    by = summary.judged_by([one for one in (run, rival) if one is not None])
    return scored(run, by, name, *argument, **options) if possible else None


def has(measure: Measure, cell: Cell, item: Item, scale: str, runs: Mapping[Cell, Run], config: Config) -> bool:
    """Whether a cell has a number."""
    name, argument, _ = key_of(measure)
    rival = runs.get(item.beside(cell, argument[0], scale)) if name in BETWEEN else None
    found = score(measure, config, runs[cell], rival)
    return found is not None and np.isfinite(found)


def misfits(config: Config) -> list[str]:
    """What the methods have against the network that the file names."""
    model, layers = network_of(config)
    classes = SHAPES[named(config.data.name)][1]
    return [fault for stack in STACKS for one in getattr(config, stack) if (fault := one.fits(model, layers, classes))]


def drawn(item: Item, runs: Sequence[Run]) -> None:
    """Draw all that the file names: what nobody has the data for fails."""
    for command in commands(item):
        match command:
            case ["measure", name, *_]:
                write(name, MEASURES[name](**OPTIONS[name] | MEASURED.get(name, {})), SavedRun(runs[-1].folder))
                runs = [Run(run.folder) for run in runs]
            case ["plot", name, *_]:
                if isinstance(FIGURES[name.partition(":")[0]], SingleRunFigure):
                    assert any(shows(name, run) for run in reversed(runs)), f"no run has the data for {name}"
                else:
                    draw(name, runs)
            case ["data", "show", *_]:
                with pytest.MonkeyPatch.context() as patch:
                    for source in SOURCES.values():
                        patch.setattr(source, "load", lambda self, root: crowd(named(self)))
                    patch.setattr(Canvas, "save", lambda self, path: None)  # takes most of the time, as of every figure
                    done = CliRunner().invoke(app, command)
                assert done.exit_code == 0 and "\nThe chart" in done.output, done.output


def shows(name: str, run: Run) -> bool:
    """Whether a figure of one run can be drawn: a base method has nothing to show of what it does not do."""
    try:
        draw(name, [run])
    except NoData:
        return False
    return True


def check(item: Item, ran: dict[str, Path], folder: Path) -> None:
    """Run the cells of every scale. Each heading must have a number, and whatever the file names must be drawn."""
    folder.mkdir()
    copy = folder / item.path.name
    copy.write_text(without_table(item.path), encoding="utf-8")
    opened: dict[Path, Run] = {}
    for scale in item.table.scales:
        cells = chosen(item, scale)
        found = dict(zip(cells, runs(copy, cells.values(), folder / "runs" / scale), strict=True))
        assert not [fault for point in found.values() for fault in misfits(point.config)]
        points = {cell: replace(point, folder=run_of(point.config, ran, point.folder)) for cell, point in found.items()}
        opened |= {point.folder: Run(point.folder) for point in points.values() if point.folder not in opened}
        assert "| " in table_text(item, points, scale, ())
        ran_as = {cell: opened[point.folder] for cell, point in points.items()}
        for heading, measure in item.table.headings(scale).items():
            numbers = (has(measure, cell, item, scale, ran_as, point.config) for cell, point in points.items())
            assert any(numbers), f"{scale}: no cell has {heading!r}"
    drawn(item, list(opened.values()))


@pytest.mark.filterwarnings("ignore:pfedme", "error:.*model.bn_stats")
@pytest.mark.parametrize("paper", TITLES)
def test_cells_run_and_what_the_file_names_is_drawn(
    paper: str, ran: dict[str, Path], tmp_path: Path, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "computes_bf16", lambda: True)  # a CPU without the instructions is only slower
    for path in (path for path in TABLES if path.parent.name == paper):
        with subtests.test(path.stem):
            check(item_of(path), ran, tmp_path / path.stem)


def test_what_is_wrong_is_found(ran: dict[str, Path], tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Though the configuration is valid."""
    for name, right, wrong, fault in (
        ("fedlaw/figure7", "instruments: [heterogeneity]", "instruments: []", "no cell has 'last overlap of classes'"),
        ("fedlws/table12", "layers: attention", "layers: atention", "full: no cell has 'attention'"),
        ("fedlws/table12", "rounds: [1, 10]", "rounds: [11, 20]", "small: no cell has 'all layers'"),
        ("fedlws/figure1b", "decrement: 0.01", "decrement: 0.3", "gamma of the last of 5 layers would be -0.2"),
    ):
        with subtests.test(wrong):
            text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
            assert right in text
            broken = tmp_path / "broken.yaml"
            broken.write_text(text.replace(right, wrong), encoding="utf-8")
            with pytest.raises(AssertionError, match=re.escape(fault)):
                check(Item(name, broken), ran, tmp_path / fault)
