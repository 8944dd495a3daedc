"""L-DAWA: Layer-wise Divergence Aware Weight Aggregation (Rehman et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.bounds import NonNegativeInt
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.local_run import LocalRun
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe
from raysim.core.server import Server, Weighting
from raysim.lazy import Tensor, torch

EPS = 1e-12


@dataclass(frozen=True)
class LayerCosine(Probe):
    """cos(w_k^l, w_g^l) of what the server receives, for every layer of the grouping `by`, [L]; 1 where a layer is zero."""

    by: str
    buffers: bool = False  # those of a layer belong to it
    of_received: ClassVar[bool] = True

    def end(self, run: LocalRun) -> Tensor:
        layers, size = run.layers.regroup(self.by), run.layers.S if self.buffers else run.layers.P
        new, old = run.uploaded[:size], run.received[:size]
        length, before = layers.norms(new), layers.norms(old)
        cosine = (layers.dots(new, old) / (length * before).clamp_min(EPS**2)).clamp_max(1.0)
        return torch.where((length < EPS) | (before < EPS), 1.0, cosine)


@dataclass(frozen=True)
class LDAWA(Weighting):
    """Layers count by their cosine to the global one (L-DAWA, Rehman et al., 2023): Σ_k cos(w_k^l, w_g^l) w_k^l / K.

    The weights do not sum to one, so a layer on which clients disagree shrinks; `renormalize` divides by their sum (an
    ablation that is ours). The first `warmup` rounds are weighted as if this method were absent. Deviations: a layer of
    norm zero has cosine 1 (0/0 in the released code); buffers are averaged plainly unless `scale_buffers`, which as in
    that code gives every running statistic its own cosine.

    Wrong choice where clients disagree from the start: their layers shrink in every round.
    """

    base: Literal["uniform", "size"] = "uniform"
    """Count clients alike, or with the weights of the other weightings (by default, by size)."""
    warmup: NonNegativeInt = 3
    """Rounds that are weighted as if this method were absent."""
    layer_by: Literal["tensor", "module", "unit", "model"] = "tensor"
    """What a layer is, for the cosines."""
    scale_buffers: bool = False
    """Give every running statistic its own cosine instead of averaging it plainly."""
    renormalize: bool = False
    """Divide the weights of a layer by their sum, so that it does not shrink."""
    stage: ClassVar[str] = "multiply"
    reported: ClassVar[bool] = False

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (LayerCosine(self._grouping, self.scale_buffers),)

    @property
    def _grouping(self) -> str:
        return "entry" if self.scale_buffers else self.layer_by

    def check(self, facts: RunFacts) -> str | None:
        if self.scale_buffers and self.layer_by != "tensor":
            return "scale_buffers gives every running statistic its own cosine, which needs layer_by: tensor."
        others = [w.name for w in facts.every_weighting if w.stage == "weigh" and w.unequal]
        if self.base == "uniform" and others:
            return f"base: uniform discards what {others[0]} says of the clients. Set base: size."
        return None

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        if server.t < self.warmup:
            return prior
        mixture = prior.reweighted(torch.ones_like(prior.lam)) if self.base == "uniform" else prior
        cosine = cohort.stat(self.probes[0])  # [K, layers]
        server.note(self, "cosine", cosine, "client", "position")
        factor = server.layers.regroup(self._grouping).expand(cosine)  # [K, T + Tb]
        if self.renormalize:
            total = (mixture.base * factor).sum(0)
            factor = torch.where(total > EPS, factor / total.clamp_min(EPS), 1.0)
        return mixture.scaled(factor if self.scale_buffers else factor[:, : server.layers.T])
