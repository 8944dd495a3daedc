"""Signals that ask a run to stop: the first waits for the round in progress, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading


class Interrupts:
    """Handles `signals` inside its `with` block; `received` is the last one that came. Only a main thread gets any."""

    def __init__(self, *signals: signal.Signals, patient: bool = False) -> None:
        self.received: int | None = None
        self.patient = patient  # if not, there is nothing to wait for, and the first stops at once as well
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.getsignal(number) for number in self._signals}
        self.install()
        return self

    def install(self) -> None:
        """Put the handlers in place, again if other code has put in others."""
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
