"""A clock that stands still until the test advances it."""

from raysim.clock import Clock


class ManualClock(Clock):
    """`sleep` advances it and returns at once; so does each look at it, by `tick` seconds."""

    def __init__(self, seconds: float = 0.0, tick: float = 0.0):
        self.seconds, self.tick = seconds, tick

    def now(self) -> float:
        self.seconds += self.tick
        return self.seconds

    def wall(self) -> float:
        return self.now()

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
