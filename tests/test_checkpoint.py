"""Checkpoints survive a kill at any moment; typed state survives the way through a file."""

import hashlib
import json
import logging
import math
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from raysim.core.state import pack, unpack
from raysim.federation.checkpoint import CheckpointError, Checkpoints, OldCheckpoint
from raysim.store import segments
from raysim.store.atomic import write_json
from raysim.store.documents import DamagedFile

CLIENTS = 12


# ---- a run whose every tensor says in which round it was made ----


def cohort(t: int) -> list[int]:
    return [client for client in range(CLIENTS) if (client + t) % 5 == 0]


def save_round(checkpoints: Checkpoints, t: int, size: int = 10) -> None:
    server = {"params": torch.full((size,), float(t)), "memory.fedavgm": torch.tensor(t)}
    states = ((client, {"fedala.weights": np.full(size, float(t))}) for client in cohort(t))
    checkpoints.save(t, server, {"round": t}, states)


def check_round(checkpoints: Checkpoints, t: int) -> None:
    saved = checkpoints.load(t)
    assert saved.info == {"round": t}
    assert saved.server["memory.fedavgm"] == t
    assert (saved.server["params"] == t).all()
    expected = {client: r for r in range(t + 1) for client in cohort(r)}  # the round of its last part
    assert checkpoints.states.keys() == expected.keys()
    for client, state in checkpoints.states.items():
        assert (state["fedala.weights"] == expected[client]).all()


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in (folder / "checkpoints").rglob("*") if path.is_file()}


# ---- checkpoints ----


def test_every_kind_of_tensor_comes_back(tmp_path):
    flat = torch.arange(6.0)
    kinds = (torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16)
    server = {f"layer1.0.{kind}".replace("torch.", ""): torch.tensor([[0, 1], [1, 1]]).to(kind) for kind in kinds}
    server |= {"zero-d": torch.tensor(3), "empty": torch.empty(0), "empty.2": torch.empty(0, 3, dtype=torch.int64)}
    server |= {"view": flat[1:4], "same storage": flat[2:], "turned": flat.view(2, 3).T, "": torch.ones(1)}
    server |= {"parameter": torch.nn.Parameter(torch.ones(2))}
    frozen = np.arange(4, dtype=np.float32).reshape(2, 2)
    frozen.setflags(write=False)  # as arrays from Ray's object store are
    arrays = {kind: np.array([[0, 1], [2, 3]], kind) for kind in ("f2", "f4", "f8", "i8", "u1", "?", "c8")}
    arrays |= {"theta": frozen, "turned": frozen.T, "n": np.array(3), "none": np.empty((0, 3), "f4"), "": np.ones(1)}
    Checkpoints(tmp_path).save(4, server, {"best": 0.5, "names": ["a"]}, [(7, arrays)])

    checkpoints = Checkpoints(tmp_path)
    saved = checkpoints.load(4)
    assert saved.info == {"best": 0.5, "names": ["a"]}
    assert saved.server.keys() == server.keys()
    for name, tensor in server.items():
        assert saved.server[name].dtype == tensor.dtype, name
        assert torch.equal(saved.server[name], tensor), name
    saved.server["view"].add_(1)  # what is loaded can be trained on
    state = checkpoints.states[7]
    assert state.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (state[name].dtype, state[name].shape) == (array.dtype, array.shape), name
        assert np.array_equal(state[name], array), name


