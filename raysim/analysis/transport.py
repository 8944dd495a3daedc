"""Distance of data against distance of updates (FedLWS: Shi et al., 2025, figure 5)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from raysim.analysis.measure import Measure, MeasureError, Taken, need_classes
from raysim.lazy import torch

if TYPE_CHECKING:
    from raysim.federation.saved import SavedRun


@dataclass(frozen=True)
class Transport(Measure):
    """Optimal-transport distance of clients' data against that of their updates (FedLWS, 2025, figure 5).

    Needs `raysim[analysis]`. Of all pairs of `clients`, or of the first 12, in a traced `round`, or the first of them.
    Between two data sets the cost is ‖x − x'‖² + W₂² of the Gaussians of their classes (Alvarez-Melis and Fusi, 2020), on
    at most `samples` of each client, projected to `components` principal components of all of them (0: pixels); the
    distance is the root of what the best plan costs, by POT. Updates are 1 − cos(Δ_i, Δ_j) apart.
    """

    round: PositiveInt | None = None
    """The traced round (from 1); null: the first of them."""
    clients: tuple[int, ...] = ()
    """The clients; empty: the first 12 of that round's cohort."""
    samples: PositiveInt = 500
    """At most so many samples of each client."""
    components: NonNegativeInt = 32
    """Principal components to which samples are projected; 0: none, pixels are compared."""

    packages: ClassVar[tuple[str, ...]] = ("ot", "scipy")

    def take(self, run: SavedRun) -> Taken:
        from scipy.stats import spearmanr

        need_classes(run)
        if run.is_text:
            raise MeasureError(f"{run.folder}: its samples are tokens, between which there is no distance.")
        t = run.of_rounds(() if self.round is None else (self.round,))[0]
        clients = self.clients or tuple(run.cohort(t)[:12])
        if len(clients) < 3:
            raise MeasureError(
                f"{run.folder}: round {t + 1} has {len(clients)} clients; ranks need the pairs of three."
            )
        before = run.read(t, "before")[: run.layers.P]
        updates = torch.stack([run.read(t, f"client-{c:04d}")[: run.layers.P] - before for c in clients]).double()
        unit = updates / updates.norm(dim=1, keepdim=True)
        points, labels = self._points(run, clients)
        pairs = list(itertools.combinations(range(len(clients)), 2))
        data = [dataset_distance(points[i], labels[i], points[j], labels[j]) for i, j in pairs]
        moved = [float(1 - unit[i] @ unit[j]) for i, j in pairs]
        rank = float(spearmanr(data, moved).statistic)
        columns: dict[str, list[float]] = {
            "client": [int(clients[i]) for i, _ in pairs], "other": [int(clients[j]) for _, j in pairs],
            "data_distance": data, "update_distance": moved,
        }  # fmt: skip
        return Taken(columns, f"the ranks of both distances correlate with {rank:.3f} (Spearman)", {"round": int(t)})

    def _points(self, run: SavedRun, clients: tuple[int, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Of each client samples [n, D] and their labels [n]."""
        drawn = [run.samples(run.draw(run.train_rows(c), self.samples), c) for c in clients]
        flat = [x.flatten(1).double().cpu().numpy() for x, _ in drawn]
        if 0 < self.components < flat[0].shape[1]:
            ends = np.cumsum([len(points) for points in flat])[:-1]
            flat = np.split(principal(np.concatenate(flat), self.components), ends)
        return flat, [y.cpu().numpy() for _, y in drawn]


def principal(points: np.ndarray, components: int) -> np.ndarray:
    """Coordinates of n points [n, D] along their first principal axes [n, components], or as many as there are."""
    from scipy.linalg import eigh

    centred = points - points.mean(0)
    many = len(centred) > centred.shape[1]
    gram = centred.T @ centred if many else centred @ centred.T  # the smaller of both has the same eigenvalues
    last = len(gram) - 1
    values, vectors = eigh(gram, subset_by_index=(max(0, last - components + 1), last))
    values, vectors = values[::-1], vectors[:, ::-1]
    coordinates: np.ndarray = centred @ vectors if many else vectors * np.sqrt(values.clip(0))
    return coordinates


def dataset_distance(x: np.ndarray, y: np.ndarray, x2: np.ndarray, y2: np.ndarray) -> float:
    """Root of the optimal-transport cost between two labelled samples, x [n, D] and x2 [m, D]."""
    import ot

    (classes, *of_first), (classes2, *of_second) = gaussians(x, y), gaussians(x2, y2)
    between = squared_wasserstein(*of_first, *of_second)
    labels = between[np.searchsorted(classes, y)][:, np.searchsorted(classes2, y2)]
    cost = ot.dist(x, x2, metric="sqeuclidean") + labels
    return float(np.sqrt(max(0.0, ot.emd2([], [], cost, numItermax=1_000_000))))


def gaussians(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes that occur, sorted, and the mean [classes, D] and covariance [classes, D, D] of each."""
    classes = np.unique(y)
    parts = [x[y == c] for c in classes]
    means = np.stack([part.mean(0) for part in parts])
    centred = [part - mean for part, mean in zip(parts, means, strict=True)]
    return classes, means, np.stack([part.T @ part / len(part) for part in centred])


def squared_wasserstein(
    means: np.ndarray, covariances: np.ndarray, means2: np.ndarray, covariances2: np.ndarray
) -> np.ndarray:
    """[g, h] W₂² between Gaussians with means [g, D], [h, D] and covariances [g, D, D], [h, D, D], which may be singular:
    ‖μ − μ'‖² + tr(Σ + Σ' − 2 (Σ^½ Σ' Σ^½)^½)."""
    values, vectors = np.linalg.eigh(covariances)
    roots = (vectors * np.sqrt(values.clip(0))[:, None]) @ vectors.swapaxes(1, 2)
    mixed = roots[:, None] @ covariances2 @ roots[:, None]
    crossed = np.sqrt(np.linalg.eigvalsh(mixed).clip(0)).sum(-1)
    traces, traces2 = (np.trace(one, axis1=1, axis2=2) for one in (covariances, covariances2))
    apart = np.square(means[:, None] - means2).sum(-1)
    distance: np.ndarray = apart + (traces[:, None] + traces2 - 2 * crossed).clip(0)
    return distance
