"""How like the clients' models are to the new global one (CCN, figure 1b)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.analysis.instrument import Instrument
from raysim.core.layers import LayerMap
from raysim.core.note import Note
from raysim.core.server import Population
from raysim.lazy import Tensor

if TYPE_CHECKING:
    from raysim.federation.round import Round


@dataclass(frozen=True)
class Similarity(Instrument):
    """Cosine of each client's model with the new global one, `client` (CCN, figure 1b); reads the models.

    Only layers that a client sends count.
    """

    reads_models: ClassVar[bool] = True

    def observe(self, done: Round, population: Population) -> Iterator[Note]:
        assert done.mixture is not None
        shared = done.mixture.sent.any(0)[: done.cohort.layers.T]
        yield self.note("client", done.cohort.each(cosine, done.before, done.after, shared), "client")


def cosine(update: Tensor, layers: LayerMap, before: Tensor, after: Tensor, shared: Tensor) -> Tensor:
    """cos(before + update, after) over the `shared` [T] tensors of values [S], float64."""
    tensors = layers.regroup("tensor")
    model, other = (before + update)[: layers.P], after[: layers.P]
    squares, others = tensors.dots(model, model)[shared].sum(), tensors.dots(other, other)[shared].sum()
    return tensors.dots(model, other)[shared].sum() / (squares * others).sqrt()
