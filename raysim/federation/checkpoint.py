"""Checkpoints that survive a kill at any moment. Nothing is pickled.

<run>/checkpoints/round-000010.json          manifest, written last: it makes the checkpoint
<run>/checkpoints/round-000010.safetensors   the server
<run>/checkpoints/round-000010.states        a segment: the states of the clients that took part since the last checkpoint

A manifest names all segments that it needs; files are written once. Where a name is taken, as by a round that is run
again, the file is called round-000010-1.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from raysim.errors import Explained
from raysim.lazy import Tensor
from raysim.paths import UnsafeName, below
from raysim.store.atomic import as_safetensors, creating, own_folder, remove, subfolder, write_json
from raysim.store.documents import OPEN_SHAPE, DamagedFile, read_json
from raysim.store.segments import SavedStates, Segment, SegmentEntry, SegmentWriter

logger = logging.getLogger(__name__)

# Nothing but these is ever removed. raysim 0.1 wrote into folders of a round, and of all clients.
OWN = re.compile(
    r"round-\d{6,}(-\d+)?\.(safetensors|states)|round-\d{6,}/server\.safetensors|states/client-\d+-round-\d+\.safetensors"
)
OLD = re.compile(r"round-\d{6,}|states")


class CheckpointError(Explained, ValueError):
    """A checkpoint is missing or not as it was written."""


class OldCheckpoint(CheckpointError):
    """A checkpoint that only an older raysim can read."""


class Entry(TypedDict):
    """A file of a checkpoint, below its folder."""

    file: str
    sha256: str


class Info(TypedDict):
    """What the caller of `Checkpoints.save` adds, and of it what a resumed run computes with."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    wall: NotRequired[int | Annotated[float, Field(allow_inf_nan=False)]]


class CheckpointManifest(TypedDict):
    """The JSON file that makes a checkpoint."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    round: int
    server: Entry
    segments: NotRequired[list[SegmentEntry]]  # from the oldest to the newest
    clients: NotRequired[dict[str, Entry]]  # of an older raysim: a file for each client
    info: Info
    sha256: NotRequired[str]  # of all the rest; absent in checkpoints of an older raysim


class _Info(dict[str, Any]):
    """Says where it is from when something is missing in it."""

    def __init__(self, info: Mapping[str, Any], path: Path):
        super().__init__(info)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self._path} is damaged: info.{key} is missing")


@dataclass(frozen=True)
class Saved:
    """A loaded checkpoint. The clients' states are in `Checkpoints.states`."""

    server: dict[str, Tensor]
    info: dict[str, Any]


