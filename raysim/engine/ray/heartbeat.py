"""Signs of life of an actor whose only thread is at work, left in the cluster's own key-value store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from raysim.clock import Clock

EVERY = 15.0  # seconds from one sign to the next, at most: a thousand actors then send 70 a second
_SPACE = b"raysim.heartbeat"


class Heartbeat:
    """Sends signs from a thread of its own: that the process lives, whether it is at work, and how far it got."""

    def __init__(self, actor_id: str):
        self._key = actor_id.encode()
        self._progress = 0
        self._calls = 0  # under way; they nest
        self._by_client = False
        self._every = EVERY
        self._sooner = threading.Event()
        threading.Thread(target=self._send, daemon=True).start()

    def send_every(self, seconds: float) -> None:
        """Send signs at this interval, or at `EVERY` seconds if that is shorter."""
        self._every = min(seconds, EVERY)
        self._sooner.set()

    def beat(self, *_: Any) -> None:
        """Some work is done: a client has begun, a batch is tested. Costs nothing."""
        self._progress += 1

    def batch(self, *_: Any) -> None:
        """A batch goes through the model."""
        if not self._by_client:
            self._progress += 1

    @contextmanager
    def by_client(self) -> Iterator[None]:
        """Only clients count as progress: one that trains for ever hangs, too."""
        self._by_client = True
        try:
            yield
        finally:
            self._by_client = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A call is under way. One that waits for what another host makes has not begun."""
        self._calls += 1
        self._progress += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _send(self) -> None:
        for sign in itertools.count():
            at_work = int(self._calls > 0)
            with suppress(RayError):  # the store does not answer now; it may the next time
                _internal_kv_put(self._key, f"{at_work} {self._progress} {sign}", True, namespace=_SPACE)
            self._sooner.wait(self._every)
            self._sooner.clear()


class HeartbeatMonitor:
    """Finds the actors that hang, by the signs that they send."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[tuple[bool, bytes], float]] = {}  # by actor: the last that was new, and when

    def listen(self, actor_id: str, limit: float) -> tuple[bool, bool]:
        """Whether the actor is at work, and whether it has hung for `limit` seconds.

        At work, it must get on. Waiting, for another host's result, it must give any sign.
        """
        sign: bytes = _internal_kv_get(actor_id, namespace=_SPACE) or b"0 0 0"
        at_work, progress, number = sign.split()
        news = (at_work == b"1", progress if at_work == b"1" else number)
        heard, since = self._heard.get(actor_id, (None, 0.0))
        if news != heard:
            self._heard[actor_id] = news, self._clock.now()
            return news[0], False
        return news[0], self._clock.now() - since >= limit

    def drop(self, actor_id: str) -> None:
        """The actor is gone."""
        self._heard.pop(actor_id, None)
        _internal_kv_del(actor_id, namespace=_SPACE)
