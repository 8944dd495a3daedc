"""What README.md tells a newcomer works as it stands there."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import play, tiny

from raysim.config import load, name_in
from raysim.methods import CLIENTS

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
