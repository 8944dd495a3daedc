"""What hosts need to know of a round: which clients, what these are sent, and references to the states and models they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raysim.core.local_run import RoundInfo
from raysim.core.server import Downlink
from raysim.engine.base import Call, Engine, Handle
from raysim.host.messages import TrainRequest


@dataclass(frozen=True)
class Requests:
    """Makes the calls that concern the clients `asked` (sorted), who are sent what `downlink` says."""

    engine: Engine
    round_info: RoundInfo
    asked: tuple[int, ...]
    downlink: Downlink

    @cached_property
    def _position(self) -> dict[int, int]:
        return {client: i for i, client in enumerate(self.asked)}

    def group(self, client: int) -> tuple[int, ...]:
        """The clients with whom it trains: a run of those asked, wherever they train."""
        together = self.engine.spec.batch_clients
        first = self._position[client] // together * together
        return self.asked[first : first + together]

    def call(self, host: int, method: str, clients: Sequence[int], **options: Any) -> Call:
        """`method` of a host for some of the clients; `options` are further fields of the `TrainRequest`."""
        engine, down = self.engine, self.downlink
        objects: list[Handle] = []
        state_index, model_index = {}, {}
        for client in clients:
            handle = engine.client_states.get(client, engine.initial_state)
            if handle is not None:
                state_index[client] = len(objects)
                objects.append(handle)
        mix = None
        needed: set[int] = set()  # clients whose last models go along
        if down.mix is not None:
            rows = {c: down.mix[self._position[c]].tolist() for c in clients}
            mix = {c: tuple((m, w) for m, w in zip(down.models, row, strict=True) if w) for c, row in rows.items()}
            needed |= {*clients, *(model for row in mix.values() for model, _ in row)}
        peers = {c: down.peers[self._position[c]] for c in clients} if down.peers else {}
        needed |= {peer for row in peers.values() for peer in row}
        if engine.spec.stack.peer_models:
            needed |= {*clients}  # their own: `run.previous`
        for peer in sorted(needed & engine.client_models.keys()):
            model_index[peer] = len(objects)
            objects.append(engine.client_models[peer])
        groups = tuple(dict.fromkeys(map(self.group, clients))) if engine.spec.batch_clients > 1 else ()
        request = TrainRequest(
            self.round_info, tuple(clients), state_index, model_index, mix=mix, peers=peers, groups=groups, **options
        )
        return Call(host, method, (request, engine.published_public, engine.published_shared, *objects))
