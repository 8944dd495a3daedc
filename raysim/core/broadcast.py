"""What the server sends: its model, as it is or encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.core.message import FLOAT, Message, Transform
from raysim.core.rng import SERVER, generator
from raysim.core.server import Server
from raysim.lazy import Tensor, torch

SLOT = "download"  # of the server's memory


@dataclass(frozen=True)
class ServerSender:
    """The server as a `raysim.core.message.Sender`, of its message in round t."""

    server: Server
    t: int

    def generator(self, purpose: str) -> torch.Generator:
        return generator(self.server.seed, self.t, SERVER, purpose)

    def state(self, method: Any) -> Any:
        states, fresh = self.server.memory[SLOT]["states"], method.new_state(self.server.layers)
        if not isinstance(states.get(method.name), type(fresh)):  # a checkpoint has its fields
            states[method.name] = type(fresh)(**states.get(method.name, vars(fresh)))
        return states[method.name]


@dataclass(frozen=True)
class Broadcast:
    """The server's one message a round to all clients. Encoded, it makes a public model θ̂, from which clients train, while the
    server keeps θ.

    Transforms that can encode a whole model do so in every round: θ̂_t = C(θ_t). Others encode what has changed, after a first
    message that is whole: θ̂_t = θ̂_{t-1} + C(θ_t - θ̂_{t-1}). Then a client needs all messages since its last round, or one
    whole model, whichever is shorter. Buffers are sent as they are.
    """

    transforms: tuple[Transform, ...]
    private: str | None = None  # layers that are not sent

    @property
    def of_changes(self) -> bool:
        """Whether messages hold what has changed."""
        return not all(transform.encodes_models for transform in self.transforms)

    def public(self, server: Server) -> Tensor:
        """The model [S] that clients are sent."""
        public: Tensor = server.memory[SLOT]["model"] if self.transforms else server.value
        return public

    def prepare(self, server: Server) -> None:
        """Make the message of the first round."""
        if self.transforms:
            seen = torch.full((len(server.population.sizes),), -1)
            server.memory[SLOT] = {"states": {}, "seen": seen, "costs": torch.zeros(0, 3, dtype=torch.long)}
            self.encode(server, 0)

    def encode(self, server: Server, t: int) -> None:
        """Make the message of round t from the server's model."""
        if not self.transforms:
            return
        slot, P = server.memory[SLOT], server.layers.P
        base = slot.get("model") if self.of_changes else None
        update = server.value.clone()
        if base is not None:
            update[:P] -= base[:P]
        message = Message(update, server.layers, private=self.private)
        if base is not None or not self.of_changes:
            message.encode(self.transforms, ServerSender(server, t))
        if base is not None:
            update[:P] += base[:P]
        costs = torch.from_numpy(message.costs[:, : server.layers.T].sum(1))
        server.memory[SLOT] = slot | {"model": update, "costs": torch.cat([slot["costs"], costs[None]])}

    def costs(self, server: Server, clients: Sequence[int]) -> np.ndarray | None:
        """[K, 3] bytes, by `raysim.core.message.COSTS`, of parameters that `clients` would be sent in this round; None where the
        model is sent as it is."""
        if not self.transforms:
            return None
        slot, t, costs = server.memory[SLOT], server.t, []
        made, whole = slot["costs"].numpy(), self._whole(server)
        times, of = np.unique(slot["seen"].numpy()[list(clients)], return_inverse=True)
        for last in times.tolist():
            missed = made[last + 1 : t + 1].sum(0) if self.of_changes and last >= 0 else made[t]
            first = self.of_changes and last < 0
            costs.append(whole if first or missed.sum() > whole[0] else missed)
        return np.array(costs, np.int64).reshape(-1, 3)[of]

    def deliver(self, server: Server, clients: Sequence[int]) -> np.ndarray | None:
        """The `costs`; then `clients` have the newest model."""
        costs = self.costs(server, clients)
        if costs is not None:
            seen = server.memory[SLOT]["seen"].clone()
            seen[list(clients)] = server.t
            server.memory[SLOT] = server.memory[SLOT] | {"seen": seen}
        return costs

    def _whole(self, server: Server) -> tuple[int, int, int]:
        """Bytes of the parameters as they are."""
        layers = server.layers
        sent = ~layers.where(self.private)[: layers.T] if self.private else slice(None)
        return FLOAT * int(layers.sizes[: layers.T][sent].sum()), 0, 0
