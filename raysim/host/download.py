"""What a host's clients are sent, and what they still hold of their last round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysim.core.arrays import on_device
from raysim.core.local_run import RoundInfo
from raysim.host.messages import Arrays, TrainRequest
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class Download:
    """A request with the objects that came with it."""

    request: TrainRequest
    newest: Tensor  # [S] the global model
    shared: Mapping[str, Tensor]  # what travels with it
    objects: Sequence[Any]  # states and models, see `TrainRequest`
    older: dict[int, Tensor] = field(default_factory=dict)  # global models, by their index in `objects`, once asked for

    @classmethod
    def of(
        cls, request: TrainRequest, value: np.ndarray, shared: Arrays, objects: Sequence[Arrays],
        device: torch.device,
    ) -> Download:  # fmt: skip
        tensors = {name: on_device(array, device) for name, array in shared.items()}
        return cls(request, on_device(value, device), tensors, objects)

    def server(self, client: int) -> Tensor:
        """The global model [S] that the client was sent."""
        if client not in self.request.starts:
            return self.newest
        _, index = self.request.starts[client]
        if index not in self.older:
            self.older[index] = on_device(self.objects[index], self.newest.device)
        return self.older[index]

    def round_info(self, client: int) -> RoundInfo:
        """Of the round in which that model was the newest."""
        return self.request.starts[client][0] if client in self.request.starts else self.request.round_info

    def state(self, client: int) -> Arrays:
        """What the client keeps between rounds; nothing where it has not taken part."""
        index = self.request.state_index.get(client)
        return {} if index is None else self.objects[index]

    def known(self, attack: int) -> Tensor | None:
        """What the clients of an attack know of the others."""
        index = self.request.known_index.get(attack)
        return None if index is None else on_device(self.objects[index]["value"], self.newest.device)

    def peers(self, client: int) -> PeerModels:
        """The models of others that the client is sent."""
        return PeerModels(self.request, client, self.server(client), self.objects)

    def received(self, client: int, P: int) -> Tensor:
        """The model [S] that the client is sent, with P parameters."""
        mix = self.request.mix
        return self.server(client) if mix is None else mixed(self.peers(client), client, mix[client], P)


@dataclass(frozen=True)
class PeerModels(Mapping[int, Tensor]):
    """The models a client is sent, by client, in the order of the plan. Each is read when it is asked for, because all
    of them together may be more than fits into memory."""

    request: TrainRequest
    client: int
    server: Tensor
    objects: Sequence[Arrays]

    def model(self, client: int) -> Tensor:
        """The last model [S] of any client of the request; one that has not taken part yet has the global model."""
        index = self.request.model_index.get(client)
        return self.server if index is None else on_device(self.objects[index]["value"], self.server.device)

    @property
    def _clients(self) -> tuple[int, ...]:
        return self.request.peers.get(self.client, ())

    def __getitem__(self, client: int) -> Tensor:
        if client not in self._clients:
            raise KeyError(client)
        return self.model(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def mixed(models: PeerModels, client: int, weights: Sequence[tuple[int, float]], P: int) -> Tensor:
    """The client's own model w, with the parameters w + Σ_m weight_m (w_m − w): small differences of large models are
    kept, and so are buffers."""
    own = models.model(client)
    result = own.clone()
    for peer, weight in weights:
        if peer != client:
            result[:P].add_(models.model(peer)[:P] - own[:P], alpha=weight)
    return result
