"""FedLDF: Layer Divergence Feedback for communication-efficient federated learning (2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.probe import LayerDistance, Probe
from raysim.core.server import Server, Weighting, check_senders

EPS = 1e-12


@dataclass(frozen=True)
class FedLDF(Weighting):
    """Each layer is sent only by the `top_n` clients where it moved most (FedLDF, 2024, algorithm 1).

    The divergence ‖w_k^l − w_g^l‖ may be recorded relative to √P_l (`l2_rms`) or to ‖w_g^l‖ (`relative`), so that
    layers can be compared. The ranking of clients within a layer is the same, and so is the model.

    The clients that move most, often those with many samples, are chosen again and again. The model then takes
    longer steps than FedAvg's: where it swings or does not learn, lower `local.lr`.

    Wrong choice when only bytes count: after 240 MB, HDFL's error was 8.0 points lower (docs/papers/fedldf.md).
    """

    top_n: int
    """How many clients send each layer (n)."""
    metric: Literal["l2", "l2_rms", "relative"] = "l2"
    """How the recorded divergence is scaled; the choice of clients does not depend on it."""
    stage: ClassVar[str] = "select"

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (LayerDistance(),)

    @property
    def senders(self) -> int:
        return self.top_n

    def mask_bits(self, layers: LayerMap) -> int:
        return layers.L

    def check(self, facts: RunFacts) -> str | None:
        return check_senders("top_n", self.top_n, facts.cohort_size)

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        layers = server.layers
        divergence = cohort.stat(LayerDistance())  # [K, L]
        if self.metric == "l2_rms":
            divergence = divergence / layers.counts.double().sqrt().clamp_min(EPS)
        elif self.metric == "relative":
            divergence = divergence / layers.norms(server.params).clamp_min(EPS)
        chosen = prior.best(divergence, self.top_n)
        server.note(self, "divergence", divergence, "client", "layer")
        server.note(self, "uploads", chosen, "client", "layer")
        return prior.select(layers.expand(chosen))
