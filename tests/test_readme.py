"""What README.md tells a newcomer works as it stands there."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import play, tiny

import raysim
from raysim.config import load, name_in, to_dict, to_yaml
from raysim.methods import CLIENTS
from raysim.registry import REGISTRY

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_method_trains(tmp_path):
    [example] = [block for block in blocks("python") if "ClientMethod" in block]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    before = dict(CLIENTS)
    try:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
        [name] = CLIENTS.keys() - before.keys()
        changed = play(tiny(client=[name]), tmp_path / "example")
        assert name_in({}, CLIENTS[name]()) == name  # in an actor, whose catalogue lacks it
        plain = play(tiny(), tmp_path / "plain")
    finally:
        for added in CLIENTS.keys() - before.keys():
            del CLIENTS[added]
    assert changed.sha256() != plain.sha256()


def test_what_is_shown_from_python_runs(tmp_path, monkeypatch):
    """With a small configuration under the quickstart's name, which a file of that path takes."""
    monkeypatch.chdir(tmp_path)
    rounds = {"total": 12, "participation": 0.4, "evaluate_every": 1}
    Path("quickstart").write_text(to_yaml(tiny(rounds=rounds)))
    [shown] = [block for block in blocks("python") if "raysim.stream" in block]
    scope = {}
    exec(compile(shown.replace('"runs/quickstart-..."', "run.folder"), "README.md", "exec"), scope)
    assert scope["run"].rounds == 20
    assert raysim.load(scope["simulation"].folder).result["rounds"] == 100


def test_own_parts_are_used_by_their_names(tmp_path):
    [shown] = [block for block in blocks("python") if "raysim.model()" in block]
    before = {table: set(table) for table in map(REGISTRY.table, ("model", "partition", "metric"))}
    try:
        exec(compile(shown, "README.md", "exec"), {"__name__": "readme"})
        data = {"name": "digits", "partition": {"in_turn": {"clients": 3}}}
        config = to_dict(tiny()) | {"data": data, "model": {"name": "net", "options": {"width": 8}}}
        run = raysim.run(config, out=tmp_path / "run", evaluate__metrics=["confidence"])
        assert run.model().head.in_features == 8
        assert 0 < run["rounds"]["metric.confidence"][-1].as_py() < 1
    finally:
        for table, names in before.items():
            for added in set(table) - names:
                del table[added]


RUNS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("raysim run ")]


@pytest.mark.parametrize("line", RUNS)
def test_commands_are_valid(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)[2:]
    load(words[0], [after for word, after in pairwise(words) if word == "--set"])


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
