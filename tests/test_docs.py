"""What README.md and the pages of docs/ show works as it stands there.

Python is executed, page by page. Commands go through the command line's own parser, and the configurations that they name
through raysim's reader; then they are carried out, runs for a round in this process. YAML is read over a small
configuration. Names of runs, such as `runs/a`, need not exist.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
import typer
import yaml
from conftest import simulate, tiny
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from torch import nn
from typer.testing import CliRunner

import raysim
from raysim.cli.app import app
from raysim.config import STACKS, from_dict, name_in, to_dict, to_yaml
from raysim.config.shipped import find
from raysim.data.sources.csv import Csv
from raysim.methods import CLIENTS
from raysim.registry import KINDS, REGISTRY
from raysim.sweep.grid import grid
from raysim.sweep.items import PAPERS
from raysim.sweep.items import find as find_item

ROOT = Path(__file__).parents[1]
TESTED_FURTHER = {"README.md", "tutorial.md", "model.md", "paper.md"}  # in tests of their own
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_words_that_raysim_no_longer_uses() -> None:
    """A run runs, a message reports, a package is no room. Old public names, read for one release, are in backticks or here."""
    words = re.compile(
        r"\b(play(s|ed|ing)?|told|tells|befell|rooms|whoever|nobody|somebody|anew|afresh)\b", re.IGNORECASE
    )
    old = {
        "raysim/__init__.py": {"played"},
        "raysim/report/folder.py": {"played"},
        "raysim/report/measured.py": {"played"},
    }
    pages = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")), *(ROOT / "docs").rglob("*.ipynb")]
    texts = {page: re.sub("`[^`]*`", "", page.read_text("utf-8")) for page in pages}
    texts |= {file: file.read_text("utf-8") for file in (ROOT / "raysim").rglob("*.py")}
    found = {named(file): {match[0].lower() for match in words.finditer(text)} for file, text in texts.items()}
    assert not {file: said for file, words in found.items() if (said := words - old.get(file, set()))}


def of(language: str) -> dict[str, Path]:
    return {named(page): page for page in PAGES if blocks(page, language)}


@contextmanager
def apart(folder: Path) -> Iterator[None]:
    """In a folder of its own; what is registered meanwhile is forgotten."""
    folder.mkdir(parents=True, exist_ok=True)
    before = {kind: set(REGISTRY.table(kind)) for kind in KINDS}
    try:
        with chdir(folder):
            yield
    finally:
        for kind, names in before.items():
            for added in set(REGISTRY.table(kind)) - names:
                del REGISTRY.table(kind)[added]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    with apart(tmp_path):
        yield


def test_python_runs(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name, page in of("python").items():
        if page.name not in TESTED_FURTHER:
            with subtests.test(page=name), apart(tmp_path / name):
                executed(page)


def executed(page: Path, end: int | None = None) -> dict[str, Any]:
    """What the page's code, the blocks `[:end]`, leaves, with a small configuration under the quickstart's name, which
    a file of that path takes."""
    rounds = {"total": 12, "participation": 0.4, "evaluate_every": 1}
    Path("quickstart").write_text(to_yaml(tiny(rounds=rounds)))
    code = "\n".join(blocks(page, "python")[:end]).replace('"runs/quickstart-..."', "run.folder")
    scope: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    exec(compile(code, str(page), "exec", dont_inherit=True), scope)
    return scope


@pytest.mark.usefixtures("alone")
def test_what_the_readme_shows_is_what_happens() -> None:
    scope = executed(ROOT / "README.md")
    assert scope["run"].rounds == 20
    assert raysim.load(scope["simulation"].folder).result["rounds"] == 100


@pytest.mark.usefixtures("alone")
def test_own_parts_are_used_by_their_names() -> None:
    run = executed(ROOT / "docs/howto/model.md")["run"]
    assert run.model().fc.in_features == 8
    assert 0 < run["rounds"]["metric.confidence"][-1].as_py() < 1


@pytest.mark.usefixtures("alone")
def test_a_newcomer_gets_a_figure_and_a_table() -> None:
    page = ROOT / "docs/howto/paper.md"
    executed(page)
    said = ""
    for words in commands(page):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        said += done.output
    assert "fedprox" in said
    assert re.search(r"paired t test over 3 seeds, p [=<] [\d.]+\)\.", said)
    assert r"\begin{tabular}" in said and r"\textbf{" in said and r"\underline{" in said
    width = re.search(rb"/MediaBox \[ 0 0 ([\d.]+) ", Path("accuracy.pdf").read_bytes())
    assert width and float(width[1]) / 72 == pytest.approx(3.4)
    assert Path("report.html").stat().st_size < 2_000_000


def test_a_newcomer_brings_model_table_and_metric(
    tmp_path: Path, cluster: Any, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tutorial's script, as it stands, in a folder that holds nothing else; on both engines to the same bits."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    page = ROOT / "docs/tutorial.md"
    table, script = blocks(page, "python")[-2:]
    with subtests.test("before it"), apart(tmp_path / "before"):
        executed(page, -2)
    assert len([line for line in script.splitlines() if line.strip()]) <= 25
    assert script.count('"rounds": {"total": 20}') == 1
    check = "from numpy import savez\nsavez('found', **net.state_dict())\nprint(run.folder)\n"
    hashes = set()
    for name, engine in {"local": "local", "ray": {"ray": {"clients_per_actor": 12}}}.items():
        with subtests.test(engine=name):
            folder = tmp_path / name
            folder.mkdir()
            chosen = script.replace('"rounds": {"total": 20}', f'"rounds": {{"total": 4}}, "engine": {engine!r}')
            (folder / "script.py").write_text(table + chosen + check, encoding="utf-8")
            ended = subprocess.run(
                [sys.executable, "script.py"], cwd=folder, text=True, capture_output=True, check=False
            )
            assert not ended.returncode, ended.stderr
            run = raysim.load(folder / ended.stdout.splitlines()[-1])
            hashes.add(run.result["sha256"])
            saved = load_file(run.folder / "model.safetensors")
            with np.load(folder / "found.npz") as found:
                assert {*found} == {*saved}  # what the plain class has loaded
                assert all(np.array_equal(saved[name], found[name]) for name in saved)
            data = Csv("steps.csv", test_frac=0.2).load(folder)
            net = Reader()
            net.load_state_dict(saved)
            tested = run["partition"].filter(pc.field("split") == "server_test")["sample"].to_numpy()
            x, y = (torch.from_numpy(part[tested]) for part in (data.x, data.y))
            expected = f1_score(y, net(x).argmax(1), average="macro", labels=[0, 1, 2])
            assert run["rounds"]["metric.f1"][-1].as_py() == pytest.approx(expected)
            assert 0 < run["rounds"]["metric.personal_f1"][-1].as_py() < 1
            assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert len(hashes) == 1


class Reader(nn.Module):
    """The tutorial's network, written once more."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.lstm(x[..., None])[1][0][0])
        return logits


