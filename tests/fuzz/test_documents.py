"""Configurations, `--set`, and what a run has written: any damage ends in success or in one of raysim's own sentences."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from clocks import calls
from conftest import simulate, tiny
from fuzz.mutate import CASES, altered, chance_of, damaged, in_memory, remembered
from safetensors.torch import save_file

from raysim.config import Config, ConfigError, check_unchanged, from_dict, load, rules, to_dict
from raysim.federation.checkpoint import CheckpointError, Checkpoints
from raysim.federation.lock import finished_result
from raysim.report import ReportError
from raysim.report.groups import compare
from raysim.report.runs import Run
from raysim.report.summary import summarise
from raysim.store import documents, segments, tables
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
    chance = chance_of(seed)
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


@pytest.fixture
def parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several readers of one text share what is costly: its YAML."""
    monkeypatch.setattr(documents, "parse_yaml", remembered(documents.parse_yaml))


def parsed(text: str) -> None:
    with suppress(yaml.YAMLError):
        documents.parse_yaml(text)


def test_yaml(parsed_once: None) -> None:
    """Damaged texts through the loader of all YAML, and as a configuration, a sweep's and a table's."""
    with in_memory() as folder:
        path = folder / "case.yaml"
        for text in texts(0, CASES):
            assert calls(lambda text=text: parsed(text)) < 1000 + 100 * len(text), text
            path.write_bytes(text.encode(errors="replace"))
            for read in (load, read_table, lambda path: grid(path, [], [], folder / "out")):
                try:
                    read(path)
                except ConfigError as error:
                    assert str(error)  # noqa: PT017
        assert [*folder.iterdir()] == [path]


def test_overrides() -> None:
    """`path=value`s, whose paths are those of a configuration, or nearly."""
    chance = chance_of(1)
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
    base = documents.read_yaml(Path("configs/quickstart.yaml"))
    for _ in range(CASES):
        sets = [f"{chance.choice(paths)}={chance.choice(values)}" for _ in range(chance.choice((1, 1, 4)))]
        try:
            from_dict(base, "quickstart.yaml", sets)
        except ConfigError as error:
            assert len(str(error)) < 20_000  # noqa: PT017
    assert config == to_dict(tiny())


def test_values() -> None:
    """Configurations with keys and values that are wrong."""
    chance = chance_of(2)
    config = to_dict(tiny(server=["fedlws"], weighting=[{"fedldf": {"top_n": 2}}], client=["ditto"]))
    for _ in range(CASES):
        with suppress(ConfigError):
            from_dict(altered(config, chance))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    rounds = {"total": 2, "participation": 1.0, "evaluate_every": 1, "checkpoint_every": 1}
    personal = {"data": {"client_test_frac": 0.25}, "evaluate": {"personal": "after_train"}}
    simulate(tiny(rounds=rounds, **personal, local={"state": "persist"}), folder)
    return folder


def summary(folder: Path) -> None:
    summarise(compare([Run(folder)]))


def page(folder: Path) -> None:
    from raysim.report.page import _failures, _hashes, _machines

    run = Run(folder)
    _hashes(run), _machines([run]), [*_failures(compare([run]))], run.stack, run.state, run.shares


@functools.lru_cache(1)
def loaded(path: Path, content: bytes) -> Config:
    return load(path)


def resume(folder: Path) -> None:
    path = folder / "config.yaml"
    config = loaded(path, path.read_bytes())
    check_unchanged(config, folder)
    finished_result(config, folder)


def checkpoint(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    latest = checkpoints.latest()
    if latest is not None:
        saved = checkpoints.load(latest)
        assert abs(saved.info["wall"]) < math.inf
        for segment in checkpoints.states.segments:
            assert segment.path.resolve().is_relative_to(folder.resolve())
        assert all(array.size >= 0 for state in checkpoints.states.values() for array in state.values())


READERS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "result.json": (summary, page, resume),
    "manifest.json": (page, resume),
    "config.yaml": (summary, page, resume),
    "checkpoints/round-000002.json": (checkpoint,),
}


@pytest.mark.parametrize("file", READERS)
def test_files_of_a_run(file: str, finished: Path, parsed_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values altered, or bytes damaged. What is written as JSON is YAML, too."""
    monkeypatch.setattr(tables, "read", functools.cache(tables.read))  # they stay as they are
    content = (finished / file).read_bytes()
    document: Any = parse_yaml(content.decode()) if file.endswith("yaml") else json.loads(content)
    chance = chance_of(file)
    with in_memory() as memory:
        folder = Path(shutil.copytree(finished, memory / "run"))
        for _ in range(CASES):
            bytes_ = chance.random() < 0.3
            case = damaged(content, chance) if bytes_ else json.dumps(altered(document, chance)).encode()
            (folder / file).write_bytes(case)
            for read in READERS[file]:
                try:
                    read(folder)
                except (DamagedFile, ReportError, ConfigError, CheckpointError) as error:
                    assert str(folder) in str(error)  # noqa: PT017


def test_segments(finished: Path) -> None:
    """The end of a segment, damaged by somebody who puts the right hash beside it."""
    chance = chance_of(4)
    whole = finished / "checkpoints/round-000002.states"
    manifest = json.loads((finished / "checkpoints/round-000002.json").read_text())
    [*_, entry] = manifest["segments"]
    content = whole.read_bytes()
    table, rest = content[: entry["table"]], content[entry["table"] :]
    kinds = json.loads(rest[entry["clients"] * segments.ENTRY.itemsize :])
    with in_memory() as folder:
        path = folder / whole.name
        for _ in range(CASES):
            end = damaged(rest, chance)
            if chance.random() < 0.5:
                altered_kinds = json.dumps(altered(kinds, chance)).encode()
                end = rest[: entry["clients"] * segments.ENTRY.itemsize] + altered_kinds
            path.write_bytes(table + end)
            claimed = entry | {"sha256": hashlib.sha256(end).hexdigest()}
            try:
                states = segments.SavedStates((segments.Segment.read(path, claimed),))
                assert sum(array.nbytes for state in states.values() for array in state.values()) < 1 << 20
            except DamagedFile as error:
                assert str(path) in str(error)  # noqa: PT017


def test_safetensors(finished: Path) -> None:
    """Damaged files of tensors, read, and looked at as `model.init`."""
    content = (finished / "model.safetensors").read_bytes()
    chance = chance_of(3)
    with in_memory() as folder:
        path = folder / "init.safetensors"
        for _ in range(CASES):
            head = int.from_bytes(content[:8], "little") + 8
            path.write_bytes(damaged(content[:head], chance) + content[head:])
            try:
                read_tensors(path)
            except DamagedFile as error:
                assert str(path) in str(error)  # noqa: PT017
            fault = rules._unreadable(path)
            assert fault is None or str(path) in fault
        save_file({}, path)
        assert read_tensors(path) == {}
        path.write_bytes(b"")
        with pytest.raises(ConfigError, match=r"model\.init: .* cannot be read as safetensors"):
            tiny(model={"name": "tiny_bn_cnn", "init": str(path)})
