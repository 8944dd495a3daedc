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
from typing import Any

import numpy as np
from safetensors.torch import load
from torch import Tensor

from raysim.store.atomic import write_json, write_tensors

logger = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint is missing or not as it was written."""


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
        written = self._write(f"round-{t:06d}/server.safetensors", server)
        for client, state in clients:
            states[str(client)] = self._write(f"states/client-{client:05d}-round-{t:06d}.safetensors", state)
        write_json(self._path(t), {"round": t, "server": written, "clients": states, "info": info})
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
        server = load((self.folder / manifest["server"]["file"]).read_bytes())
        clients = {int(client): self.folder / entry["file"] for client, entry in manifest["clients"].items()}
        return Saved(server, manifest["info"], clients)

    @staticmethod
    def load_client(path: Path) -> dict[str, Tensor]:
        # Read, not mapped: the tensors outlive the file, which a later save removes.
        return load(path.read_bytes())

    def _path(self, t: int) -> Path:
        return self.folder / f"round-{t:06d}.json"

    def _rounds(self) -> list[int]:
        names = (re.fullmatch(r"round-(\d+)\.json", path.name) for path in self.folder.glob("round-*.json"))
        return sorted(int(match[1]) for match in names if match)

    def _write(self, file: str, tensors: Mapping[str, Tensor | np.ndarray]) -> dict[str, str]:
        return {"file": file, "sha256": write_tensors(self.folder / file, tensors)}

    def _manifest(self, t: int) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(self._path(t).read_text(encoding="utf-8"))
            entries = [manifest["server"], *manifest["clients"].values()]
            if not all(isinstance(entry[key], str) for entry in entries for key in ("file", "sha256")):
                raise TypeError("a file is not described by two strings")
            manifest["info"]
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no checkpoint of round {t}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"checkpoint of round {t} is damaged: {self._path(t)} is unreadable") from error
        return manifest

    def _verified(self, t: int) -> dict[str, Any]:
        manifest = self._manifest(t)
        for entry in (manifest["server"], *manifest["clients"].values()):
            try:
                with open(self.folder / entry["file"], "rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except FileNotFoundError as error:
                raise CheckpointError(f"checkpoint of round {t} is damaged: {entry['file']} is missing") from error
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
