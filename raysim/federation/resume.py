"""What of a run is saved and brought back, and how two runs are compared."""

from __future__ import annotations

import hashlib
from collections import ChainMap, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from raysim.config import ConfigError, fingerprint
from raysim.core.server import Memory
from raysim.core.state import pack, unpack
from raysim.data import OF_FILES, Dataset, Partition
from raysim.engine.base import Engine, Handle
from raysim.federation.builder import RunParts, start
from raysim.federation.checkpoint import Checkpoints
from raysim.federation.given import check_given
from raysim.federation.initial import initial_value
from raysim.host.messages import Arrays
from raysim.store.documents import DamagedFile
from raysim.store.manifest import read_manifest
from raysim.store.segments import DIGEST, Kind, SavedStates, state_sha256


def check_samples(folder: Path, data: Dataset, partition: Partition) -> None:
    """Raises `ConfigError` where the data are not those that the run in the folder began with."""
    manifest = read_manifest(folder)
    if not manifest:
        return
    files = manifest.get("files_sha256")
    untouched = data.files is not None and data.files.times_sha256 == files
    for name, now in (("data", _comparable(data, manifest, untouched)), ("partition", partition.sha256())):
        if manifest.get(f"{name}_sha256") != now:
            raise ConfigError(f"{name}: not what the run in {folder} began with. Put it back, or start another run.")
    if manifest["data_sha256"].startswith(OF_FILES) and files is not None and not untouched:
        raise ConfigError(
            f"data: the files have the names and sizes that they had when the run in {folder} began, but other times, and a "
            "run that streams its data does not hash what they hold. Copy them with their times (cp -p, rsync -t). If you "
            f"know that nothing in them has changed, remove files_sha256 from {folder / 'manifest.json'}."
        )


def _comparable(data: Dataset, manifest: Mapping[str, Any], untouched: bool) -> str | None:
    """What the manifest has as `data_sha256` if the run began with these data. Of a run that began with streamed data it is a
    hash of files, else one of samples: samples that are streamed now are read for it, but not from files that are
    `untouched` since then."""
    was: str = manifest.get("data_sha256", "")
    if was.startswith(OF_FILES):
        return data.files.sha256 if data.files else None
    now = data.sha256()
    if now.startswith(OF_FILES):
        return was if untouched else data.contents_sha256()
    return now


class StateUnreadable(OSError):
    """A client's state cannot be read any more: its file was damaged or removed while the run went on."""


@dataclass(frozen=True)
class SavedArrays(Mapping[str, np.ndarray]):
    """Of a client's saved arrays those whose names begin with `part`: read when one is asked for."""

    states: SavedStates
    client: int
    part: str

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self.states[self.client][self.part + name]
        except (OSError, DamagedFile) as error:
            raise StateUnreadable(f"a client's state cannot be read from the checkpoint any more: {error}") from error

    def __iter__(self) -> Iterator[str]:
        names = self.states.kind(self.client).places
        return (name.removeprefix(self.part) for name in names if name.startswith(self.part))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class SavedHandles(Mapping[int, Handle]):
    """Handles of the clients' states, or of their last models, as the last checkpoint has them."""

    checkpoints: Checkpoints
    part: str
    engine: Engine

    def __getitem__(self, client: int) -> Handle:
        arrays = SavedArrays(self.checkpoints.states, client, self.part)
        if client not in self:
            raise KeyError(client)
        return self.engine.store(arrays)

    def __contains__(self, client: object) -> bool:
        return client in self.checkpoints.states and self._has(self.checkpoints.states.kind(cast(int, client)))

    def __iter__(self) -> Iterator[int]:
        return iter(self.checkpoints.states.clients_where(self._has))

    def __len__(self) -> int:
        return len(self.checkpoints.states.clients_where(self._has))

    def _has(self, kind: Kind) -> bool:
        return any(name.startswith(self.part) for name in kind.places)


