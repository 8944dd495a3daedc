"""Local gradient coherence (FedLAW: Li et al., 2023, definition 5.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from raysim.analysis.instrument import Instrument
from raysim.core.facts import RunFacts
from raysim.core.mixture import Mixture
from raysim.core.note import Note
from raysim.core.server import Population
from raysim.lazy import Tensor, torch

if TYPE_CHECKING:
    from raysim.federation.round import Round


@dataclass(frozen=True)
class Coherence(Instrument):
    """Local gradient coherence: mean cosine of the clients' updates (FedLAW, 2023, definition 5.1); reads the models.

    With c_ij = cos(Δ_i, Δ_j) and the round's weights λ, `paper` is (1/m) Σ_{i≠j} λ_i λ_j c_ij as the definition has it,
    whose 1/m makes it small; `mean` divides by Σ_{i≠j} λ_i λ_j instead and is a mean of cosines. `client` is the mean
    of the cosines between one client and the others. For each of `groups` (name: client ids), `mean_NAME` and
    `paper_NAME` are those of its clients among themselves. An update of zero has no direction, and its client is left
    out. Only layers that a client sends count.

    No pair is ever formed: with unit vectors ê, Σ_{i≠j} λ_i λ_j c_ij = ‖Σ λ_i ê_i‖² − Σ λ_i², which takes one reduction.
    """

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Sets of clients whose coherence is wanted: name → client ids."""
    reads_models: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        clients = facts.clients
        for name, members in self.groups.items():
            unknown = [c for c in members if c < 0 or (clients is not None and c >= clients)]
            if unknown:
                return (
                    f"groups.{name} names client {unknown[0]}; clients are 0 to {clients - 1 if clients else 'N − 1'}."
                )
        return None

    def observe(self, done: Round, population: Population) -> Iterator[Note]:
        assert done.mixture is not None
        cohort, lam = done.cohort, done.mixture.shares
        layers = cohort.layers
        shared = done.mixture.sent.any(0)  # [T + Tb]
        per_tensor = cohort.distances(done.before[: layers.P], layers.regroup("tensor"))  # ‖Δ‖ [K, T]
        norms = (per_tensor.square() * shared[: layers.T]).sum(1).sqrt()
        scale = torch.where(norms > 0, lam / norms, 0.0)  # λ_k / ‖Δ_k‖
        lam = torch.where(norms > 0, lam, 0.0)

        def direction(of: Tensor) -> Tensor:
            """Σ λ_k ê_k [P] over the clients marked in `of` [K]; some client of them has moved."""
            chosen = scale * of
            mean = cohort.reduce(Mixture.of(chosen, layers).select(shared.expand(len(chosen), -1)))
            return (mean - done.before)[: layers.P] * chosen.sum()

        everyone = torch.ones_like(lam)
        if (lam > 0).sum() >= 2:
            whole = direction(everyone)
            along = cohort.dots(whole).sum(1) / norms  # ⟨ê_k, Σ λ ê⟩
            yield from self._both("", (lam * along)[lam > 0].sum() - lam.square().sum(), lam)
            yield self.note("client", (along - lam) / (lam.sum() - lam), "client")
        for name, members in self.groups.items():
            chosen = torch.tensor([client in members for client in cohort.clients], dtype=lam.dtype)
            if (lam * chosen > 0).sum() >= 2:
                square = layers.norms(direction(chosen)).square().sum()
                yield from self._both(f"_{name}", square - (lam * chosen).square().sum(), lam * chosen)

    def _both(self, suffix: str, pairs: Tensor, lam: Tensor) -> Iterator[Note]:
        """Both normalisations of `pairs`, the sum Σ_{i≠j} λ_i λ_j c_ij over clients with the weights `lam` [K]."""
        yield self.note(f"mean{suffix}", pairs / (lam.sum().square() - lam.square().sum()))
        yield self.note(f"paper{suffix}", pairs / (lam > 0).sum())
