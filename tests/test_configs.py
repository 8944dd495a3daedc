"""Every file under configs/ is valid, and so is every cell of a paper's table that its header says how to reach."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysim.config import ConfigError, load
from raysim.data import SOURCES

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
OF_PAPERS = [path for path in FILES if path.parent != CONFIGS]


def label(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def split(text: str) -> tuple[str, str]:
    """The comment at the top, and the rest."""
    end = re.match(r"(#.*\n)*", text).end()
    return text[:end], text[end:]


def listed(header: str) -> list[list[list[str]]]:
    """Lists of consecutive lines with `--set`, each line as its overrides."""
    lists: list[list[list[str]]] = [[]]
    for line in header.splitlines():
        _, flag, overrides = line.partition("--set")
        if flag:
            words = shlex.split(flag + overrides)
            assert set(words[::2]) == {"--set"}, line
            lists[-1].append(words[1::2])
        else:
            lists.append([])
    return [lines for lines in lists if lines]


def cells(lists: list[list[list[str]]]) -> Iterator[list[str]]:
    """The overrides of the file as it is, of every line by itself, and of a line of each list until all were taken."""
    yield []
    for lines in lists:
        yield from lines
    for i in range(max(map(len, lists), default=0) if len(lists) > 1 else 0):
        yield [override for lines in lists for override in lines[i % len(lines)]]


def check(path: Path, copy: Path) -> None:
    header, body = split(path.read_text(encoding="utf-8"))
    copy.write_text(body, encoding="utf-8")  # PyYAML takes longer over the comment than over all else
    for overrides in cells(listed(header)):
        load(copy, overrides)


@pytest.fixture(autouse=True)
def having_the_data(monkeypatch, tmp_path):
    """As if all data and the pretrained models were in their places."""
    for source in SOURCES.values():
        monkeypatch.setattr(source, "check", lambda self, root: None)
    for name in ("resnet20_cifar10.safetensors", "resnet20_cifar100.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore:pfedme")  # w overshoots θ at the learning rate that the paper has for MNIST
@pytest.mark.parametrize("path", FILES, ids=label)
def test_the_file_and_its_cells_are_valid(path, tmp_path):
    check(path, tmp_path / path.name)


@pytest.mark.parametrize("path", OF_PAPERS, ids=label)
def test_the_header_says_what_it_is(path):
    header, body = split(path.read_text(encoding="utf-8"))
    assert re.search(r"\b(Table|Figure|Theorem) [\dIVX]+", header.splitlines()[0])
    assert "he paper" in header  # what it reports
    assert "\n# Data" in header  # where the data are to be had
    assert f"\nname: {path.parent.name}_{path.stem}\n" in body  # so that folders of runs tell tables apart


def test_there_are_files_of_every_paper():
    assert {path.parent.name for path in OF_PAPERS} == {"ccn", "fedala", "fedlaw", "fedldf", "fedlws"}


def test_a_wrong_override_is_found(tmp_path):
    _, body = split((CONFIGS / "quickstart.yaml").read_text(encoding="utf-8"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(f"# Table 1\n#   typo:  --set seed=1 --set rounds.totl=5\n{body}", encoding="utf-8")
    with pytest.raises(ConfigError, match="totl"):
        check(wrong, tmp_path / "copy.yaml")
