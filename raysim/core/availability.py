"""When clients can be asked, on the simulated clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np

from raysim.core.bounds import Positive, Share
from raysim.core.tabular import OfFiles, changed, columns_of
from raysim.registry import REGISTRY, Catalogue, Table

Draws = Callable[[int | np.ndarray], np.ndarray]
"""i -> the i-th draws [n] of the clients, uniform between 0 and 1, each client's its own; i is a number or [n]."""


class Availability(OfFiles, ABC):
    """When clients can take part. Subclasses are frozen dataclasses of settings."""

    @abstractmethod
    def state(self, clients: np.ndarray, at: np.ndarray, u: Draws) -> tuple[np.ndarray, np.ndarray]:
        """Whether each of the `clients` [n] is available at the instant `at` [n], in seconds since the run's start, as bool [n];
        and until when that lasts [n]."""


@dataclass(frozen=True)
class Always(Availability):
    """All clients, all the time."""

    def state(self, clients: np.ndarray, at: np.ndarray, u: Draws) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(at), bool), np.full(len(at), np.inf)


@dataclass(frozen=True)
class Bernoulli(Availability):
    """Drawn again from time to time, for each client on its own."""

    p: Share
    """Probability to be available."""
    every: Positive = 3600.0
    """Seconds from draw to draw."""

    def state(self, clients: np.ndarray, at: np.ndarray, u: Draws) -> tuple[np.ndarray, np.ndarray]:
        k = np.floor(at / self.every).astype(np.int64)
        return u(k) < self.p, (k + 1) * self.every


@dataclass(frozen=True)
class Markov(Availability):
    """Available and not, in turn, each time for an exponential time."""

    available: Positive
    """Mean seconds that a client is available."""
    away: Positive
    """Mean seconds that it is not."""

    def state(self, clients: np.ndarray, at: np.ndarray, u: Draws) -> tuple[np.ndarray, np.ndarray]:
        here, i = u(0) < self.available / (self.available + self.away), 1  # as in the long run
        end = -np.log(u(1)) * np.where(here, self.available, self.away)
        while (over := end <= at).any():
            here, i = here ^ over, i + 1
            end = np.where(over, end - np.log(u(i)) * np.where(here, self.available, self.away), end)
        return here, end


@dataclass(frozen=True)
class Diurnal(Availability):
    """The same hours of every day, which begin at a random time of the day for each client."""

    share: Share
    """Of the day in which a client is available."""
    period: Positive = 86400.0
    """Seconds of a day."""

    def state(self, clients: np.ndarray, at: np.ndarray, u: Draws) -> tuple[np.ndarray, np.ndarray]:
        since, hours = (at + self.period * u(0)) % self.period, self.share * self.period
        available = since < hours
        return available, at + np.where(available, hours, self.period) - since


@dataclass(frozen=True)
class Trace(Availability):
    """Measured spells of time. With n clients in the table, client i of the run has those of client i mod n there, in order."""

    file: str
    """Parquet or CSV with the columns `client`, `start` and `stop`, in seconds; and `period`, if a client's spells repeat."""

    def state(self, clients: np.ndarray, at: np.ndarray, u: Draws) -> tuple[np.ndarray, np.ndarray]:
        rows = _rows(self.file, changed(self.file))
        trace = clients % (len(rows.first) - 1)
        period = rows.period[rows.first[trace]]
        inside = np.where(np.isinf(period), at, at % np.where(np.isinf(period), 1.0, period))
        span = 1 + max(rows.stop.max(), inside.max())
        row = np.searchsorted(rows.trace * span + rows.stop, trace * span + inside)  # the first that has not ended
        over = row == rows.first[trace + 1]  # its last spell is: the first one of the next period
        row, shift = np.where(over, rows.first[trace], row), at - inside + np.where(over, period, 0.0)
        start, stop = rows.start[row] + shift, rows.stop[row] + shift
        available = start <= at
        return available, np.where(available, np.nextafter(stop, np.inf), start)

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def check(self) -> str | None:
        try:
            _rows(self.file, changed(self.file))
        except ValueError as error:
            return str(error)
        return None


class _Rows(NamedTuple):
    trace: np.ndarray  # [R] whose, from 0; sorted
    start: np.ndarray  # [R]
    stop: np.ndarray  # [R]
    period: np.ndarray  # [R]; infinity: it does not repeat
    first: np.ndarray  # [n + 1] first row of each trace


@lru_cache(4)
def _rows(file: str, written: int) -> _Rows:
    """The rows of a table of spells. Raises ValueError."""
    columns = columns_of(file)
    if missing := sorted({"client", "start", "stop"} - columns.keys()):
        raise ValueError(f"{file} has no column {missing[0]}. It needs client, start and stop.")
    start, stop = columns["start"], columns["stop"]
    order = np.lexsort((start, columns["client"]))
    _, trace = np.unique(columns["client"][order], return_inverse=True)
    start, stop = start[order], stop[order]
    period = columns.get("period", np.full(len(start), np.inf))[order]
    period = np.where(np.isnan(period), np.inf, period)
    same = trace[1:] == trace[:-1]
    if not len(start):
        raise ValueError(f"{file} has no rows.")
    if not ((start >= 0) & (stop >= start) & (stop <= period)).all() or (same & (start[1:] < stop[:-1])).any():
        raise ValueError(
            f"{file}: spells of a client must begin at 0 or later, end before its period does, and not overlap."
        )
    if (same & (period[1:] != period[:-1])).any():
        raise ValueError(f"{file}: a client has one period.")
    first = np.searchsorted(trace, np.arange(trace[-1] + 2))
    return _Rows(trace, start, stop, period, first)


AVAILABILITIES: Table[type[Availability]] = REGISTRY.table("availability").fill(
    {"always": Always, "bernoulli": Bernoulli, "markov": Markov, "diurnal": Diurnal, "table": Trace}
)
AnAvailability = Annotated[Any, Catalogue("availability", AVAILABILITIES)]