class Checkpoints:
    """The checkpoints of the run in `folder`; the last `keep` stay. One process at a time may own them."""

    def __init__(self, folder: Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep is {keep}, but a run needs at least one checkpoint")
        self.folder = Path(folder) / "checkpoints"
        self.keep = keep
        # The checkpoint that the run continues, and its clients' states: those of unchanged clients carry over.
        self._base: int | None = None
        self.states = SavedStates()
        self._verified_last: tuple[int, dict[str, Any], SavedStates] | None = None  # what `latest` has found
        self._warned: set[int] = set()  # damaged checkpoints that were named
        if own_folder(self.folder):
            for temporary in self.folder.glob(".round-*.json.tmp"):
                remove(temporary)

    def save(
        self,
        t: int,
        server: Mapping[str, Tensor],
        info: Mapping[str, Any],
        clients: Iterable[tuple[int, Mapping[str, np.ndarray]]] = (),
    ) -> None:
        """Save round `t`. `clients` yields (id, state) of those that changed since the last save or load, one by one.

        `info` must be JSON, and comes back as JSON does: tuples as lists, keys as strings. Checkpoints that do not
        lead to this one (a damaged one, rounds that are repeated) are removed. Raises ValueError where it would
        be a guess which states carry over: the folder holds a checkpoint and none was loaded, or `t` lies before it.
        """
        json.dumps(info)  # before anything is written
        if self._base is None and (found := self.latest()) is not None:
            raise ValueError(f"the folder holds a checkpoint of round {found}: load it, or start in an empty folder")
        if self._base is not None and t < self._base:
            raise ValueError(f"cannot save round {t} after round {self._base}")
        content = as_safetensors(server)
        if self._base is None:
            subfolder(self.folder)
        path = self._new(t, "safetensors")
        with creating(path) as file:
            file.write(content)
        written: Entry = {"file": path.name, "sha256": hashlib.sha256(content).hexdigest()}
        states = self._with(t, clients)
        described = {"round": t, "server": written, "segments": [s.entry for s in states.segments], "info": info}
        manifest = json.loads(json.dumps(described))  # as it is read
        write_json(self._path(t), manifest | {"sha256": _digest(manifest)})
        history = [] if self._base is None else [r for r in self._rounds() if r <= self._base and r != t]
        self._base, self.states, self._verified_last = t, states, None
        self._remove_all_but([*history, t][-self.keep :])

    def _with(self, t: int, clients: Iterable[tuple[int, Mapping[str, np.ndarray]]]) -> SavedStates:
        """The states, once those of `clients` are written as a segment, and others that lie in the way with them."""
        states = iter(clients)
        first = next(states, None)
        if first is None:
            return self.states
        path = self._new(t, "states")
        with creating(path) as file:
            writer = SegmentWriter(file)
            for client, state in itertools.chain([first], states):
                writer.add(client, state)
            for record in self.states.movable(writer):
                writer.copy(*record)
            return self.states.and_then(writer.finish(path))

    def latest(self) -> int | None:
        """The newest checkpoint whose files are all there and intact; a damaged one is passed over with a warning.
        Raises `OldCheckpoint`."""
        for t in reversed(self._rounds()):
            try:
                self._verified_last = t, *self._verified(t)
            except OldCheckpoint:
                raise
            except CheckpointError as error:
                if t not in self._warned:
                    earlier = any(r < t for r in self._rounds())
                    consequence = (
                        "taking the checkpoint before it"
                        if earlier
                        else "there is none before it, so the run starts again"
                    )
                    logger.warning("%s; %s", error, consequence)
                self._warned.add(t)
            else:
                return t
        return None

    def drop_after(self, t: int) -> None:
        """Remove the manifests of checkpoints after round `t`: damaged ones that were passed over. The run goes on from an
        earlier one and removes the rows of later rounds, so that none may lead on even where its files come back."""
        for later in self._rounds():
            if later > t:
                remove(self._path(later))

    def load(self, t: int) -> Saved:
        """Load round `t`; later saves continue from it. Raises CheckpointError, naming the file, if one is damaged."""
        import safetensors.torch  # it imports PyTorch

        if self._verified_last is not None and self._verified_last[0] == t:
            _, manifest, states = self._verified_last
        else:
            manifest, states = self._verified(t)
        path = below(self.folder, manifest["server"]["file"])
        # Read, not mapped: the tensors outlive the file, which a later save removes.
        content = path.read_bytes()
        try:
            server = safetensors.torch.load(content)
        except Exception as error:  # safetensors has an error of its own, torch several
            raise CheckpointError(f"{path} is damaged: it does not hold tensors ({error})") from error
        self._base, self.states, self._verified_last = t, states, None
        return Saved(server, _Info(manifest["info"], self._path(t)))

    def _path(self, t: int) -> Path:
        return self.folder / f"round-{t:06d}.json"

    def _new(self, t: int, kind: str) -> Path:
        """Where nothing is yet: what is there may belong to a checkpoint."""
        names = itertools.chain([f"round-{t:06d}"], (f"round-{t:06d}-{i}" for i in itertools.count(1)))
        return next(path for name in names if not os.path.lexists(path := self.folder / f"{name}.{kind}"))

    def _rounds(self) -> list[int]:
        names = (re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.folder.glob("round-*.json"))
        return sorted(int(match[1]) for match in names if match)

    def _manifest(self, t: int) -> dict[str, Any]:
        path = self._path(t)
        try:
            manifest: dict[str, Any] = dict(read_json(path, CheckpointManifest))
            for entry in (manifest["server"], *manifest.get("segments", ())):
                below(self.folder, entry["file"])
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no checkpoint of round {t}") from error
        except (OSError, DamagedFile, UnsafeName) as error:
            raise CheckpointError(f"checkpoint of round {t} is damaged: {path} is unreadable ({error})") from error
        if manifest["round"] != t or manifest.pop("sha256", None) not in (None, _digest(manifest)):
            raise CheckpointError(f"checkpoint of round {t} is damaged: {path} is not as it was written")
        if manifest.get("clients"):
            raise OldCheckpoint(
                f"{path}: was written by raysim 0.1, which wrote a file for each client. Resume the run with that version, "
                "or start it again in another folder"
            )
        return manifest | {"segments": manifest.get("segments", [])}

    def _verified(self, t: int) -> tuple[dict[str, Any], SavedStates]:
        """The manifest, and the states that it names. Of these only the newest segment is read whole: where an older one
        is damaged, so are the checkpoints before."""
        manifest = self._manifest(t)
        server = manifest["server"]
        damaged = f"checkpoint of round {t} is damaged"
        path = below(self.folder, server["file"])
        if not path.is_file():
            raise CheckpointError(f"{damaged}: {server['file']} is missing")
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != server["sha256"]:
                raise CheckpointError(f"{damaged}: {server['file']} is not as it was written")
        try:
            states = SavedStates(
                tuple(Segment.read(below(self.folder, entry["file"]), entry) for entry in manifest["segments"])
            )
            states.verify_newest()
        except FileNotFoundError as error:
            raise CheckpointError(f"{damaged}: {error.filename} is missing") from error
        except (OSError, DamagedFile) as error:
            raise CheckpointError(f"{damaged}: {error}") from error
        return manifest, states

    def _remove_all_but(self, rounds: list[int]) -> None:
        """Manifests first: a file may go only when no manifest mentions it."""
        for t in set(self._rounds()) - set(rounds):
            remove(self._path(t))
        mentioned: set[str] = set()
        for t in rounds:
            try:
                manifest = self._manifest(t)
            except CheckpointError:  # an old one, damaged since: nothing can be loaded through it
                continue
            mentioned.update(entry["file"] for entry in (manifest["server"], *manifest["segments"]))
        for path in [*self.folder.iterdir(), *self.folder.glob("*/*.safetensors")]:
            name = path.relative_to(self.folder).as_posix()
            if OWN.fullmatch(name) and name not in mentioned and not (path.is_dir() or path.parent.is_symlink()):
                remove(path)
        for folder in self.folder.glob("*/"):
            if OLD.fullmatch(folder.name) and not folder.is_symlink() and not any(folder.iterdir()):
                folder.rmdir()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
