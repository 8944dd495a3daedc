"""What a coverage-guided fuzzer is let loose on (`benchmarks/fuzzing.py`): bytes that readers take in, or refuse in a sentence."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

from raysim.config import ConfigError, load
from raysim.data.errors import DataError
from raysim.data.pickles import read_arrays
from raysim.federation.checkpoint import CheckpointError, Checkpoints
from raysim.store.documents import DamagedFile, read_label, read_result, read_tensors, read_yaml
from raysim.store.manifest import read_manifest
from raysim.store.segments import SavedStates, Segment

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
REFUSED = (ConfigError, DamagedFile, DataError, CheckpointError)


def configuration(data: bytes, folder: Path) -> None:
    """A file, or settings for the command line."""
    if data[:1] < b"\x80":
        path = folder / "case.yaml"
        path.write_bytes(data[1:])
        load(path)
    else:
        load(QUICKSTART, data[1:].decode(errors="surrogateescape").split("\n"))


def yaml(data: bytes, folder: Path) -> None:
    path = folder / "case.yaml"
    path.write_bytes(data)
    read_yaml(path)


def run(data: bytes, folder: Path) -> None:
    """The JSON files in the folder of a run."""
    readers: tuple[tuple[str, Callable[[Path], object]], ...] = (
        ("manifest.json", read_manifest),
        ("result.json", read_result),
        ("label.json", read_label),
        ("checkpoints/round-000001.json", lambda folder: Checkpoints(folder).load(1)),
    )
    name, read = readers[data[0] % len(readers) if data else 0]
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / name).write_bytes(data[1:])
    read(folder)


def segment(data: bytes, folder: Path) -> None:
    """A segment of client states; its first bytes say where a manifest claims that the table begins, and of how many."""
    table, clients = struct.unpack("<HB", data[:3].ljust(3, b"\0"))
    path = folder / "case.segment"
    path.write_bytes(data[3:])
    hashed = hashlib.sha256(data[3 + table :]).hexdigest()  # as somebody would write it who means harm
    entry = {"file": path.name, "table": table, "clients": clients, "sha256": hashed}
    states = SavedStates((Segment.read(path, entry),))  # type: ignore[arg-type]
    for client in states:
        states[client]


def tensors(data: bytes, folder: Path) -> None:
    path = folder / "case.safetensors"
    path.write_bytes(data)
    read_tensors(path)


def pickles(data: bytes, folder: Path) -> None:
    """CIFAR's archives hold such files."""
    path = folder / "case"
    path.write_bytes(data)
    read_arrays(path)


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    target.__name__: target for target in (configuration, yaml, run, segment, tensors, pickles)
}


def taken_or_refused(target: str, data: bytes, folder: Path) -> None:
    """Raises what the reader should not have raised."""
    try:
        TARGETS[target](data, folder)
    except REFUSED as error:
        assert str(error)  # noqa: PT017
