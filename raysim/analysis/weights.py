"""What the clients' weights go with (FedLAW: Li et al., 2023, table 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from pydantic import PositiveFloat

from raysim.analysis.measure import Measure, MeasureError, Taken, need_classes
from raysim.store import tables

if TYPE_CHECKING:
    from raysim.federation.saved import SavedRun


@dataclass(frozen=True)
class Correlation(Measure):
    """Clients' weights against size and heterogeneity degree, and Pearson's r of each (FedLAW, 2023, table 11).

    A client's `weight` is Σ_t λ_k over the rounds; its `degree` is 1 / Var_c(q_kc) over its class shares, at most `cap`,
    which a client with all classes alike would have; `product` is samples times degree. Of the clients that have been
    aggregated at least once.
    """

    cap: PositiveFloat = 10_000.0
    """Greatest degree of heterogeneity that a client can have."""

    def take(self, run: SavedRun) -> Taken:
        need_classes(run)
        rows = tables.read(run.folder, "clients")
        client, weight = rows["client"].to_numpy(), np.nan_to_num(rows["weight"].to_numpy(zero_copy_only=False))
        total = np.bincount(client, weight, minlength=len(run.sizes))
        there = np.flatnonzero(np.bincount(client[weight > 0], minlength=len(run.sizes)))
        if len(there) < 3:
            raise MeasureError(f"{run.folder}: {len(there)} clients have been aggregated; a correlation needs three.")
        counts = run.label_counts[there]
        samples = counts.sum(1)
        degree = degrees(counts, self.cap)
        found = {"samples": samples, "degree": degree, "product": samples * degree}
        correlations = ", ".join(f"{name} {pearson(total[there], values):.3f}" for name, values in found.items())
        return Taken({"client": there, "weight": total[there], **found}, f"Pearson's r of weight with {correlations}")


def degrees(counts: np.ndarray, cap: float) -> np.ndarray:
    """[N] heterogeneity degree of clients with these samples by class [N, C]."""
    variance = (counts / counts.sum(1, keepdims=True)).var(1)
    degree: np.ndarray = 1 / np.maximum(variance, 1 / cap)
    return degree


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's r; NaN where one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else float("nan")