@pytest.mark.usefixtures("alone")
def test_the_example_method_is_short_and_trains(tmp_path: Path) -> None:
    [example] = [block for block in blocks(ROOT / "docs/howto/method.md", "python") if "SignSGD" in block]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    before = set(CLIENTS)
    exec(compile(example, "method.md", "exec", dont_inherit=True), {"__name__": "page"})
    [name] = set(CLIENTS) - before
    assert name_in({}, CLIENTS[name]()) == name  # in an actor, whose catalogue lacks it
    changed, plain = simulate(tiny(client=[name]), tmp_path / "own"), simulate(tiny(), tmp_path / "plain")
    assert changed.sha256() != plain.sha256()


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "--" in words:  # what `ray job submit` is to run
                words = words[words.index("--") + 1 :]
            if words[:1] == ["raysim"]:
                yield words[1:]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and its parameters; a fault of usage is raised."""
    command: Any = COMMANDS
    name = "raysim"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        found = command.commands.get(words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, name, words = found, f"{name} {words[0]}", words[1:]
    return name, command.make_context(name, list(words), help_option_names=["-h", "--help"]).params


def test_commands_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    monkeypatch.chdir(ROOT)
    for page, words in [(page, words) for page, path in of("bash").items() for words in commands(path)]:
        with subtests.test(page=page, command=words):
            name, given = parsed(words)
            changes = [*(given.get("overrides") or ()), *(given.get("changes") or ())]
            config = given.get("config")
            if config and "federation.yaml" in config:  # what `raysim init` writes
                config = ROOT / "raysim/cli/templates/federation.yaml"
            if name in ("raysim run", "raysim sweep", "raysim data show"):
                grid(find(config), changes, [0], tmp_path / "out")
            if name == "raysim reproduce" and given["item"]:
                find_item(given["item"])


SHORT = {  # so that a command takes a second
    "raysim run": ["rounds.total=1", "engine=local", "record.traces=[]"],
    "raysim sweep": ["rounds.total=1", "engine=local"],
    "raysim resume": ["rounds.total=5"],
    "raysim measure hessian": ["--set=samples=32"],
    "raysim measure simplex": ["--set=samples=32"],
}
ELSEWHERE = {
    "raysim watch": "tests/test_runs.py",
    "raysim reproduce": "tests/test_reproduce.py",
    "raysim up": "tests/engine/test_up.py",
    "raysim down": "tests/engine/test_up.py",
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name) for name, page in of("bash").items() if page.name != "paper.md"]
)
def test_commands_run(page: Path, tmp_path: Path, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, runs for a round in this process. What the page itself has not ran is a small run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("raysim.report.page.DETAILED", 0)  # most of a page's time
    Path("configs").symlink_to(ROOT / "configs")
    for words in commands(page):
        name, given = parsed(words)
        if name in ELSEWHERE and not given.get("listed"):
            continue
        if name == "raysim run" and "federation.yaml" in given["config"]:
            CliRunner().invoke(app, ["init"])
        for folder in given.get("folders") or given.get("runs") or filter(None, [given.get("folder")]):
            if not folder.exists():
                shutil.copytree(measured, folder)
        words = [word for word in words if word not in ("--dashboard", "--parallel", "auto")]
        words = [str(tmp_path / word.removeprefix("/")) if word.startswith("/shared/") else word for word in words]
        words += SHORT.get(name) or SHORT.get(f"{name} {given.get('name')}", [])
        done = CliRunner().invoke(app, words, input="y\n")
        assert done.exit_code == 0, f"raysim {' '.join(words)}\n{done.output}"


def test_what_is_shown_of_a_terminal_is_what_it_says(subtests: pytest.Subtests) -> None:
    """Blocks that begin with `$ raysim`; `...` stands for the rest of a line."""
    for name, block in [(name, block) for name, page in of("text").items() for block in blocks(page, "text")]:
        command, *shown = block.splitlines()
        if command.startswith("$ raysim "):
            with subtests.test(page=name, command=command):
                said = CliRunner().invoke(app, shlex.split(command)[2:]).output.replace(f"{ROOT}/", "")
                pattern = "\n".join(re.escape(line).replace(re.escape("..."), ".*") for line in shown)
                assert re.fullmatch(pattern, said.rstrip()), said


def test_configurations_are_valid(subtests: pytest.Subtests) -> None:
    for name, block in [(name, block) for name, page in of("yaml").items() for block in blocks(page, "yaml")]:
        with subtests.test(page=name, block=block):
            shown = yaml.safe_load(block)
            variants = [dict(settings) for settings in (shown.pop("methods", None) or {"": {}}).values()]
            for settings in variants:
                changes = [
                    f"{path}={yaml.safe_dump(value, default_flow_style=True)}" for path, value in settings.items()
                ]
                whole = {"data", "model", "rounds", "local"} <= shown.keys()
                from_dict(shown if whole else merged(to_dict(tiny()), shown), overrides=changes)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on `base`, section by section."""
    both = {key for key in over if isinstance(over[key], dict) and isinstance(base.get(key), dict)}
    return base | over | {key: base[key] | over[key] for key in both}


