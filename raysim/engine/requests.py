"""What hosts need to know of a round: which clients, what these are sent, and references to the states and models they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from raysim.core.attack import Attackers
from raysim.core.local_run import RoundInfo
from raysim.core.server import Downlink
from raysim.engine.base import Call, Engine, Handle
from raysim.host.messages import TrainRequest


@dataclass(frozen=True, eq=False)
class Start:
    """A model from which clients train that is not the newest."""

    round_info: RoundInfo  # of the round in which it was the newest
    value: Handle  # [S]


@dataclass(frozen=True)
class Requests:
    """Makes the calls that concern the clients `asked` (sorted), who are sent what `downlink` says."""

    engine: Engine
    round_info: RoundInfo
    asked: tuple[int, ...]
    downlink: Downlink
    attackers: Attackers = field(default_factory=Attackers)
    starts: Mapping[int, Start] = field(default_factory=dict)  # of clients that were sent an older model
    known: dict[int, Handle] = field(default_factory=dict)  # attack -> what its clients know of the others

    @cached_property
    def _position(self) -> dict[int, int]:
        return {client: i for i, client in enumerate(self.asked)}

    @cached_property
    def _groups(self) -> dict[int, tuple[int, ...]]:
        together, groups = self.engine.spec.batch_clients, dict[int, tuple[int, ...]]()
        kinds = dict[tuple[bool, Start | None], list[int]]()
        for client in self.asked:
            kinds.setdefault((self.attackers.waits(client), self.starts.get(client)), []).append(client)
        for company in kinds.values():
            for i in range(0, len(company), together):
                group = tuple(company[i : i + together])
                groups |= dict.fromkeys(group, group)
        return groups

    def group(self, client: int) -> tuple[int, ...]:
        """The clients that train together with it, in order: all start from one model, in one part of the round."""
        return self._groups[client]

    def call(self, host: int, method: str, clients: Sequence[int], **options: Any) -> Call:
        """`method` of a host for some of the clients; `options` are further fields of the request."""
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
        attacks = {c: own for c in clients if (own := self.attackers.attacks_of(c))}
        known_index = {}
        for attack in sorted({*chain(*attacks.values())} & self.known.keys()):
            known_index[attack] = len(objects)
            objects.append(self.known[attack])
        groups = tuple(dict.fromkeys(map(self.group, clients))) if engine.spec.batch_clients > 1 else ()
        begin = {client: self.starts[client] for client in clients if client in self.starts}
        start_index = {start: len(objects) + i for i, start in enumerate(dict.fromkeys(begin.values()))}
        objects += [start.value for start in start_index]
        starts = {client: (start.round_info, start_index[start]) for client, start in begin.items()}
        request = TrainRequest(
            self.round_info, tuple(clients), state_index, model_index, mix=mix, peers=peers,
            starts=starts, attacks=attacks, known_index=known_index, groups=groups, **options,
        )  # fmt: skip
        return Call(host, method, (request, engine.published_public, engine.published_shared, *objects))
