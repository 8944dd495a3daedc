"""Time without a machine's speed: a clock that stands still until the test advances it, and work counted in calls."""

import sys
from collections.abc import Callable

from raysim.clock import Clock


class ManualClock(Clock):
    """`sleep` advances it and returns at once; so does each look at it, by `tick` seconds. `wall` may be set back."""

    def __init__(self, tick: float = 0.0):
        self.seconds, self.tick, self.set_back = 0.0, tick, 0.0

    def now(self) -> float:
        self.seconds += self.tick
        return self.seconds

    def wall(self) -> float:
        return self.now() - self.set_back

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def calls(work: Callable[[], object]) -> int:
    """How many functions `work` calls, those written in C among them: as many on every machine."""
    made = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made