class RunCheckpoints:
    """The checkpoints of a run: all that its next round depends on.

    What a checkpoint has of the clients need not stay in memory: what is more than the engine's `state_bytes` is let go
    once it is saved, and read again when the client takes part.
    """

    def __init__(self, run: RunParts, folder: Path):
        self.run, self.folder = run, folder
        self.checkpoints = Checkpoints(folder)
        self._changed: set[int] = set()  # clients whose state or model is newer than the last checkpoint
        self._held: OrderedDict[int, int] = OrderedDict()  # bytes of those in memory; the longest unchanged comes first
        self._bytes = 0  # of all of these
        for part, handles in self._parts().items():
            handles.maps.append(cast(Any, SavedHandles(self.checkpoints, part, run.engine)))

    def _parts(self) -> dict[str, ChainMap[int, Handle]]:
        """What is saved of a client, under which part of its arrays' names."""
        return {"state.": self.run.engine.client_states, "model.": self.run.engine.client_models}

    def change(self, clients: frozenset[int]) -> None:
        """These have another state or model than before."""
        self._changed |= clients

    def save(self, t: int, wall: float) -> None:
        """Save what round t, which is the next one, depends on, and the run's seconds so far. Raises `StateLost`."""
        server = self.run.server
        packed = pack({"value": server.value, "shared": server.shared, "memory": server.memory})
        info = {"round": t, "wall": wall, "config": fingerprint(self.run.config)}
        self.checkpoints.save(t, packed, info, self._states())
        self._let_go()
        self._changed.clear()

    def _let_go(self) -> None:
        """Of what is saved only the newest stays in memory."""
        states = self.checkpoints.states
        for client in sorted(self._changed & states.keys()):
            self._bytes -= self._held.pop(client, 0)
            self._held[client] = states.kind(client).size
            self._bytes += self._held[client]
        while self._bytes > self.run.engine.state_bytes:
            client, size = self._held.popitem(last=False)
            self._bytes -= size
            for handles in self._parts().values():
                handles.maps[0].pop(client, None)

    def restore(self) -> tuple[int, float]:
        """Go back to the last checkpoint, or to the start where there is none; returns the next round and the seconds
        until then. Raises `OldCheckpoint`."""
        run, server = self.run, self.run.server
        for handles in self._parts().values():
            handles.clear()
        self._changed.clear()
        self._held.clear()
        self._bytes = 0
        latest = self.checkpoints.latest()
        self.checkpoints.drop_after(0 if latest is None else latest)
        if latest is None:
            check_given(self.folder, run.config)
            start(server, initial_value(run.config, run.spec), run.aggregator, run.broadcast)
            return 0, 0.0
        saved = self.checkpoints.load(latest)
        unpacked = unpack(None, saved.server)
        server.value = unpacked["value"]
        server.shared, server.memory = unpacked.get("shared", {}), Memory(unpacked.get("memory", {}))
        if "serverft" in server.memory:  # where it was called so, by its class
            server.memory["server_ft"] = server.memory.pop("serverft")
        return latest, max(0.0, saved.info["wall"])  # below 0 where an older raysim saw the clock set back

    def digests(self) -> bytes:
        """Of all clients that keep anything, sorted: the id as 8 bytes, and the SHA-256 of what the client keeps. What is
        saved has been hashed when it was written. Raises `StateLost`."""
        saved = self.checkpoints.states.digests()
        newer = [(client, state_sha256(state)) for client, state in self._states()]
        table = np.concatenate([saved[~np.isin(saved["client"], [*self._changed])], np.array(newer, DIGEST)])
        return table[np.argsort(table["client"])].tobytes()

    def _states(self) -> Iterator[tuple[int, Arrays]]:
        """Of the clients that have changed, one by one."""
        for client in sorted(self._changed):
            if state := self._of_client(client):
                yield client, state

    def _of_client(self, client: int) -> Arrays:
        return {
            f"{part}{name}": array
            for part, handles in self._parts().items()
            if client in handles
            for name, array in self.run.engine.value_of(handles[client]).items()
        }


def sha256(run: RunParts, saved: RunCheckpoints) -> str:
    """Hash of the model's tensors under their names, and of what every client keeps. Raises `StateLost`."""
    digest = hashlib.sha256()
    for name, tensor in run.server.layers.state_dict(run.server.value).items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    digest.update(saved.digests())
    return digest.hexdigest()
