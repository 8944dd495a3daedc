"""Configurations, `--set`, and what a run has written: any damage ends in success or in one of raysim's own sentences."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import play, tiny
from fuzz.mutate import altered, damaged
from safetensors.torch import save_file

from raysim.config import ConfigError, check_unchanged, from_dict, load, to_dict
from raysim.federation.checkpoint import CheckpointError, Checkpoints
from raysim.federation.lock import finished_result, machine_changes
from raysim.report import ReportError
from raysim.report.groups import compare
from raysim.report.runs import Run
from raysim.report.summary import summarise
from raysim.store.documents import DamagedFile, parse_yaml, read_tensors
from raysim.sweep.grid import grid
from raysim.sweep.table import read_table

WORDS = (
    *("!!int abc", "!!bool abc", "!!int ''", "!!python/name:os.system", "!!binary YQ==", "&a [*a]", "*b", "<<: *a"),
    *("{a: 1", "[[[[", "? [a]: b", "1" * 5000, "=", "~", ".inf", "1e999", "2020-01-01", "&a", "*a", "- ", ": ", "\t"),
    *("1:1:1", "0x", "..", "\\", "'", '"', "\x85", "\ufeff", "%YAML 1.1", "---", "...", "|", ">", "[" * 300, "\ud800"),
)  # fmt: skip


def texts(seed: int, count: int) -> list[str]:
    """Shipped configurations with words put in, lines moved, bytes damaged."""
    chance = random.Random(seed)
    bases = [path.read_text() for path in sorted(Path("configs").glob("*.yaml"))]
    bases.append(yaml.safe_dump(to_dict(tiny())))
    made = []
    for _ in range(count):
        text = chance.choice(bases)
        if chance.random() < 0.4:
            text = damaged(text.encode(), chance).decode(errors="surrogateescape")
        else:
            for _ in range(chance.choice((1, 1, 3))):
                at = chance.randrange(len(text) + 1)
                text = text[:at] + chance.choice(WORDS) + text[at + chance.choice((0, 0, 5)) :]
        made.append(text)
    return made


def test_yaml(tmp_path: Path) -> None:
    """1,000 damaged texts through the loader of all YAML, 200 as a configuration, a sweep's and a table's."""
    path = tmp_path / "case.yaml"
    for number, text in enumerate(texts(0, 1000)):
        began = time.monotonic()
        with suppress(yaml.YAMLError):
            parse_yaml(text)
        assert time.monotonic() - began < 5, text
        if number % 5 == 0:
            path.write_bytes(text.encode(errors="replace"))
            for read in (load, read_table, lambda path: grid(path, [], [], tmp_path / "out")):
                try:
                    read(path)
                except ConfigError as error:
                    assert str(error)  # noqa: PT017
    assert [*tmp_path.iterdir()] == [path]


def test_overrides() -> None:
    """400 of `path=value`, whose paths are those of a configuration, or nearly."""
    chance = random.Random(1)
    config = to_dict(tiny())
    paths = [
        "name",
        "seed",
        "data.name",
        "client.0",
        "server.0.fedlws.beta",
        "rounds.total",
        "a.b",
        "",
        "client.-1",
        "²",
    ]
    paths += ["x." * 3000, "data." + "9" * 5000, "client." + "9" * 5000, ".".join("a" * 64)]
    values = [*WORDS, *map(json.dumps, ("..", 10**400, [1], {"a": {}}, None, float("nan"))), "[" * 3000]
    path = Path("configs/quickstart.yaml")
    for _ in range(400):
        sets = [f"{chance.choice(paths)}={chance.choice(values)}" for _ in range(chance.choice((1, 1, 4)))]
        try:
            load(path, sets)
        except ConfigError as error:
            assert len(str(error)) < 20_000  # noqa: PT017
    assert config == to_dict(tiny())


def test_values() -> None:
    """1,000 configurations with keys and values that are wrong."""
    chance = random.Random(2)
    config = to_dict(tiny(server=["fedlws"], weighting=[{"fedldf": {"top_n": 2}}], client=["ditto"]))
    for _ in range(1000):
        with suppress(ConfigError):
            from_dict(altered(config, chance))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    rounds = {"total": 2, "participation": 1.0, "evaluate_every": 1, "checkpoint_every": 1}
    play(tiny(rounds=rounds, data={"client_test_frac": 0.25}, evaluate={"personal": "after_train"}), folder)
    return folder


def report(folder: Path) -> None:
    from raysim.report.page import _failures, _hashes, _machines

    run = Run(folder)
    groups = compare([run])
    summarise(groups)
    _hashes(run), _machines([run]), [*_failures(groups)], run.stack, run.state, run.shares


def resume(folder: Path) -> None:
    config = load(folder / "config.yaml")
    check_unchanged(config, folder)
    machine_changes(folder)
    finished_result(config, folder)


def checkpoint(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    latest = checkpoints.latest()
    if latest is not None:
        saved = checkpoints.load(latest)
        assert saved.info["wall"] >= 0
        for path in saved.clients.values():
            assert path.resolve().is_relative_to(folder.resolve())
            checkpoints.load_client(path)


READERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "result": ("result.json", report),
    "result resumed": ("result.json", resume),
    "manifest": ("manifest.json", report),
    "manifest resumed": ("manifest.json", resume),
    "config": ("config.yaml", report),
    "config resumed": ("config.yaml", resume),
    "checkpoint": ("checkpoints/round-000002.json", checkpoint),
}


@pytest.mark.parametrize("name", READERS)
def test_files_of_a_run(name: str, finished: Path, tmp_path: Path) -> None:
    """250 cases a reader: keys and values altered, or bytes damaged."""
    file, read = READERS[name]
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    content = (folder / file).read_bytes()
    document: Any = parse_yaml(content.decode()) if file.endswith("yaml") else json.loads(content)
    chance = random.Random(name)
    for _ in range(250 if file.endswith("json") else 100):
        if chance.random() < 0.3:
            (folder / file).write_bytes(damaged(content, chance))
        elif file.endswith("yaml"):
            text = yaml.safe_dump(altered(document, chance), allow_unicode=True)
            (folder / file).write_text(text, encoding="utf-8", errors="surrogateescape")
        else:
            (folder / file).write_text(json.dumps(altered(document, chance)))
        try:
            read(folder)
        except (DamagedFile, ReportError, ConfigError, CheckpointError) as error:
            assert str(folder) in str(error)  # noqa: PT017


def test_safetensors(finished: Path, tmp_path: Path) -> None:
    """1,000 damaged files of tensors; 100 of them as `model.init`."""
    content = (finished / "model.safetensors").read_bytes()
    chance = random.Random(3)
    path = tmp_path / "init.safetensors"
    for number in range(1000):
        head = int.from_bytes(content[:8], "little") + 8
        path.write_bytes(damaged(content[:head], chance) + content[head:])
        try:
            read_tensors(path)
        except DamagedFile as error:
            assert str(path) in str(error)  # noqa: PT017
        if number % 10 == 0:
            try:
                tiny(model={"name": "tiny_bn_cnn", "init": str(path)})
            except ConfigError as error:
                assert "model.init" in str(error)  # noqa: PT017
    save_file({}, path)
    assert read_tensors(path) == {}
