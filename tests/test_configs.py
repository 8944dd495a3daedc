"""Every file under configs/ is valid, and so is every cell of the papers' tables, at full and at small scale."""

import re
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from raysim.analysis import MEASURES
from raysim.config import ConfigError, load
from raysim.data import SOURCES
from raysim.report.figures import FIGURES
from raysim.sweep.grid import runs
from raysim.sweep.items import PAPERS, Item

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
OF_PAPERS = [path for path in FILES if path.parent != CONFIGS]


def label(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def without_table(path: Path) -> str:
    """The configuration alone: PyYAML takes longer over comments and table than over all else."""
    body, _, _ = re.sub(r"\A(#.*\n)*", "", path.read_text(encoding="utf-8")).partition("\ntable:\n")
    return body


def check(path: Path, copy: Path) -> None:
    """Load every cell of the table in `path`."""
    item = Item(label(path) if path.is_relative_to(CONFIGS) else path.stem, path)
    copy.write_text(without_table(path), encoding="utf-8")
    for small in (False, True):
        assert runs(copy, item.plan(small, (8,), ()).values(), copy.parent / "out")


@pytest.fixture(autouse=True)
def having_the_data(monkeypatch, tmp_path):
    """As if all data and the pretrained models were in their places."""
    for source in SOURCES.values():
        monkeypatch.setattr(source, "check", lambda self, root: None)
    for name in ("resnet20_cifar10.safetensors", "resnet20_cifar100.safetensors"):
        save_file({}, tmp_path / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_file_is_valid(path):
    load(path)


@pytest.mark.filterwarnings("ignore:pfedme")  # w overshoots θ at the learning rate that the paper has for MNIST
@pytest.mark.parametrize("path", OF_PAPERS, ids=label)
def test_every_cell_is_valid(path, tmp_path):
    check(path, tmp_path / path.name)


@pytest.mark.parametrize("path", OF_PAPERS, ids=label)
def test_the_header_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    header = re.match(r"(#.*\n)*", text).group()
    item = Item(label(path), path)
    first = next(iter(item.table.items))
    assert header.startswith(f"# {PAPERS[path.parent.name]}, {first}")
    assert f"raysim reproduce {item.name}" in re.sub(r"\s+#?\s*", " ", header)
    assert "\n# Data" in header  # where the data are to be had
    assert f"\nname: {path.parent.name}_{path.stem}\n" in text  # so that folders of runs tell tables apart


def test_commands_that_the_items_name_exist():
    text = " ".join(words for path in OF_PAPERS for words in Item(label(path), path).table.items.values())
    plotted, measured = (
        {name for names in re.findall(rf"raysim {verb} ((?:[\w:.-]+, )*[\w:.-]+)", text) for name in names.split(", ")}
        for verb in ("plot", "measure")
    )
    assert {"accuracy", "balance:gamma", "similarity"} <= plotted
    assert {name.partition(":")[0] for name in plotted} <= set(FIGURES)
    assert {"hessian", "slice"} <= measured <= set(MEASURES)


def test_there_are_files_of_every_paper():
    assert {path.parent.name for path in OF_PAPERS} == set(PAPERS)


def test_a_wrong_cell_is_found(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    table = "table: {items: {Table 1: a typo}, rows: {short: {rounds.totl: 5}}, small: {}}"
    wrong.write_text(f"{(CONFIGS / 'quickstart.yaml').read_text(encoding='utf-8')}\n{table}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="totl"):
        check(wrong, tmp_path / "copy.yaml")
