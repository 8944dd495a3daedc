"""How like the clients' models are to the new global one (CCN, figure 1b)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from raysim.analysis.instrument import Instrument
from raysim.core.layers import LayerMap
from raysim.core.note import Note
from raysim.core.round_view import RoundView
from raysim.core.server import Population
from raysim.late import Tensor


@dataclass(frozen=True)
class Similarity(Instrument):
    """Cosine of each client's model with the new global one, `client` (CCN, figure 1b); reads the models."""

    reads_models: ClassVar[bool] = True

    def observe(self, done: RoundView, population: Population) -> Iterator[Note]:
        yield self.note("client", done.cohort.each(cosine, done.before, done.after), "client")


def cosine(update: Tensor, layers: LayerMap, before: Tensor, after: Tensor) -> Tensor:
    """cos(before + update, after) over the parameters of values [S], float64."""
    whole = layers.regroup("model")
    model, other = (before + update)[: layers.P], after[: layers.P]
    return whole.dots(model, other)[0] / (whole.dots(model, model)[0] * whole.dots(other, other)[0]).sqrt()
