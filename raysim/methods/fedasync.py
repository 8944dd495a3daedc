"""FedAsync (Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from raysim.core.asynchronous import Asynchronous
from raysim.core.bounds import Share
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.mixture import Mixture
from raysim.core.selection import VERSIONS
from raysim.core.server import Server, Weighting
from raysim.lazy import Tensor


@dataclass(frozen=True)
class FedAsync(Asynchronous):
    """(1 - α s(τ)) θ + α s(τ) θ_k after each client k (Xie et al., 2019, algorithm 1), while M clients train.

    The paper's clients are pulled to the model that they were sent: `client: [{fedprox: {mu: 0.005}}]`.

    Wrong choice where updates are noisy: each moves the model by itself, and no mean smooths them.
    """

    alpha: Share = 0.6
    """α, the share of a client's model that is not stale."""

    updates: ClassVar[int] = 1

    def check(self, facts: RunFacts) -> str | None:
        if facts.weighting:
            return f"mixes in one model at a time, so that {facts.weighting[0].name} has nothing to weigh."
        return None

    def weightings(self) -> tuple[Weighting, ...]:
        return (Mixed(self),)


@dataclass(frozen=True)
class Mixed(Weighting):
    """Mixes the server's model with that of one client."""

    of: FedAsync = field(default_factory=FedAsync)
    """Whose α and s they are."""

    base_weights: ClassVar[str | None] = "uniform"
    stage: ClassVar[str] = "rescale"

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        return prior

    def combine(self, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor | None:
        asked, counters = server.scratch.asked, server.layers.counters
        assert asked is not None
        share = self.of.alpha * float(self.of.weights_of(cohort, server))
        start = server.memory[VERSIONS].get(str(asked.versions[0]), server.value)
        update = cohort.columns(only, mixture)
        sent = server.layers.per_element(mixture.sent[0].float())
        mixed: Tensor = server.value + share * sent * (start - server.value + update)
        for _, elements, _ in counters:
            mixed[elements] = (server.value + update)[elements]
        return mixed


def only(updates: Tensor) -> Tensor:
    """[n] the one of the updates [1, n]."""
    return updates[0]
