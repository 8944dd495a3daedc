"""Signs of life of an actor whose only thread is at work, left in the cluster's own key-value store."""

from __future__ import annotations

import time

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

EVERY = 5.0  # seconds from one sign to the next; short clients cost nothing
_SPACE = b"raysim.pulse"


class Pulse:
    """Called by an actor before each client."""

    def __init__(self, actor_id: str):
        self._key, self._due = actor_id.encode(), 0.0

    def beat(self, client: int) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + EVERY
            _internal_kv_put(self._key, f"{now} {client}", namespace=_SPACE)


def last_beat(actor_id: str) -> bytes | None:
    """Changes with every sign of the actor."""
    beat: bytes | None = _internal_kv_get(actor_id, namespace=_SPACE)
    return beat


def forget(actor_id: str) -> None:
    """The actor is gone."""
    _internal_kv_del(actor_id, namespace=_SPACE)
