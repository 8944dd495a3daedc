"""Checkpoints survive a kill at any moment; typed state survives the way through a file."""

import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
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

import raysim.federation.checkpoint
from raysim.core.state import pack, unpack
from raysim.federation.checkpoint import CheckpointError, Checkpoints

ROOT = Path(raysim.federation.checkpoint.__file__).parents[2]
CLIENTS = 12


# ---- a run whose every tensor says in which round it was made ----


def cohort(t: int) -> list[int]:
    return [client for client in range(CLIENTS) if (client + t) % 5 == 0]


def save_round(checkpoints: Checkpoints, t: int, size: int = 10) -> None:
    server = {"params": torch.full((size,), float(t)), "memory.fedavgm": torch.tensor(t)}
    states = ((client, {"fedala.weights": torch.full((size,), float(t))}) for client in cohort(t))
    checkpoints.save(t, server, {"round": t}, states)


def check_round(checkpoints: Checkpoints, t: int) -> None:
    saved = checkpoints.load(t)
    assert saved.info == {"round": t}
    assert saved.server["memory.fedavgm"] == t
    assert (saved.server["params"] == t).all()
    expected = {client: r for r in range(t + 1) for client in cohort(r)}  # the round of its last part
    assert saved.clients.keys() == expected.keys()
    for client, path in saved.clients.items():
        assert (checkpoints.load_client(path)["fedala.weights"] == expected[client]).all()


def resume(folder: Path, size: int) -> None:
    checkpoints = Checkpoints(folder)
    done = checkpoints.latest()
    if done is not None:
        checkpoints.load(done)
    for t in range(0 if done is None else done + 1, 10**6):
        save_round(checkpoints, t, size)


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
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, server, {"best": 0.5, "names": ["a"]}, [(7, {"theta": frozen, "n": np.array(3)})])

    saved = Checkpoints(tmp_path).load(4)
    assert saved.info == {"best": 0.5, "names": ["a"]}
    assert saved.server.keys() == server.keys()
    for name, tensor in server.items():
        assert saved.server[name].dtype == tensor.dtype, name
        assert torch.equal(saved.server[name], tensor), name
    saved.server["view"].add_(1)  # what is loaded can be trained on
    state = checkpoints.load_client(saved.clients[7])
    assert torch.equal(state["theta"], torch.from_numpy(frozen.copy()))
    assert state["n"].dtype == torch.int64


def test_the_last_two_are_kept_and_nothing_else(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for t in range(8):
        save_round(checkpoints, t)
    (tmp_path / "checkpoints/states/client-00003-round-000099.safetensors").write_bytes(b"half a fi")
    (tmp_path / "checkpoints/.round-000009.json.tmp").write_bytes(b"{")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 7
    check_round(checkpoints, 6)
    check_round(checkpoints, 7)
    save_round(checkpoints, 8)

    last = {
        t: {client: max(r for r in range(t + 1) if client in cohort(r)) for client in range(CLIENTS)} for t in (7, 8)
    }
    assert files(tmp_path) == {
        *(f"checkpoints/round-{t:06d}{end}" for t in (7, 8) for end in (".json", "/server.safetensors")),
        *(f"checkpoints/states/client-{c:05d}-round-{r:06d}.safetensors" for t in last for c, r in last[t].items()),
    }
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()) == [
        "round-000007",
        "round-000008",
        "states",
    ]


@pytest.mark.parametrize("victim", ["round-000003.json", "round-000003/server.safetensors", "states/*-000003.*"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog, victim, harm):
    checkpoints = Checkpoints(tmp_path)
    for t in range(4):
        save_round(checkpoints, t)
    path = next((tmp_path / "checkpoints").glob(victim))
    content = bytearray(path.read_bytes())
    content[-1 if path.suffix == ".safetensors" else 0] ^= 1
    {
        "flip": lambda: path.write_bytes(content),
        "cut": lambda: path.write_bytes(content[: len(content) // 2]),
        "remove": path.unlink,
    }[harm]()

    checkpoints = Checkpoints(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest() == 2
    assert ("round 3 is damaged" in caplog.text) == (victim != "round-000003.json" or harm != "remove")
    with pytest.raises(CheckpointError, match="round 3"):
        checkpoints.load(3)
    check_round(checkpoints, 2)
    save_round(checkpoints, 3)
    save_round(checkpoints, 4)
    for t in (3, 4):
        check_round(Checkpoints(tmp_path), t)


def test_playing_rounds_again_leaves_the_old_ones_behind(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for t in range(4):
        save_round(checkpoints, t)
    checkpoints.load(1)
    checkpoints.save(2, {}, {"again": True}, [(0, {"w": torch.zeros(1)})])
    assert checkpoints.latest() == 2
    assert [int(path.stem[6:]) for path in sorted((tmp_path / "checkpoints").glob("*.json"))] == [1, 2]
    saved = checkpoints.load(2)
    assert saved.server == {}
    assert saved.info == {"again": True}
    assert {client: path.stem[-1] for client, path in saved.clients.items() if client in (0, 3, 4)} == {
        0: "2",
        4: "1",  # carried over from round 1, not from the abandoned round 2
    }


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
    """The save dies before each write, sync, rename and removal in turn, leaving half a file where it was writing."""

    def half(path: Path, data: Any, **_: Any) -> None:
        with open(path, "wb" if isinstance(data, bytes) else "w") as file:
            file.write(data[: len(data) // 2])

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
                    if action in (Path.write_bytes, Path.write_text):
                        half(*arguments, **named)
                    raise Crash
                return action(*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            actions = {
                "write_bytes": Path,
                "write_text": Path,
                "fsync": os,
                "replace": os,
                "unlink": Path,
                "rmdir": Path,
            }
            for name, owner in actions.items():
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
        assert len(files(run)) == 2 * 2 + CLIENTS + len(cohort(5))  # no garbage
        if finished:
            break
    assert moment > 15


def test_kill_at_random_moments(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kills, rounds = map(int, done.stdout.split())
    assert kills == 25
    assert rounds > 5  # some saves went through between the kills, on however busy a machine


def kill_again_and_again(folder: Path) -> None:
    """Forks a run, kills it with SIGKILL while it saves, checks what it left, and lets the next go on from there."""
    torch.set_num_threads(1)  # a fork does not inherit the threads that OpenMP believes in
    moments, before = random.Random(0), -1
    for _ in range(25):
        run = os.fork()
        if run == 0:
            resume(folder, size=30_000)
        time.sleep(moments.uniform(0.02, 0.07))
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        checkpoints = Checkpoints(folder)
        found = checkpoints.latest()
        if found is not None:
            check_round(checkpoints, found)
        assert before <= (found if found is not None else -1), "a finished checkpoint was lost"
        before = found if found is not None else -1
    print(25, before)


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


if __name__ == "__main__":
    kill_again_and_again(Path(sys.argv[1]))
