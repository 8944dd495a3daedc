"""Simulated time: how long clients take, from how fast they compute and communicate. No wall clock decides anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from raysim.core.bounds import NonNegative, Positive
from raysim.core.hooks import form, misused
from raysim.core.rng import stream_seed
from raysim.lazy import torch
from raysim.registry import REGISTRY, Catalogue, Table

SLOWEST = 100.0  # times slower than the fastest client, at most


class Trait(ABC):
    """A number that a client has for the whole run, such as its speed. Subclasses are frozen dataclasses of settings."""

    @abstractmethod
    def of(self, u: np.ndarray) -> np.ndarray:
        """The numbers [n] of clients, of which each has drawn a `u` [n] between 0 and 1, uniform and its own: the inverse of the
        distribution function."""


@dataclass(frozen=True)
class Constant(Trait):
    """All clients have the same."""

    value: NonNegative
    """It."""

    def of(self, u: np.ndarray) -> np.ndarray:
        return np.full(len(u), self.value)


@dataclass(frozen=True)
class LogNormal(Trait):
    """The logarithm is normal."""

    median: Positive
    """Half of the clients have less."""
    sigma: NonNegative
    """Standard deviation of the natural logarithm."""

    def of(self, u: np.ndarray) -> np.ndarray:
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

    def of(self, u: np.ndarray) -> np.ndarray:
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True)
class Pareto(Trait):
    """The fastest client's number divided by a draw of Pareto's law, 1 at least and `SLOWEST` at most."""

    fastest: Positive
    """The greatest possible."""
    alpha: Positive = 1.0
    """The law's exponent; with a small one more clients are slow."""

    def of(self, u: np.ndarray) -> np.ndarray:
        return self.fastest / np.minimum((1 - u) ** (-1 / self.alpha), SLOWEST)


@dataclass(frozen=True)
class Unlimited(Trait):
    """Infinitely much."""

    def of(self, u: np.ndarray) -> np.ndarray:
        return np.full(len(u), np.inf)


TRAITS: Table[type[Trait]] = REGISTRY.table("trait").fill(
    {"constant": Constant, "lognormal": LogNormal, "range": Range, "pareto": Pareto, "unlimited": Unlimited}
)
ATrait = Annotated[Any, Catalogue("trait", TRAITS, number="constant")]


@dataclass(frozen=True, kw_only=True)
class SimulatedClock:
    """How fast clients are."""

    speed: ATrait = Unlimited()
    """Samples a second that a client trains on, forward and backward."""
    up: ATrait = Unlimited()
    """Bytes a second that a client sends."""
    down: ATrait = Unlimited()
    """Bytes a second that a client receives."""
    latency: ATrait = Constant(0.0)
    """Seconds of every exchange with the server."""

    def __post_init__(self) -> None:
        for name in ("speed", "up", "down"):
            if getattr(self, name) == Constant(0):
                raise ValueError(f"the value of {name} is 0: no client would ever be ready.")

    @property
    def runs(self) -> bool:
        """Whether anything takes time."""
        return self != SimulatedClock()

    def seconds(
        self, seed: int, clients: Sequence[int], samples: np.ndarray, up: np.ndarray, down: np.ndarray
    ) -> Seconds:  # fmt: skip
        """How long `clients` take to receive so many bytes `down`, to train on so many `samples`, counting each as often as
        it is used, and to send so many bytes `up`; [K] each."""
        rates = (self._of("down", seed, clients), self._of("speed", seed, clients), self._of("up", seed, clients))
        amounts = down, samples, up
        received, trained, sent = (amount / rate for amount, rate in zip(amounts, rates, strict=True))
        return Seconds(self._of("latency", seed, clients), received, trained, sent)

    def _of(self, name: str, seed: int, clients: Sequence[int]) -> np.ndarray:
        trait: Trait = getattr(self, name)
        if isinstance(trait, Constant | Unlimited):
            return trait.of(np.empty(len(clients)))
        draws = [
            stream_seed(seed, 0, client, f"clock {name}") >> 11 for client in clients
        ]  # 52 bits: below 1 in float64
        values = trait.of((np.array(draws, np.float64) + 0.5) / 2.0**52)
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