def test_links_lead_somewhere(subtests: pytest.Subtests) -> None:
    written = {ROOT / "docs" / name for name in generated()}
    for page in PAGES:
        with subtests.test(page=named(page)):
            text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
            links = re.findall(r"\]\((?!http|mailto)([^)#\s]+)(?:#[^)]*)?\)", text)
            places = [(page.parent / link).resolve() for link in links]
            assert [str(place) for place in places if not (place.exists() or place in written)] == []
            files = set(re.findall(r"`((?:raysim|tests|benchmarks|docs|configs)/[\w/.-]+)`", text))
            if page.parent.name != "decisions":  # which tell of what was
                assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


def generated() -> set[str]:
    """Pages that are written when the documentation is built: those of the navigation that are no files."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", text))
    return {name for name in named if not (ROOT / "docs" / name).is_file()}


def test_every_paper_page_runs_its_method() -> None:
    """The page of a paper has a run with its method, and a reproduction of one of its tables."""
    for page in (ROOT / "docs/papers" / f"{paper}.md" for paper in PAPERS):
        lines = [" ".join(words) for words in commands(page)]
        assert any(line.startswith("run ") and page.stem in line for line in lines), page
        assert any(line.startswith(f"reproduce {page.stem}/") for line in lines), page
        assert page.stem in {name for catalogue in STACKS.values() for name in catalogue.entries}
