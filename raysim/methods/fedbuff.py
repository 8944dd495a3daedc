"""FedBuff (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from raysim.core.asynchronous import Asynchronous, Task
from raysim.core.bounds import Positive, PositiveInt
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting


@dataclass(frozen=True)
class FedBuff(Asynchronous):
    """θ + (1/B) Σ s(τ) Δ as soon as B updates are there (Nguyen et al., 2022, algorithm 1).

    M clients train at a time. Server steps act on the sum: `server: [step_size]` is the paper's η_g.

    Wrong choice where all clients take the same time: updates come stale, and synchronous rounds would wait no longer.
    """

    buffer: PositiveInt = 10
    """B, the updates of a round."""
    normalize: Literal["count", "weights"] = "count"
    """Whether the sum is divided by B, as in the paper, or by the sum of s, as in FedScale."""
    weights: Literal["uniform", "size"] = "uniform"
    """`size` multiplies s by a client's samples, in parts of the round's mean, as in FederatedScope."""
    period: Positive | None = None
    """A round ends after so many simulated seconds with all updates that are in, or with the first one after that; null: with B.
    `buffer` is then how many are expected."""
    on_stale: Literal["drop", "wait"] = "drop"
    """`wait`: a round does not end before a client whose update would be older than `max_staleness`, as in Plato."""

    @property
    def updates(self) -> int:
        return self.buffer

    def closes(self, now: float) -> float:
        return math.inf if self.period is None else now + self.period

    def awaits(self, t: int, flying: Sequence[Task]) -> bool:
        most = self.max_staleness if self.on_stale == "wait" else None
        return most is not None and any(t - task.version >= most for task in flying)

    def check(self, facts: RunFacts) -> str | None:
        if self.on_stale == "wait" and (not self.max_staleness or self.period):
            return "on_stale: wait needs a max_staleness of 1 or more, and rounds that end with the buffer (no period)."
        if facts.clients is not None and self.buffer > facts.clients:
            return f"buffer {self.buffer} waits for more clients than the federation's {facts.clients}."
        return None

    def weightings(self) -> tuple[Weighting, ...]:
        return (Stale(self),)


@dataclass(frozen=True)
class Stale(Weighting):
    """Multiplies updates by s(τ)."""

    of: FedBuff = field(default_factory=FedBuff)
    """Whose s it is."""

    name: ClassVar[str] = "fedbuff"
    base_weights: ClassVar[str | None] = "uniform"
    stage: ClassVar[str] = "rescale"
    plans_early: ClassVar[bool] = True

    @property
    def unequal(self) -> str | None:
        if self.of.weights == "size":
            return "counts their samples. Set weights: uniform"
        return None if self.of.staleness == "constant" else "counts stale ones less. Set staleness: constant"

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        weight = self.of.weights_of(cohort, server)
        if self.of.weights == "size":
            weight = weight * cohort.sizes / cohort.sizes.double().mean()
        plan = prior.reweighted(prior.lam * weight)  # of buffers a convex mean
        if self.of.normalize == "weights" or bool((weight == 1).all()):
            return plan
        mean = (prior.base[:, : prior.layers.T] * weight[:, None]).sum(0)  # s of those that send a tensor
        return plan.scaled(mean, 1 - mean)
