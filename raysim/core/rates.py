"""Rates that change from round to round."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar

from raysim.core.bounds import Fraction, Positive, PositiveInt
from raysim.core.hooks import form, misused
from raysim.registry import REGISTRY, Catalogue, Table


class Schedule(ABC):
    """What a rate is multiplied by in each round. Subclasses are frozen dataclasses of settings."""

    total_rounds: ClassVar[bool] = False
    """Whether `factor` computes with the number of rounds in total; such a run cannot be extended."""

    @abstractmethod
    def factor(self, t: int, rounds: int) -> float:
        """The factor, above 0, in round t of `rounds` in total; t counts from 0."""


@dataclass(frozen=True)
class Exponential(Schedule):
    """decayᵗ in round t, counted from 0: what `local.lr_decay` does."""

    decay: Positive = 0.99
    """Factor after every round."""

    def factor(self, t: int, rounds: int) -> float:
        return self.decay**t


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a period of a cosine, from 1 in the first round to `end` after the last (Loshchilov & Hutter, 2017, equation 5,
    without restarts)."""

    end: Fraction = 0.0
    """Where it would be in the round after the last."""
    total_rounds: ClassVar[bool] = True

    def factor(self, t: int, rounds: int) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * t / rounds)) / 2


@dataclass(frozen=True)
class Steps(Schedule):
    """Multiplied by `decay` after each of some rounds, as by `MultiStepLR` of PyTorch."""

    after: tuple[PositiveInt, ...]
    """These rounds, counted from 1."""
    decay: Positive = 0.1
    """The factor."""

    def factor(self, t: int, rounds: int) -> float:
        return self.decay ** sum(t >= last for last in self.after)


@dataclass(frozen=True)
class WarmUp(Schedule):
    """A line from 0 before the first round to 1 in round `rounds`, and 1 from then on (Goyal et al., 2017, section 2.2)."""

    rounds: PositiveInt
    """How many rounds it takes."""

    def factor(self, t: int, rounds: int) -> float:
        return min(1.0, (t + 1) / self.rounds)


SCHEDULES: Table[type[Schedule]] = REGISTRY.table("schedule").fill(
    {"exponential": Exponential, "cosine": Cosine, "steps": Steps, "warm_up": WarmUp}
)

Schedules = tuple[Annotated[Any, Catalogue("schedule", SCHEDULES)], ...]
"""Schedules of one rate, whose factors are multiplied; none leaves the rate as it is."""


def scheduled(rate: float, schedules: Sequence[Schedule], t: int, rounds: int) -> float:
    """The `rate` in round t, from 0, of `rounds` in total. Raises `HookError` for a factor that is none."""
    for schedule in schedules:
        factor = schedule.factor(t, rounds)
        if not isinstance(factor, Real) or not 0 < factor < math.inf:
            returned = factor if isinstance(factor, Real) else form(factor)
            raise misused(schedule.factor, f"returned {returned}", "Return a number above 0", t)
        rate *= float(factor)
    return rate
