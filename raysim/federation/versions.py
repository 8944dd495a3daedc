"""The server's older models, from which clients still train, and when these were the newest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from raysim.core.local_run import RoundInfo
from raysim.core.rng import SERVER, stream_seed
from raysim.core.selection import VERSIONS, Asked
from raysim.core.server import Server
from raysim.engine.base import Engine, Handle
from raysim.engine.requests import Start
from raysim.lazy import Tensor, torch


class Versions:
    """What the clients of asynchronous rounds were sent. The models are saved with the server's memory."""

    def __init__(self, engine: Engine, learning_rate: Callable[[int], float]):
        self._engine, self._learning_rate = engine, learning_rate
        self._handles: dict[int, Handle] = {}

    def starts(self, asked: Asked, server: Server) -> dict[int, Start]:
        """Where the clients that were sent older models begin; models that none needs any more are let go."""
        if not asked.versions:
            return {}
        kept: dict[str, Tensor] = server.memory.get(VERSIONS, {}) | {str(server.t): server.value}
        alive = {*asked.versions, *asked.in_flight}
        server.memory[VERSIONS] = {version: value for version, value in kept.items() if int(version) in alive}
        self._handles[server.t] = self._engine.published_public
        self._handles = {version: handle for version, handle in self._handles.items() if version in alive}
        sent = {*zip(asked.versions, asked.repeats, strict=True)} - {(server.t, 0)}
        made = {(version, repeat): self._start(server, version, repeat) for version, repeat in sent}
        of_clients = zip(asked.clients, zip(asked.versions, asked.repeats, strict=True), strict=True)
        return {client: made[version] for client, version in of_clients if version in made}

    def _start(self, server: Server, version: int, repeat: int) -> Start:
        if version not in self._handles:  # the run was resumed
            self._handles[version] = self._engine.put(server.memory[VERSIONS][str(version)].numpy())
        info = round_info(server, version, self._learning_rate(version))
        if repeat:  # other batches than the last time
            info = replace(info, seed=stream_seed(info.seed, version, SERVER, f"repeat {repeat}"))
        return Start(info, self._handles[version])

    def buffers(self, clients: Sequence[int], server: Server) -> Tensor | None:
        """[K, B] the buffers with which the clients began; None: with the newest."""
        asked = server.scratch.asked
        if asked is None or not asked.versions:
            return None
        models = server.memory[VERSIONS]
        return torch.stack([models[str(asked.version(client))][server.layers.P :] for client in clients])


def round_info(server: Server, t: int | None = None, lr: float | None = None) -> RoundInfo:
    """What the server and every client know of the server's round, or of an earlier one."""
    population = server.population
    mean_samples = int(population.sizes.sum()) / population.holders
    t, lr = server.t if t is None else t, server.lr if lr is None else lr
    return RoundInfo(server.seed, t, server.rounds, len(population.sizes), lr, mean_samples)
