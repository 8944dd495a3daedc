"""Malicious clients: who they are, and what they send in place of their updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from raysim.core.bounds import NonNegativeInt, Probability
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.method import Method
from raysim.core.rng import SERVER, draw, stream_seed
from raysim.core.server import Server
from raysim.lazy import Tensor

if TYPE_CHECKING:
    from raysim.core.local_run import LocalRun


@dataclass(frozen=True)
class Attack(Method):
    """What malicious clients send in place of their updates; they train as others do, and keep what they have trained.

    Its fields are the paper's hyper-parameters. What is measured and encoded afterwards is what they send. Buffers stay as
    they were trained.
    """

    role: ClassVar[str] = "attack"
    sees_others: ClassVar[bool] = False
    """Whether it begins with what the other clients of the round send. They then train first."""
    fraction: Probability | None = field(default=None, kw_only=True)
    """The share of the clients that is malicious, rounded down. Of all that hold samples they are drawn from the seed, for
    each attack the same."""
    clients: tuple[NonNegativeInt, ...] = field(default=(), kw_only=True)
    """The malicious clients, in place of `fraction`."""

    def known(self, others: Cohort, malicious: int, server: Server) -> Tensor | None:
        """What the `malicious` clients of a round know of the `others` (of at least one), where it `sees_others`."""
        return None

    def update(self, honest: Tensor, client: LocalRun, known: Tensor | None) -> Tensor:
        """[P] what `client` sends in place of its `honest` update [P], both relative to the global model."""
        raise NotImplementedError

    def check(self, facts: RunFacts) -> str | None:
        if (self.fraction is None) == (not self.clients):
            return "needs either a fraction of the clients or clients by number: set one of both."
        for method in facts.client:
            if method.averages_more:
                return f"{method.name} sends a second vector, which would stay honest."
            if method.needs.peers or method.downlink_rule():
                return f"{method.name} sends each client another model, so that updates have no common start."
        return None

    def malicious(self, holders: Sequence[int], seed: int) -> frozenset[int]:
        """Of the `holders` of samples (sorted) those who attack."""
        if self.fraction is None:
            return frozenset(self.clients)
        count = int(self.fraction * len(holders) + 1e-9)
        return frozenset(holders[i] for i in draw(len(holders), count, stream_seed(seed, 0, SERVER, "malicious")))


@dataclass(frozen=True)
class Attackers:
    """The attacks of a run, and for each of them its clients."""

    attacks: tuple[Attack, ...] = ()
    clients: tuple[frozenset[int], ...] = ()

    @classmethod
    def of(cls, attacks: tuple[Attack, ...], holders: Sequence[int], seed: int) -> Attackers:
        return cls(attacks, tuple(attack.malicious(holders, seed) for attack in attacks))

    def __str__(self) -> str:
        """Who attacks, for a person."""
        sees = (", who see what others send" if attack.sees_others else "" for attack in self.attacks)
        counts = (f"{len(clients)} clients" for clients in self.clients)
        named = zip(self.attacks, counts, sees, strict=True)
        return "; ".join(f"{attack.name}: {count}{sight}" for attack, count, sight in named)

    def __contains__(self, client: int) -> bool:
        return any(client in clients for clients in self.clients)

    def attacks_of(self, client: int) -> tuple[int, ...]:
        """The positions of its attacks."""
        return tuple(i for i, clients in enumerate(self.clients) if client in clients)

    def names_of(self, client: int) -> str | None:
        """The names of its attacks; None: it is honest."""
        return " + ".join(self.attacks[i].name for i in self.attacks_of(client)) or None

    def waits(self, client: int) -> bool:
        """Whether it sends only after others."""
        return any(self.attacks[i].sees_others for i in self.attacks_of(client))
