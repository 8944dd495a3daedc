"""HDFL: Hierarchical Distributed Federated Learning (Zawad et al., 2023), as FedLDF (2024) compares with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.local_run import LocalRun
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe
from raysim.core.server import Server, Weighting, check_senders
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class LastLoss(Probe):
    """Mean training loss of the client's last epoch; 0 where it has trained none."""

    def end(self, run: LocalRun) -> Tensor:
        batches = run.losses[-1] if run.losses else []
        total = sum((loss.double() * n for loss, n in batches), torch.zeros(()).double())
        return total / max(1, sum(n for _, n in batches))


@dataclass(frozen=True)
class HDFL(Weighting):
    """Of the clients that trained, only `n` send their models (client dropout of HDFL, Zawad et al., 2023).

    Deviation: the article's own selection by quality and fairness is not what FedLDF compares with. `by_loss` stands in
    for it: the `n` clients with the greatest training loss send.

    Wrong choice to save computation: all clients of a round train, and `n` are heard.
    """

    n: int
    """How many clients of a round send their models."""
    select: Literal["random", "by_loss"] = "random"
    """Which these are: random ones, or those with the greatest training loss."""
    stage: ClassVar[str] = "select"
    rank: ClassVar[int] = -1  # before those that choose layers, of the clients that send

    @property
    def plans_early(self) -> bool:  # type: ignore[override]
        return self.select == "random"

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (LastLoss(),) if self.select == "by_loss" else ()

    @property
    def senders(self) -> int:
        return self.n

    def mask_bits(self, layers: LayerMap) -> int:
        return 1

    def check(self, facts: RunFacts) -> str | None:
        return check_senders("n", self.n, facts.cohort_size)

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        if self.select == "by_loss":
            order = cohort.stat(LastLoss()).argsort(descending=True, stable=True)
        else:
            order = torch.randperm(len(cohort.clients), generator=server.generator("hdfl"))
        sending = torch.zeros(len(cohort.clients), dtype=torch.bool)
        sending[order[: self.n]] = True
        server.note(self, "uploads", sending, "client")
        return prior.select(sending)
