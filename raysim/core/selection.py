"""Who takes part in a round, and from which of the server's models each client trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from raysim.core.facts import cohort_size
from raysim.core.method import Method
from raysim.core.rng import SERVER, draw, stream_seed
from raysim.core.server import Server, Weighting

VERSIONS = "versions"  # of the server's memory: the models that clients still train, [S], by the number of their round

Durations = Callable[[Sequence[int]], np.ndarray]
"""Clients -> [K] simulated seconds until the server has what they send."""


@dataclass(frozen=True)
class Asked:
    """Who takes part in a round."""

    clients: tuple[int, ...]
    """Sorted."""
    versions: tuple[int, ...] = ()
    """Of each client the round whose model it was sent; none: this round's."""
    repeats: tuple[int, ...] = ()
    """With versions: how often each client had trained on that model before."""
    times: tuple[int, ...] = ()
    """How often each client was drawn, where that may be more than once."""
    in_flight: frozenset[int] = frozenset()
    """The rounds whose models are still trained when this round is over."""
    ends: float | None = None
    """Simulated seconds since the run's start at which the round ends; None: when the slowest client has sent."""
    lost: Mapping[int, str] = field(default_factory=dict)
    """Clients of which nothing is used, and why; they need not be trained."""
    lasts: float | None = None
    """Simulated seconds of the round, where some are lost; None: until the slowest client has sent."""

    def version(self, client: int) -> int:
        """The round whose model the client was sent, where that may be an older one."""
        return self.versions[self.clients.index(client)]


class Selection(Method):
    """Chooses who takes part. Subclasses are frozen dataclasses of settings; what they remember is `server.memory[self]`, a
    mapping of numbers and tensors."""

    role: ClassVar[str] = "selection"
    needs_clock: ClassVar[bool] = False
    """Whether it computes with simulated seconds."""
    asynchronous: ClassVar[bool] = False
    """Whether clients may train from older models than this round's."""

    @abstractmethod
    def select(self, server: Server, participation: float, seconds: Durations) -> Asked:
        """The clients of this round. Those without samples may be among them and are left out."""

    def asked(self, participation: float, clients: int) -> int:
        """How many of a federation's `clients` take part in a round."""
        return cohort_size(participation, clients)

    def weightings(self) -> tuple[Weighting, ...]:
        """What it adds to the run's weightings."""
        return ()


@dataclass(frozen=True)
class UniformSelection(Selection):
    """So many as `rounds.participation` says, without replacement, all equally likely (McMahan et al., 2017).

    Wrong choice where clients differ much in speed: a round lasts as long as its slowest client.
    """

    def select(self, server: Server, participation: float, seconds: Durations) -> Asked:
        clients = len(server.population.sizes)
        return Asked(sample(server.seed, server.t, clients, self.asked(participation, clients)))


def sample(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """The sorted cohort of round t: drawn without replacement from (seed, round) alone, so that methods share it."""
    return tuple(sorted(draw(clients, cohort, stream_seed(seed, t, SERVER, "cohort"))))
