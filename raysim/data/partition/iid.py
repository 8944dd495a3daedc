"""Random samples for every client, also of skewed sizes or with swapped labels."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.core.bounds import Count, NonNegativeInt, Positive, Probability
from raysim.data.dataset import Dataset
from raysim.data.partition.base import Scheme, check_least, equal_shards, redraw, require, rounded_draw, share_out
from raysim.data.partition.shards import Shards


@dataclass(frozen=True)
class IIDEqual(Scheme):
    """floor(n / N) random samples each (FedLAW's and FedLWS's iid flag; FedLDF: 50 × 1000)."""

    clients: Count = 20
    """Number of clients."""

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> Shards:
        return equal_shards("iid_equal", rows, self.clients, rng)


@dataclass(frozen=True)
class LabelSwap(Scheme):
    """`iid_equal`, but corrupted clients exchange two labels in all their data (FedLAW, table 8).

    The paper does not say which two: every corrupted client draws its own pair.
    """

    fraction: Probability
    """Share of the clients that are corrupted, rounded to whole clients; 0.25, 0.5 or 0.75 in the paper."""
    clients: Count = 20
    """Number of clients."""

    needs_classes: ClassVar[bool] = True

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> Shards:
        return equal_shards("label_swap", rows, self.clients, rng)

    def label_map(self, data: Dataset, rng: np.random.RandomState) -> np.ndarray:
        require(data.num_classes >= 2, f"label_swap: {data.name} has one class, so there is nothing to exchange")
        seen = np.tile(np.arange(data.num_classes), (self.clients, 1))
        for client in rng.choice(self.clients, round(self.fraction * self.clients), replace=False):
            pair = rng.choice(data.num_classes, 2, replace=False)
            seen[client, pair] = pair[::-1]
        return seen


@dataclass(frozen=True)
class QuantitySkew(Scheme):
    """Sizes by Dir(alpha), labels IID (Li et al., Federated Learning on Non-IID Data Silos, 2022)."""

    alpha: Positive = 0.5
    """Concentration of the Dirichlet draw of the sizes; a smaller one gives more skew."""
    clients: Count = 20
    """Number of clients."""
    min_size: NonNegativeInt = 10
    """Rows that every client must get, before some are held out."""

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        check_least("quantity_skew", "min_size", self.min_size, self.clients, len(rows))
        pool = rng.permutation(rows)
        drawn = redraw(
            "quantity_skew",
            lambda: rounded_draw([pool], rng.dirichlet(np.full(self.clients, self.alpha), 1)),
            self.min_size,
            "raise alpha, or lower min_size or clients",
        )
        return share_out(*drawn)
