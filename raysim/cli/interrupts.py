"""Ctrl-C and SIGTERM: the first waits for the round in progress, the second stops at once."""

from __future__ import annotations

import os
import signal


class Interrupts:
    """Handles both signals inside its `with` block; `received` is the last one that came."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.patient = False  # before the first round there is nothing to wait for

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def install(self) -> None:
        for number in self._before:
            signal.signal(number, self._on)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on(self, number: int, frame: object) -> None:
        first, self.received = self.received is None, number
        if not (first and self.patient):
            raise KeyboardInterrupt
        os.write(2, b"\nStopping after this round; once more stops at once.\n")  # print is not safe in a signal handler

    @property
    def status(self) -> int:
        """The exit code of a process that the signal stopped."""
        return 128 + (self.received or signal.SIGINT)
