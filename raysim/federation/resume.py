"""What of a run is saved and brought back, and how two runs are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raysim.config import ConfigError, fingerprint
from raysim.core.state import pack, unpack
from raysim.data import Dataset, Partition
from raysim.engine.base import Engine
from raysim.federation.builder import RunParts, start
from raysim.federation.checkpoint import Checkpoints
from raysim.host.messages import Arrays
from raysim.store.manifest import read_manifest


def check_samples(folder: Path, data: Dataset, partition: Partition) -> None:
    """Raises `ConfigError` where the data are not those that the run in the folder began with."""
    manifest = read_manifest(folder)
    for name, now in (("data", data.sha256()), ("partition", partition.sha256())):
        if manifest and manifest.get(f"{name}_sha256") != now:
            raise ConfigError(f"{name}: not what the run in {folder} began with. Put it back, or start another run.")


def check_device(folder: Path, engine: Engine) -> None:
    """Raises `ConfigError`, and closes the engine, where the run in the folder began on another kind of device."""
    now = engine.device()
    began = read_manifest(folder).get("device", now)
    if began != now:
        engine.close()
        raise ConfigError(
            f"engine: the run in {folder} began on {began}, and this engine computes on {now}, which rounds differently. "
            "Choose the device that it began on, or start another run."
        )


class RunCheckpoints:
    """The checkpoints of a run: all that its next round depends on."""

    def __init__(self, run: RunParts, folder: Path):
        self.run = run
        self.checkpoints = Checkpoints(folder)
        self._changed: set[int] = set()  # clients whose state or model is newer than the last checkpoint

    def change(self, clients: frozenset[int]) -> None:
        """These have another state or model than before."""
        self._changed |= clients

    def save(self, t: int, wall: float) -> None:
        """Save what round t, which is the next one, depends on, and the seconds played so far. Raises `StateLost`."""
        server = self.run.server
        packed = pack({"value": server.value, "shared": server.shared, "memory": server.memory})
        info = {"round": t, "wall": wall, "config": fingerprint(self.run.config)}
        self.checkpoints.save(t, packed, info, self._states())
        self._changed.clear()

    def restore(self) -> tuple[int, float]:
        """Go back to the last checkpoint, or to the start where there is none; returns the next round and the seconds
        played until then."""
        run, engine, server = self.run, self.run.engine, self.run.server
        engine.client_states.clear()
        engine.client_models.clear()
        self._changed.clear()
        latest = self.checkpoints.latest()
        if latest is None:
            start(server, run.config, run.spec, run.aggregator)
            return 0, 0.0
        saved = self.checkpoints.load(latest)
        unpacked = unpack(None, saved.server)
        server.value = unpacked["value"]
        server.shared, server.memory = unpacked.get("shared", {}), unpacked.get("memory", {})
        for client, path in saved.clients.items():
            parts: dict[str, dict[str, np.ndarray]] = {"kept": {}, "bank": {}}
            for name, tensor in self.checkpoints.load_client(path).items():
                part, _, key = name.partition(".")
                parts[part][key] = tensor.numpy()
            if parts["kept"]:
                engine.client_states[client] = engine.store(parts["kept"])
            if parts["bank"]:
                engine.client_models[client] = engine.store(parts["bank"])
        return latest, saved.info["wall"]

    def _states(self) -> Iterator[tuple[int, Arrays]]:
        """Of the clients that have changed, one by one."""
        for client in sorted(self._changed):
            if state := self._of_client(client):
                yield client, state

    def _of_client(self, client: int) -> Arrays:
        engine = self.run.engine
        parts = {"kept": engine.client_states.get(client), "bank": engine.client_models.get(client)}
        return {
            f"{part}.{name}": array
            for part, handle in parts.items()
            if handle is not None
            for name, array in engine.value_of(handle).items()
        }


def sha256(run: RunParts) -> str:
    """Hash of the model's tensors under their names, of the clients' states, and of their last models. Raises
    `StateLost`."""
    digest = hashlib.sha256()

    def update(tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())

    engine = run.engine
    update(run.server.layers.state_dict(run.server.value))
    for prefix, handles in (("", engine.client_states), ("bank.", engine.client_models)):
        for client in sorted(handles):
            arrays = engine.value_of(handles[client])
            update({f"{prefix}{client}.{name}": torch.from_numpy(a) for name, a in sorted(arrays.items())})
    return digest.hexdigest()
