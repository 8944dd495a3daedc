"""Simulated time: how long clients take, from how fast they compute and communicate. No wall clock decides anything."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from raysim.core.availability import Always, AnAvailability
from raysim.core.bounds import AboveOne, Fraction, NonNegative, Positive
from raysim.core.hooks import form, misused
from raysim.core.rng import SERVER, stream_seed, uniform
from raysim.core.tabular import OfFiles, columns_of
from raysim.lazy import torch
from raysim.registry import REGISTRY, Catalogue, Table

SLOWEST = 100.0  # times slower than the fastest client, at most
MOST_CHANGES = 10_000  # of clients' availability, while a server waits


class Trait(OfFiles, ABC):
    """A number that a client has for the whole run, such as its speed. Subclasses are frozen dataclasses of settings."""

    @abstractmethod
    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        """The numbers [n] of the `clients` [n], of which each has drawn a `u` [n] between 0 and 1, uniform and its own: the
        inverse of the distribution function."""


@dataclass(frozen=True)
class Constant(Trait):
    """All clients have the same."""

    value: NonNegative
    """It."""

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        return np.full(len(u), self.value)


@dataclass(frozen=True)
class LogNormal(Trait):
    """The logarithm is normal."""

    median: Positive
    """Half of the clients have less."""
    sigma: NonNegative
    """Standard deviation of the natural logarithm."""

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        normal: np.ndarray = torch.special.ndtri(torch.from_numpy(u)).numpy()
        return self.median * np.exp(self.sigma * normal)


@dataclass(frozen=True)
class Range(Trait):
    """Any number between two is equally likely."""

    low: Positive
    """The lowest."""
    high: Positive
    """The highest."""

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError(f"high {self.high:g} is below low {self.low:g}.")

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True)
class Pareto(Trait):
    """The fastest client's number divided by a draw of Pareto's law, 1 at least and `SLOWEST` at most."""

    fastest: Positive
    """The greatest possible."""
    alpha: Positive = 1.0
    """The law's exponent; with a small one more clients are slow."""

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        return self.fastest / np.minimum((1 - u) ** (-1 / self.alpha), SLOWEST)


@dataclass(frozen=True)
class HalfNormal(Trait):
    """A number and more, by a normal draw's absolute value, as the seconds of a client in FedBuff (Nguyen et al., 2022)."""

    least: NonNegative
    """The lowest."""
    scale: Positive
    """Standard deviation of the normal draw."""

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        normal: np.ndarray = torch.special.ndtri(torch.from_numpy((1 + u) / 2)).numpy()
        return self.least + self.scale * normal


@dataclass(frozen=True)
class Zipf(Trait):
    """The fastest client's number divided by a draw of Zipf's law: k with a probability that goes as k^-a, 1 at least and
    `SLOWEST` at most."""

    fastest: Positive
    """The greatest possible."""
    a: AboveOne
    """The law's exponent; with a small one more clients are slow."""

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        all_weights = float(torch.special.zeta(torch.tensor(self.a, dtype=torch.float64), 1.0))
        shares = np.cumsum(np.arange(1, SLOWEST, dtype=float) ** -self.a) / all_weights
        return self.fastest / (1 + np.searchsorted(shares, u, side="right"))


@dataclass(frozen=True)
class Column(Trait):
    """A column of a table of measured devices. With n rows there, client i of the run is the device of row i mod n."""

    file: str
    """Parquet, or CSV with names in its first line."""
    column: str
    """Its name."""

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        numbers = self._numbers()
        taken: np.ndarray = numbers[clients % len(numbers)]
        return taken

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def check(self) -> str | None:
        try:
            numbers = self._numbers()
        except ValueError as error:
            return str(error)
        if not len(numbers) or not (numbers > 0).all():
            return f"{self.file}: {self.column} must be above 0 in every row, of which there is one at least."
        return None

    def _numbers(self) -> np.ndarray:
        columns = columns_of(self.file)
        if self.column not in columns:
            raise ValueError(f"{self.file} has no column {self.column}. It has {', '.join(columns)}.")
        return columns[self.column]


@dataclass(frozen=True)
class Unlimited(Trait):
    """Infinitely much."""

    def of(self, clients: np.ndarray, u: np.ndarray) -> np.ndarray:
        return np.full(len(u), np.inf)


TRAITS: Table[type[Trait]] = REGISTRY.table("trait").fill(
    {
        "constant": Constant,
        "lognormal": LogNormal,
        "range": Range,
        "pareto": Pareto,
        "zipf": Zipf,
        "half_normal": HalfNormal,
        "table": Column,
        "unlimited": Unlimited,
    }
)
TRAIT_FIELDS = ("speed", "up", "down", "latency")  # of the clock
SERVER_FIELDS = ("server_seconds", "server_speed")
ATrait = Annotated[Any, Catalogue("trait", TRAITS, number="constant")]


NETWORKS = {  # medians of bits a second down and up, and seconds of latency: round figures, not measurements
    "wifi": (50e6, 20e6, 0.02),
    "4g": (25e6, 8e6, 0.06),
    "5g": (150e6, 20e6, 0.03),
}
SPREAD = 0.5  # standard deviation of a network's natural logarithms


