"""Checkpoints that survive a kill at any moment. Nothing is pickled.

<run>/checkpoints/round-000010.json                                 manifest, written last: it makes the checkpoint
<run>/checkpoints/round-000010/server.safetensors
<run>/checkpoints/states/client-00007-round-000010.safetensors      rewritten only when the client took part
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import Field
from safetensors.torch import load
from torch import Tensor
from typing_extensions import TypedDict

from raysim.paths import UnsafeName, below
from raysim.store.atomic import subfolder, write_json, write_tensors
from raysim.store.documents import OPEN_SHAPE, DamagedFile, read_json

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint is missing or not as it was written."""


class Entry(TypedDict):
    """A file of a checkpoint, below its folder."""

    file: str
    sha256: str


class Info(TypedDict):
    """What the caller of `Checkpoints.save` adds, and of it what a resumed run computes with."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    wall: NotRequired[Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class CheckpointManifest(TypedDict):
    """The JSON file that makes a checkpoint."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    round: int
    server: Entry
    clients: dict[Annotated[str, Field(pattern=r"^[0-9]{1,15}$")], Entry]
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
    """A loaded checkpoint. Client states stay on disk until `Checkpoints.load_client` is asked for one."""

    server: dict[str, Tensor]
    info: dict[str, Any]
    clients: dict[int, Path]


class Checkpoints:
    """The checkpoints of the run in `folder`; the last `keep` are kept. One process at a time may own them."""

    def __init__(self, folder: Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep is {keep}, but a run needs at least one checkpoint")
        self.folder = Path(folder) / "checkpoints"
        self.keep = keep
        # The checkpoint that the run continues, and its client files by id: those of unchanged clients carry over.
        self._base: int | None = None
        self._states: dict[str, dict[str, str]] = {}
        self._warned: set[int] = set()  # damaged checkpoints that were named
        for temporary in self.folder.rglob(".*.tmp"):
            temporary.unlink()

    def save(
        self,
        t: int,
        server: Mapping[str, Tensor],
        info: Mapping[str, Any],
        clients: Iterable[tuple[int, Mapping[str, Tensor | np.ndarray]]] = (),
    ) -> None:
        """Save round `t`. `clients` yields (id, state) of those that changed since the last save or load, one by one.

        `info` must be JSON, and comes back as JSON does: tuples as lists, keys as strings. Checkpoints that do not
        lead to this one (a damaged one, rounds that are played again) are removed. Raises ValueError where it would
        be a guess which states carry over: the folder holds a checkpoint and none was loaded, or `t` lies before it.
        """
        json.dumps(info)  # before anything is written
        if self._base is None and (found := self.latest()) is not None:
            raise ValueError(f"the folder holds a checkpoint of round {found}: load it, or start in an empty folder")
        if self._base is not None and t < self._base:
            raise ValueError(f"cannot save round {t} after round {self._base}")
        states = dict(self._states)
        if self._base is None:
            subfolder(self.folder)
        subfolder(self.folder / f"round-{t:06d}")
        written = self._write(f"round-{t:06d}/server.safetensors", server)
        for client, state in clients:
            if not states:
                subfolder(self.folder / "states")
            states[str(client)] = self._write(f"states/client-{client:05d}-round-{t:06d}.safetensors", state)
        manifest = json.loads(
            json.dumps({"round": t, "server": written, "clients": states, "info": info})
        )  # as it is read
        write_json(self._path(t), manifest | {"sha256": _digest(manifest)})
        history = [] if self._base is None else [r for r in self._rounds() if r <= self._base and r != t]
        self._base, self._states = t, states
        self._remove_all_but([*history, t][-self.keep :])

    def latest(self) -> int | None:
        """The newest checkpoint whose files are all there and intact; a damaged one is passed over with a warning."""
        for t in reversed(self._rounds()):
            try:
                self._verified(t)
            except CheckpointError as error:
                if t not in self._warned:
                    earlier = any(r < t for r in self._rounds())
                    consequence = (
                        "taking the checkpoint before it"
                        if earlier
                        else "there is none before it, so the run starts anew"
                    )
                    logger.warning("%s; %s", error, consequence)
                self._warned.add(t)
            else:
                return t
        return None

    def load(self, t: int) -> Saved:
        """Load round `t`; later saves continue from it. Raises CheckpointError, naming the file, if one is damaged."""
        manifest = self._verified(t)
        self._base, self._states = t, manifest["clients"]
        server = self.load_client(below(self.folder, manifest["server"]["file"]))
        clients = {int(client): below(self.folder, entry["file"]) for client, entry in manifest["clients"].items()}
        return Saved(server, _Info(manifest["info"], self._path(t)), clients)

    @staticmethod
    def load_client(path: Path) -> dict[str, Tensor]:
        # Read, not mapped: the tensors outlive the file, which a later save removes.
        content = path.read_bytes()
        try:
            return load(content)
        except Exception as error:  # safetensors has an error of its own, torch several
            raise CheckpointError(f"{path} is damaged: it does not hold tensors ({error})") from error

    def _path(self, t: int) -> Path:
        return self.folder / f"round-{t:06d}.json"

    def _rounds(self) -> list[int]:
        names = (re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.folder.glob("round-*.json"))
        return sorted(int(match[1]) for match in names if match)

    def _write(self, file: str, tensors: Mapping[str, Tensor | np.ndarray]) -> dict[str, str]:
        return {"file": file, "sha256": write_tensors(self.folder / file, tensors)}

    def _manifest(self, t: int) -> dict[str, Any]:
        path = self._path(t)
        try:
            manifest: dict[str, Any] = dict(read_json(path, CheckpointManifest))
            for entry in (manifest["server"], *manifest["clients"].values()):
                below(self.folder, entry["file"])
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no checkpoint of round {t}") from error
        except (OSError, DamagedFile, UnsafeName) as error:
            raise CheckpointError(f"checkpoint of round {t} is damaged: {path} is unreadable ({error})") from error
        if manifest["round"] != t or manifest.pop("sha256", None) not in (None, _digest(manifest)):
            raise CheckpointError(f"checkpoint of round {t} is damaged: {path} is not as it was written")
        return manifest

    def _verified(self, t: int) -> dict[str, Any]:
        manifest = self._manifest(t)
        for entry in (manifest["server"], *manifest["clients"].values()):
            path = below(self.folder, entry["file"])
            if not path.is_file():
                raise CheckpointError(f"checkpoint of round {t} is damaged: {entry['file']} is missing")
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != entry["sha256"]:
                raise CheckpointError(f"checkpoint of round {t} is damaged: {entry['file']} is not as it was written")
        return manifest

    def _remove_all_but(self, rounds: list[int]) -> None:
        """Manifests first: a file may go only when no manifest mentions it."""
        for t in set(self._rounds()) - set(rounds):
            self._path(t).unlink()
        mentioned: set[str] = set()
        for t in rounds:
            try:
                manifest = self._manifest(t)
            except CheckpointError:  # an old one, damaged since: nothing can be loaded through it
                continue
            mentioned.update(entry["file"] for entry in (manifest["server"], *manifest["clients"].values()))
        for path in self.folder.glob("*/*.safetensors"):
            if path.relative_to(self.folder).as_posix() not in mentioned:
                path.unlink()
        for folder in self.folder.glob("round-*/"):
            if not any(folder.iterdir()):
                folder.rmdir()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
