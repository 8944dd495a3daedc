"""The way of one client's model through the rounds (FedALA: Zhang et al., 2023, figure 4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from raysim.analysis.measure import Measure, MeasureError, Taken
from raysim.lazy import Tensor, torch

if TYPE_CHECKING:
    from raysim.federation.saved import SavedRun

COLUMNS = 1 << 16  # parameters that are brought to float64 at once


@dataclass(frozen=True)
class Trajectory(Measure):
    """A client's models at start and end of its training, in their principal plane (FedALA, 2023, figure 4).

    Of the traced `rounds`, or all of them, in which the client took part; without `client`, the first of the first
    round's cohort. `kind` is start, end, or grid: points of the plane, whose loss is that of the client's training
    samples with the running statistics of its last model. Points of the way have the loss of the model itself. `way` is 0 for
    this run's models and 1 for those of the run `beside`.
    """

    client: NonNegativeInt | None = None
    """The client; null: the first of the first round's cohort."""
    rounds: tuple[PositiveInt, ...] = ()
    """Traced rounds (from 1); empty: all of them."""
    grid: Annotated[int, Field(ge=2)] = 25
    """Points along each side of the grid."""
    margin: NonNegativeFloat = 0.2
    """How far the grid reaches beyond the models, as a share of their greatest extent."""
    samples: PositiveInt = 1000
    """At most so many of the client's samples make the loss."""
    beside: str | None = None
    """The folder of a run with another method, whose models of the client are put into the same plane; null: none."""

    def take(self, run: SavedRun) -> Taken:
        first = run.of_rounds(self.rounds)[0]
        client = run.cohort(first)[0] if self.client is None else self.client
        runs = [run] if self.beside is None else [run, self._beside(run, client)]
        ways = [self._models(one, client) for one in runs]
        values = torch.cat([models for _, models in ways])  # [2 T, S], or two runs' one after another
        points, origin, axes, share = plane(values[:, : run.layers.P])
        score = run.score(run.draw(run.train_rows(client), self.samples), client)
        places = [(way, t, kind) for way, (rounds, _) in enumerate(ways) for t in rounds for kind in ("start", "end")]
        rows = [
            (way, kind, t, float(x), float(y), score(value)[0])
            for (way, t, kind), (x, y), value in zip(places, points, values, strict=True)
        ]
        took_part, last = ways[0][0], ways[0][1][-1]
        low, high = points.min(0), points.max(0)
        room = self.margin * (high - low).max()
        for y in np.linspace(low[1] - room, high[1] + room, self.grid):
            for x in np.linspace(low[0] - room, high[0] + room, self.grid):
                model = torch.cat([origin + float(x) * axes[0] + float(y) * axes[1], last[run.layers.P :]])
                rows.append((0, "grid", took_part[-1], float(x), float(y), score(model)[0]))
        columns = dict(zip(("way", "kind", "round", "x", "y", "loss"), map(list, zip(*rows, strict=True)), strict=True))
        return Taken(
            columns,
            f"the plane holds {100 * share.sum():.1f} % of the variance of {len(values)} models of client {client}",
            {"client": int(client), "explained": share.tolist()},
        )

    def _beside(self, run: SavedRun, client: int) -> SavedRun:
        other = type(run)(Path(str(self.beside)))
        if other.layers.names != run.layers.names or other.layers.P != run.layers.P:
            raise MeasureError(
                f"{other.folder}: has another model than {run.folder}; one plane holds models of one form."
            )
        if not np.array_equal(other.train_rows(client), run.train_rows(client)):
            raise MeasureError(f"{other.folder}: its client {client} has other samples than that of {run.folder}.")
        return other

    def _models(self, run: SavedRun, client: int) -> tuple[list[int], Tensor]:
        """The rounds in which the client was traced, and its models [2 T, S] at start and end of each."""
        rounds = [t for t in run.of_rounds(self.rounds) if client in run.cohort(t)]
        if len(rounds) < 2:
            raise MeasureError(f"{run.folder}: client {client} was traced in {len(rounds)} rounds; a way needs two.")
        name = f"client-{client:04d}"
        return rounds, torch.stack([run.read(t, name + end) for t in rounds for end in (".init", "")])


def plane(models: Tensor) -> tuple[np.ndarray, Tensor, Tensor, np.ndarray]:
    """The two principal directions of n vectors [n, P], by their Gram matrix: coordinates [n, 2], the mean [P], unit
    directions [2, P], and the share of the variance along each [2]. The farthest point of each axis is on its right."""
    origin = models.double().mean(0)
    gram = torch.zeros(len(models), len(models), dtype=torch.float64)
    for part, centre in zip(models.split(COLUMNS, 1), origin.split(COLUMNS), strict=True):
        centred = part.double() - centre
        gram += centred @ centred.T
    variance, vectors = torch.linalg.eigh(gram)
    variance, vectors = variance.flip(0)[:2].clamp_min(0), vectors.flip(1)[:, :2]
    extent = variance.sqrt()
    coordinates = vectors * extent
    sign = coordinates.gather(0, coordinates.abs().argmax(0, keepdim=True)).sign()[0]
    sign[sign == 0] = 1.0
    centred = models - origin.to(models.dtype)
    axes = (vectors * sign / torch.where(extent > 0, extent, torch.inf)).T.to(models.dtype) @ centred
    share = (variance / gram.trace().clamp_min(1e-300)).numpy()
    return (coordinates * sign).numpy(), origin.to(models.dtype), axes, share
