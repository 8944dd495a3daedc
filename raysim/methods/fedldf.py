"""FedLDF: Layer Divergence Feedback for communication-efficient federated learning (2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.probe import LayerDistance, Probe
from raysim.core.server import Server, Weighting

if TYPE_CHECKING:
    from raysim.config import Config


@dataclass(frozen=True)
class FedLDF(Weighting):
    """Each layer is sent only by the `top_n` clients where it moved most (FedLDF, 2024, algorithm 1)."""

    top_n: int
    stage: ClassVar[str] = "select"
    divergence: ClassVar[Probe] = LayerDistance()
    probes: ClassVar[tuple[Probe, ...]] = (divergence,)

    def check(self, config: Config) -> str | None:
        return f"top_n is {self.top_n}; at least one client must send a layer." if self.top_n < 1 else None

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        divergence = cohort.stat(self.divergence)  # [K, L]
        # Equal divergence: the client with the lower id sends.
        rank = divergence.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
        chosen = rank < self.top_n
        server.note(self, "divergence", divergence, "client", "layer")
        server.note(self, "uploads", chosen, "client", "layer")
        return prior.select(server.layers.spread(chosen))
