"""The engine in this process: one host, called directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysim.engine.base import Call, Engine, Handle, HostLost, machine_failure
from raysim.engine.state_store import StateStore
from raysim.host.host import ClientHost
from raysim.host.messages import Arrays, TrainReply


@dataclass
class LocalEngine(Engine):
    """Trains one client after the other; for debugging, notebooks, and machines without Ray."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._host = ClientHost(self.spec, self.data, self.partition)
        self.state_store = StateStore(self.state_bytes)
        # Arrays are stored as they are made: all that a work unit brings may be more than fits into memory.
        self._host.store = self.state_store.put
        self.nodes = ["local"]

    @property
    def hosts(self) -> Sequence[ClientHost]:
        return [self._host]

    def call(self, call: Call) -> Handle:
        try:
            return getattr(self._host, call.method)(*call.args)
        except Exception as error:
            if failure := machine_failure(error, self.nodes[0]):
                raise failure from error
            raise

    def train(self, call: Call) -> list[Handle]:
        reply: TrainReply = self.call(call)
        return reply.detach(call.args[0])

    def fetch(self, calls: Sequence[tuple[int, Handle]]) -> list[Any]:
        return [handle for _, handle in calls]

    def put(self, value: Any) -> Handle:
        return value

    def store(self, arrays: Arrays) -> Handle:
        return arrays  # which are read from there when they are needed

    def value_of(self, handle: Handle) -> Any:
        return handle

    def replace(self, lost: HostLost) -> str:
        raise AssertionError("a host in this process cannot be lost alone")

    def close(self) -> None:
        self._host.close()
