"""Heterogeneity coherence (FedLAW: Li et al., 2023, definition 5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.analysis.instrument import Instrument
from raysim.core.note import Note
from raysim.core.server import Population
from raysim.lazy import F, torch

if TYPE_CHECKING:
    from raysim.federation.round import Round


@dataclass(frozen=True)
class Heterogeneity(Instrument):
    """Heterogeneity coherence: classes that the round weighs against those of all clients (FedLAW, 2023, definition 5.2).

    `classes` is the class distribution Σ λ_k D_k of the clients that took part, weighted as they were aggregated. The
    paper leaves open how it is compared with that of all clients' samples: `cosine` is their cosine, `overlap` is one
    minus their total variation distance.
    """

    needs_classes: ClassVar[bool] = True

    def observe(self, done: Round, population: Population) -> Iterator[Note]:
        assert done.mixture is not None
        labels = population.labels.double()  # [N, C]
        own = labels[list(done.cohort.clients)]
        seen = done.mixture.shares @ (own / own.sum(1, keepdim=True))  # [C]
        every = labels.sum(0) / labels.sum()
        yield self.note("cosine", F.cosine_similarity(seen, every, dim=0))
        yield self.note("overlap", torch.minimum(seen, every).sum())
        yield self.note("classes", seen, "class")
