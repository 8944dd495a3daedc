"""The time that raysim measures and waits for. Whatever decides by time takes a clock, so that a test can advance it."""

import time


class Clock:
    """This machine's time."""

    def now(self) -> float:
        """Seconds since some moment; they never go back."""
        return time.perf_counter()

    def wall(self) -> float:
        """Seconds since 1970, by this machine's clock, which may be set back."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


CLOCK = Clock()