def test_the_last_two_are_kept_and_nothing_else(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for t in range(8):
        save_round(checkpoints, t)
    (tmp_path / "checkpoints/round-000009.states").write_bytes(b"half a fi")
    (tmp_path / "checkpoints/.round-000009.json.tmp").write_bytes(b"{")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 7
    check_round(checkpoints, 6)
    check_round(checkpoints, 7)
    save_round(checkpoints, 8)
    manifests = [json.loads((tmp_path / f"checkpoints/round-00000{t}.json").read_text()) for t in (7, 8)]
    assert files(tmp_path) == {
        *(f"checkpoints/round-00000{t}.{end}" for t in (7, 8) for end in ("json", "safetensors")),
        *(f"checkpoints/{entry['file']}" for manifest in manifests for entry in manifest["segments"]),
    }


@pytest.mark.parametrize("victim", ["json", "safetensors", "states"])
@pytest.mark.parametrize("harm", ["flip", "flip early", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog, victim, harm):
    checkpoints = Checkpoints(tmp_path)
    for t in range(4):
        save_round(checkpoints, t)
    path = tmp_path / f"checkpoints/round-000003.{victim}"
    content = bytearray(path.read_bytes())
    content[0 if harm == "flip early" or victim == "json" else -1] ^= 1
    {
        "flip": lambda: path.write_bytes(content),
        "flip early": lambda: path.write_bytes(content),
        "cut": lambda: path.write_bytes(content[: len(content) // 2]),
        "remove": path.unlink,
    }[harm]()

    checkpoints = Checkpoints(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == 2
    assert ("round 3 is damaged" in caplog.text) == (victim != "json" or harm != "remove")
    with pytest.raises(CheckpointError, match="round 3"):
        checkpoints.load(3)
    check_round(checkpoints, 2)
    (tmp_path / "checkpoints/round-000003.safetensors").unlink(missing_ok=True)
    (tmp_path / "checkpoints/round-000003.safetensors").symlink_to("nothing")  # whose name is taken, too
    save_round(checkpoints, 3)
    save_round(checkpoints, 4)
    for t in (3, 4):
        check_round(Checkpoints(tmp_path), t)


def test_what_is_damaged_later_is_found_when_it_is_read(tmp_path):
    """Both checkpoints need an older segment; it is read as its clients take part, and not before."""
    checkpoints = Checkpoints(tmp_path)
    for t, client in ((1, 5), (2, 6)):
        checkpoints.save(t, {}, {}, [(client, {"x": np.ones(3)})])
    path = tmp_path / "checkpoints/round-000001.states"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 2
    checkpoints.load(2)
    assert checkpoints.states[6]["x"].sum() == 3
    with pytest.raises(DamagedFile, match=f"{path}: the state of client 5 is not as it was written"):
        checkpoints.states[5]


def test_segments_of_which_little_counts_are_merged(tmp_path, monkeypatch):
    """Disk use stays within three times what counts, and a checkpoint writes at most twice what has changed."""
    monkeypatch.setattr(segments, "MOVED_BYTES", 0)
    checkpoints, chance, newest = Checkpoints(tmp_path), random.Random(0), {}
    for t in range(60):
        changed = range(100) if t == 0 else chance.sample(range(100), 10)
        newest |= dict.fromkeys(changed, t)
        checkpoints.save(t, {}, {}, [(c, {"x": np.full(1000, t)}) for c in changed])
        assert checkpoints.states.segments[-1].entry["table"] <= 8000 * (100 if t == 0 else 20)
        assert sum(s.entry["table"] for s in checkpoints.states.segments) <= 3 * 100 * 8000
        assert {client: state["x"][0] for client, state in checkpoints.states.items()} == newest
    assert len(checkpoints.states.segments) < 40
    checkpoints = Checkpoints(tmp_path)
    checkpoints.load(59)
    assert {client: state["x"][0] for client, state in checkpoints.states.items()} == newest


def test_many_small_segments_are_merged(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for t in range(70):
        checkpoints.save(t, {}, {}, [(t, {"x": np.full(3, t)})])
    assert len(checkpoints.states.segments) <= 64
    assert {client: state["x"][0] for client, state in checkpoints.states.items()} == {t: t for t in range(70)}


def test_a_checkpoint_of_an_older_raysim(tmp_path):
    """Where clients kept nothing it is loaded; else it is refused, and not passed over: that would begin the run anew."""
    folder = tmp_path / "checkpoints"
    (folder / "round-000002").mkdir(parents=True)
    (folder / "states").mkdir()
    content = save({"value": torch.ones(3)})
    (folder / "round-000002" / "server.safetensors").write_bytes(content)
    entry = {"file": "round-000002/server.safetensors", "sha256": hashlib.sha256(content).hexdigest()}
    for clients in ({}, {"3": {"file": "states/client-00003-round-000002.safetensors", "sha256": "0" * 64}}):
        manifest = {"round": 2, "server": entry, "clients": clients, "info": {"wall": 1.0}}
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        write_json(folder / "round-000002.json", manifest | {"sha256": digest})
        checkpoints = Checkpoints(tmp_path)
        if clients:
            with pytest.raises(OldCheckpoint, match=r"was written by raysim 0\.1.* Resume the run with that version"):
                checkpoints.latest()
        else:
            assert checkpoints.latest() == 2
            assert checkpoints.load(2).server["value"].sum() == 3
            checkpoints.save(3, {}, {})
            checkpoints.save(4, {}, {})
            assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
            shutil.rmtree(folder)
            (folder / "round-000002").mkdir(parents=True)


def test_playing_rounds_again_leaves_the_old_ones_behind(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for t in range(4):
        save_round(checkpoints, t)
    checkpoints.load(1)
    checkpoints.save(2, {}, {"again": True}, [(0, {"fedala.weights": np.full(1, -1.0)})])
    assert checkpoints.latest() == 2
    assert [int(path.stem[6:]) for path in sorted((tmp_path / "checkpoints").glob("*.json"))] == [1, 2]
    saved = checkpoints.load(2)
    assert saved.server == {}
    assert saved.info == {"again": True}
    assert {
        client: state["fedala.weights"][0] for client, state in checkpoints.states.items() if client in (0, 3, 4)
    } == {
        0: -1,
        4: 1,  # carried over from round 1, not from the abandoned round 2
    }
    checkpoints.save(2, {}, {"once more": True})  # as a run that is stopped just after a checkpoint
    assert Checkpoints(tmp_path).latest() == 2
    assert checkpoints.states[0]["fedala.weights"] == -1


def test_no_guessing(tmp_path):
    save_round(Checkpoints(tmp_path), 5)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="load it"):
        save_round(checkpoints, 6)
    checkpoints.load(5)
    with pytest.raises(ValueError, match="round 4 after round 5"):
        save_round(checkpoints, 4)
    with pytest.raises(TypeError):
        checkpoints.save(6, {}, {"path": Path()})
    with pytest.raises(ValueError, match="__metadata__"):
        checkpoints.save(6, {"__metadata__": torch.ones(1)}, {})
    assert Checkpoints(tmp_path).latest() == 5


class Crash(BaseException):
    pass


def test_death_at_every_step_of_a_save(tmp_path, monkeypatch):
    """The save dies before each sync, rename and removal in turn, with half of a file on the disk that was not synced."""
    fsync = os.fsync
    for moment in range(1000):
        run = tmp_path / str(moment)
        run.mkdir()
        checkpoints = Checkpoints(run)
        for t in range(3):
            save_round(checkpoints, t)
        calls = 0

        def dying(action):
            def call(*arguments, **named):
                nonlocal calls
                calls += 1
                if calls > moment:  # noqa: B023
                    if action is fsync and Path(file := os.readlink(f"/proc/self/fd/{arguments[0]}")).is_file():
                        os.truncate(file, os.path.getsize(file) // 2)
                    raise Crash
                return action(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for name, owner in {"fsync": os, "replace": os, "unlink": Path, "rmdir": Path}.items():
                patch.setattr(owner, name, dying(getattr(owner, name)))
            try:
                save_round(checkpoints, 3)
                finished = True
            except Crash:
                finished = False
        after = Checkpoints(run)
        found = after.latest()
        assert found == 3 if finished else found in (2, 3)
        check_round(after, found)
        for t in range(found + 1, 6):
            save_round(after, t)
        check_round(after, 5)
        segments_of = [json.loads((run / f"checkpoints/round-00000{t}.json").read_text())["segments"] for t in (4, 5)]
        assert len(files(run)) == 2 * 2 + len({entry["file"] for some in segments_of for entry in some})  # no garbage
        if finished:
            break
    assert moment > 5


# ---- typed state ----


@dataclass
class Momentum:
    velocity: Tensor
    steps: int = 0


@dataclass(frozen=True)
class State:
    weights: Tensor
    settled: bool
    rate: float
    inner: Momentum
    spare: Momentum | None
    previous: Tensor | None
    peers: dict[str, Momentum] = field(default_factory=dict)
    factor: float | Tensor = 1.0
    anything: object = None


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if hasattr(a, "__dataclass_fields__"):
        return same(vars(a), vars(b))
    return a == b or (math.isnan(a) and math.isnan(b))


def through_a_file(flat: dict[str, Tensor]) -> dict[str, Tensor]:
    return load(save({name: tensor.clone() for name, tensor in flat.items()}))


tensors = st.builds(
    lambda values, kind: torch.tensor(values, dtype=torch.int64).to(kind),
    st.one_of(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=3)),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16]),
)
leaves = st.one_of(tensors, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats())
keys = st.one_of(
    st.sampled_from(["", "/", ":", "~", "~1", "a:scalar", "a:empty", "layer1.0.bias"]), st.text(max_size=4)
)
trees = st.dictionaries(keys, st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, max_size=3)), max_size=3)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_dicts_come_back(tree):
    assert same(unpack(None, through_a_file(pack(tree))), tree)


@settings(max_examples=50, deadline=None)
@given(
    tensors,
    st.booleans(),
    st.one_of(st.floats(), st.integers(0, 9)),
    st.none() | tensors,
    st.none() | leaves,
    st.booleans(),
)
def test_dataclasses_come_back(tensor, settled, rate, previous, anything, full):
    inner = Momentum(tensor, 3)
    peers = {"0": inner, "b/c": Momentum(tensor)} if full else {}
    state = State(
        tensor, settled, rate, inner, inner if full else None, previous, peers, tensor if full else 0.5, anything
    )
    assert same(unpack(State, through_a_file(pack(state))), state)
    by_client = {"7": state, "8": state}
    assert same(unpack(dict[str, State], pack(by_client)), by_client)


def test_none_and_nothing_are_told_apart():
    @dataclass
    class Empty:
        maybe: Tensor | None = None

    assert unpack(None, pack({"a": None, "b": {}, "c": Empty()})) == {"b": {}, "c": {}}
    assert unpack(dict[str, Empty | None], pack({"c": Empty()})) == {"c": Empty()}
    assert pack({}) == {} == unpack(None, {})


def test_names_are_readable():
    state = {"fedala": Momentum(torch.ones(2), 3)}
    assert list(pack(state)) == ["fedala/velocity", "fedala/steps:scalar"]


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"velocity": torch.ones(1)}, "steps: missing field of Momentum"),
        ({"velocity": torch.ones(1), "steps": 1, "stepps": 1}, "stepps: unknown field of Momentum"),
        ({"velocity": 1.0, "steps": 1}, "velocity: expected Tensor, found float"),
        ({"velocity": torch.ones(1), "steps": True}, "steps: expected int, found bool"),
        ({"velocity": torch.ones(1), "steps": torch.tensor(1)}, "steps: expected int, found Tensor"),
    ],
)
def test_wrong_fields_are_named(tree, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        unpack(Momentum, pack(tree))
    with pytest.raises(ValueError, match=f"^outer/{says}"):
        unpack(dict[str, Momentum | None], pack({"outer": tree}))


@pytest.mark.parametrize(
    ("tree", "error", "says"),
    [
        ({"a": {"b": [1.0]}}, TypeError, "a/b: list"),
        ({"a": {1: 1.0}}, TypeError, "a: key 1"),
        ({"a": 2**63}, ValueError, "a: 9223372036854775808"),
        (1.5j, TypeError, "complex"),
    ],
)
def test_what_cannot_be_packed_is_named(tree, error, says):
    with pytest.raises(error, match=says):
        pack(tree)
