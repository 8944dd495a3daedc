"""Who takes part in a round, and from which of the server's models each client trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts, cohort_size
from raysim.core.method import Method
from raysim.core.probe import Probe
from raysim.core.rng import SERVER, draw, stream_seed
from raysim.core.server import Server, Weighting

VERSIONS = "versions"  # of the server's memory: the models that clients still train, [S], by the number of their round
ABANDONED = "abandoned"  # clients that returned, but too few of their round did


class Clients(Protocol):
    """What is known of clients before they train, and what they can be asked."""

    @property
    def here(self) -> np.ndarray:
        """The clients that can be asked now, sorted: all, but for those that `clock.availability` leaves out."""
        ...

    @property
    def now(self) -> float:
        """The simulated second at which the round begins: for asynchronous selections, and where clients come and go. Otherwise
        the server need not know it, and it is 0."""
        ...

    def seconds(self, clients: Sequence[int]) -> np.ndarray:
        """[K] simulated seconds until the server has what each of the clients sends; 0 without a clock."""
        ...

    def losses(self, clients: Sequence[int], batch: bool = False) -> np.ndarray:
        """[K] float64: the mean loss of this round's model on each client's training samples, or on a random `batch` of them;
        NaN where a client failed. The clients are candidates then: the model is sent to them, and a number comes back. It
        needs `needs = Needs(global_model=True)`."""
        ...


class Dropped(NamedTuple):
    """An update that came in too stale to be used."""

    client: int
    version: int  # the round whose model the client was sent
    starts: float  # simulated seconds since the run's start


@dataclass(frozen=True)
class Asked:
    """Who takes part in a round."""

    clients: tuple[int, ...]
    """Sorted."""
    versions: tuple[int, ...] = ()
    """Of each client the round whose model it was sent; none: this round's."""
    repeats: tuple[int, ...] = ()
    """With versions: how often each client had trained on that model before."""
    starts: tuple[float, ...] = ()
    """With versions: when each client was sent its model, in simulated seconds since the run's start."""
    times: tuple[int, ...] = ()
    """How often each client was drawn, where that may be more than once."""
    in_flight: frozenset[int] = frozenset()
    """The rounds whose models are still trained when this round is over."""
    dropped: tuple[Dropped, ...] = ()
    """Updates that came in and are too stale, of a client at most one a round. They need not be trained."""
    ends: float | None = None
    """Simulated seconds since the run's start at which the round ends; None: when the slowest client has sent."""
    lost: Mapping[int, str] = field(default_factory=dict)
    """Clients whose work is not used, and why; they need not be trained."""
    expected: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Where a round may lose clients, and of those whose updates it drops: of each, the bytes that it was expected to be sent and
    to send, as in the table `traffic`. A run sets it."""
    lasts: float | None = None
    """Simulated seconds of the round, where some are lost; None: until the slowest client has sent."""
    after: Mapping[int, float] = field(default_factory=dict)
    """Of clients that were not asked at once, because too few others returned: so many simulated seconds after the round began."""
    asking: Mapping[int, float] = field(default_factory=dict)
    """Of clients that may be lost: for so many simulated seconds candidates were asked for their losses, before they trained."""
    idle: float = 0.0
    """Simulated seconds for which the server waited before, because too few clients were available. A run sets it."""
    utility: Mapping[int, float] = field(default_factory=dict)
    """By client, what it was chosen by."""
    selected_by: Mapping[int, str] = field(default_factory=dict)
    """By client, a word for why it was chosen."""
    candidates: Mapping[int, int] = field(default_factory=dict)
    """Of each client that was asked for its loss, the samples that this took. A run sets it."""

    @property
    def not_chosen(self) -> tuple[int, ...]:
        """The candidates that do not take part, sorted."""
        return tuple(sorted(self.candidates.keys() - {*self.clients}))

    def again(self, asked: Asked, after: float) -> Asked:
        """A round in which none of these clients is used, and others are `asked` so many seconds after it began."""
        clients = tuple(sorted({*self.clients, *asked.clients}))
        times = dict(zip(self.clients, self.times, strict=False)) | dict(zip(asked.clients, asked.times, strict=False))
        later = {*asked.clients} | asked.candidates.keys() - self.candidates.keys()
        lost = {c: self.lost.get(c, ABANDONED) for c in self.clients if c not in asked.clients}
        return replace(
            asked, clients=clients, times=tuple(times[client] for client in clients if times), idle=self.idle,
            lost={**lost, **asked.lost}, expected={**self.expected, **asked.expected}, lasts=after + (asked.lasts or 0.0),
            after={**self.after, **dict.fromkeys(later, after)}, asking={**self.asking, **asked.asking},
            utility={**self.utility, **asked.utility}, selected_by={**self.selected_by, **asked.selected_by},
        )  # fmt: skip

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

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What clients measure for it while they train, and send."""
        return ()

    @abstractmethod
    def select(self, server: Server, participation: float, clients: Clients) -> Asked:
        """The clients of this round. Those without samples may be among them and are left out."""

    def learn(self, cohort: Cohort, server: Server) -> None:
        """Remember something of the clients that came back, such as `cohort.stat(probe)`."""

    def check(self, facts: RunFacts) -> str | None:
        senders = [method.name for method in facts.client if method.downlink_rule() or method.needs.peers]
        if self.needs.global_model and senders:
            return f"asks for losses of the global model, but {senders[0]} sends each client others."
        return None

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

    def select(self, server: Server, participation: float, clients: Clients) -> Asked:
        here, count = clients.here, self.asked(participation, len(server.population.sizes))
        drawn = sample(server.seed, server.t, len(here), min(count, len(here)))
        return Asked(tuple(here[list(drawn)].tolist()))


def sample(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """The sorted cohort of round t: drawn without replacement only from (seed, round), so that methods share it."""
    return tuple(sorted(draw(clients, cohort, stream_seed(seed, t, SERVER, "cohort"))))