@dataclass(frozen=True, kw_only=True)
class SimulatedClock:
    """How fast clients are."""

    network: Literal["wifi", "4g", "5g"] | None = None
    """Sets `up`, `down` and `latency`: log-normal with sigma 0.5 around 50 Mbit/s down, 20 up and 0.02 s (`wifi`), 25, 8 and
    0.06 (`4g`), 150, 20 and 0.03 (`5g`). These are round figures, not measurements."""

    speed: ATrait = Unlimited()
    """Samples a second that a client trains on, forward and backward."""
    up: ATrait = Unlimited()
    """Bytes a second that a client sends."""
    down: ATrait = Unlimited()
    """Bytes a second that a client receives."""
    latency: ATrait = Constant(0.0)
    """Seconds of every exchange with the server."""

    jitter: NonNegative = 0.0
    """Standard deviation of the natural logarithm of a factor on all seconds of a client, with median 1, which is drawn for each
    client in each round."""

    server_seconds: NonNegative = 0.0
    """Seconds that the server takes at the end of every round."""
    server_speed: Positive | None = None
    """Samples a second that the server trains on, as with FedLAW and FedDF; null: infinitely many."""

    over_select: NonNegative = 0.0
    """So many more clients are asked than a round needs, as a share of them: 0.3 asks 13 for 10. The round ends with the 10th
    that returns, and the others are late (Bonawitz et al., Towards Federated Learning at Scale, 2019)."""
    deadline: Positive | None = None
    """Seconds after which a round ends with those that have returned; null: it waits."""
    dropout: Fraction = 0.0
    """Probability that a client is lost on its way, at any instant of its work alike. It has been sent a model and sends none."""
    on_few: Literal["retry", "proceed", "stop"] = "retry"
    """Where fewer than `rounds.min_clients` return: `retry` asks others, up to 10 times, while the clock goes on; `proceed` takes
    those that have returned; `stop` ends the run. If all tries fail, or none have returned, the model stays as it is."""
    availability: AnAvailability = Always()
    """When clients can be asked. Where fewer than `rounds.min_clients` can, the server waits."""
    interrupt: Literal["lose", "pause", "ignore"] = "lose"
    """A client that is not available when its work would be done is lost (`lose`), goes on when it is available again (`pause`),
    or is done all the same (`ignore`)."""

    def __post_init__(self) -> None:
        if self.network is not None:
            down, up, latency = NETWORKS[self.network]
            for name, median in (("down", down / 8), ("up", up / 8), ("latency", latency)):
                if getattr(self, name) not in (getattr(SimulatedClock, name), LogNormal(median, SPREAD)):
                    raise ValueError(
                        f"network {self.network} and {name} both say what {name} is: leave out one of them."
                    )
                object.__setattr__(self, name, LogNormal(median, SPREAD))
        for name in ("speed", "up", "down"):
            if getattr(self, name) == Constant(0):
                raise ValueError(f"the value of {name} is 0: no client would ever be ready.")

    @property
    def runs(self) -> bool:
        """Whether anything takes time."""
        return any(getattr(self, name) != getattr(SimulatedClock, name) for name in (*TRAIT_FIELDS, *SERVER_FIELDS))

    def problems(self) -> list[str]:
        """What is wrong with the files that it reads, with its place."""
        return [f"clock.{name}: {problem}" for name, part in self._parts() if (problem := part.check())]

    def files(self) -> dict[str, tuple[str, ...]]:
        """The files that it reads, by the setting that names them."""
        return {f"clock.{name}": part.files for name, part in self._parts() if part.files}

    def _parts(self) -> list[tuple[str, OfFiles]]:
        return [(name, getattr(self, name)) for name in (*TRAIT_FIELDS, "availability")]

    def of_server(self, trained: int) -> float:
        """Seconds of the server at the end of a round in which it has trained on so many samples."""
        return self.server_seconds + (trained / self.server_speed if self.server_speed else 0.0)

    @property
    def loses(self) -> bool:
        """Whether a round may do without clients that were asked."""
        return bool(self.over_select or self.deadline or self.dropout or self.comes_and_goes)

    @property
    def comes_and_goes(self) -> bool:
        """Whether there are times at which a client cannot be asked."""
        return not isinstance(self.availability, Always)

    def asks(self, wanted: int) -> int:
        """How many clients are asked where a round needs so many."""
        return math.ceil((1 + self.over_select) * wanted - 1e-9)

    def opens(self, seed: int, clients: np.ndarray, now: float, least: int) -> tuple[float, np.ndarray]:
        """The first instant, from `now` on, at which so many of the `clients` [n] are available, and which are, bool [n];
        infinity where none was found."""
        for _ in range(MOST_CHANGES):
            available, until = self.state(seed, clients, np.full(len(clients), now))
            if available.sum() >= least:
                return now, available
            now = float(until[~available].min(initial=math.inf))
            if math.isinf(now):
                break
        return math.inf, np.zeros(len(clients), bool)

    def closed(
        self, seed: int, t: int, clients: Sequence[int], took: np.ndarray, wanted: int, now: float = 0.0
    ) -> tuple[dict[int, str], float]:
        """Whom round t, which began `now`, loses of its `clients`, who would take so many seconds `took` [K], and why; and how
        long it lasts.

        It ends with the return of the client that makes it `wanted`, or at the deadline; else with the last of what it waits for.
        """
        fates = self._fates(seed, t, clients, took, now)
        returns = sorted((at, client) for (at, why), client in zip(fates, clients, strict=True) if not why)
        over = math.inf if self.deadline is None else self.deadline
        if len(returns) >= wanted:
            over = min(over, returns[wanted - 1][0])
        used = {client for at, client in returns[:wanted] if at <= over}
        lost = {client: why or "late" for (_, why), client in zip(fates, clients, strict=True) if client not in used}
        return lost, min(over, max(at for at, _ in fates))

    def _fates(
        self, seed: int, t: int, clients: Sequence[int], took: np.ndarray, now: float
    ) -> list[tuple[float, str]]:
        """After how many seconds the server hears of each client or misses it, and why it does not return, if so."""
        took, done = self._interrupted(seed, np.array(clients), took, now)
        fates = [(float(at), "" if ok else "interrupted") for at, ok in zip(took, done, strict=True)]
        for i, client in enumerate(clients if self.dropout else ()):
            if (share := self.drops_out(seed, t, client)) <= 1:
                fates[i] = (share * float(took[i]), "dropped out")
        return fates

    def drops_out(self, seed: int, t: int, client: int) -> float:
        """The share of its work after which a client drops out of round t; infinity where it does not."""
        drawn, when = (stream_seed(seed, t, client, f"clock {what}") / 2.0**63 for what in ("dropout", "loss"))
        return when if drawn < self.dropout else math.inf

    def _interrupted(
        self, seed: int, clients: np.ndarray, took: np.ndarray, now: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """After how many seconds [K] the clients are done or missed, and whether they are done, bool [K]."""
        done = np.ones(len(took), bool)
        if not self.comes_and_goes or self.interrupt == "ignore":
            return took, done
        if self.interrupt == "lose":
            return took, self.state(seed, clients, now + took)[0]
        at, left = np.full(len(took), now), took.astype(np.float64)
        while (busy := done & (left > 0)).any():
            available, until = self.state(seed, clients, at)
            spent = np.where(busy & available, np.minimum(left, until - at), 0.0)
            last = busy & available & (spent == left)
            done &= ~(busy & ~last & np.isinf(until))  # it never comes back
            at = np.where(last, at + spent, np.where(busy & done, until, at))
            left = left - spent
        return np.where(done, at - now, took), done

    def state(self, seed: int, clients: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Availability.state`, whose draws follow from the seed and the client alone. Raises `HookError`."""
        key = stream_seed(seed, 0, SERVER, "clock availability")
        made = self.availability.state(clients, at, lambda i: uniform(key, clients, i))
        if not isinstance(made, tuple) or [np.shape(each) for each in made] != [at.shape] * 2:
            way = f"Return two arrays [{len(at)}]: which clients are available, and until when that lasts"
            raise misused(self.availability.state, f"returned {form(made)}", way)
        return made[0], np.maximum(made[1], np.nextafter(at, np.inf))  # time goes on, whatever was rounded

    def seconds(
        self, seed: int, clients: Sequence[int], samples: np.ndarray, up: np.ndarray, down: np.ndarray,
        t: int | np.ndarray = 0,
    ) -> Seconds:  # fmt: skip
        """How long `clients` take to receive so many bytes `down`, to train on so many `samples`, counting each as often as
        it is used, and to send so many bytes `up`; [K] each. `t` is the round in which they were sent their models, or [K]."""
        amounts = {"down": down, "speed": samples, "up": up}
        received, trained, sent = (amount / self._of(name, seed, clients) for name, amount in amounts.items())
        made = Seconds(self._of("latency", seed, clients), received, trained, sent)
        if not self.jitter:
            return made
        ids = np.asarray(clients, np.int64)
        factor = LogNormal(1.0, self.jitter).of(ids, uniform(stream_seed(seed, 0, SERVER, "clock jitter"), ids, t))
        return Seconds(*(factor * part for part in (made.latency, made.down, made.train, made.up)))

    def _of(self, name: str, seed: int, clients: Sequence[int]) -> np.ndarray:
        trait: Trait = getattr(self, name)
        ids = np.asarray(clients, np.int64)
        values = trait.of(ids, uniform(stream_seed(seed, 0, SERVER, f"clock {name}"), ids, 0))
        if not isinstance(values, np.ndarray) or values.shape != (len(clients),) or not (values >= 0).all():
            raise misused(
                trait.of, f"returned {form(values)}", f"Return [{len(clients)}], a number >= 0 for each client"
            )
        return values


@dataclass(frozen=True)
class Seconds:
    """Of each client [K]: seconds of an exchange, to receive, to train and to send."""

    latency: np.ndarray
    down: np.ndarray
    train: np.ndarray
    up: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """[K] until the server has what the client sends."""
        total: np.ndarray = self.latency + self.down + self.train + self.up
        return total
