"""Label skew by Dirichlet shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le

from raysim.core.bounds import MOST, Count, NonNegativeInt, Positive, PositiveInt
from raysim.data.dataset import Dataset
from raysim.data.partition.base import (
    Draw,
    MergingScheme,
    Scheme,
    check_least,
    class_pools,
    least_size,
    long_tail,
    redraw,
    require,
    rounded_draw,
    share_out,
)

PATIENCE = 2000  # redraws of the schemes whose codes redraw for ever; 100 clients at alpha 0.1 need about 200


@dataclass(frozen=True)
class DirichletCounts(Scheme):
    """Each class split over clients by Dir(alpha), sizes unequal (FedLAW, Li et al., 2023; FedLWS)."""

    alpha: Positive
    """Concentration of the Dirichlet draws; a smaller one gives more skew."""
    clients: Count = 20
    """Number of clients."""
    min_size: NonNegativeInt = 0
    """Rows that every client must get, before some are held out; 0, as in the codes, lets a client get nothing."""

    needs_classes: ClassVar[bool] = True

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        check_least("dirichlet_counts", "min_size", self.min_size, self.clients, len(rows))
        pools = [rng.permutation(pool) for pool in class_pools(data, rows)]
        return counts_split("dirichlet_counts", pools, self.alpha, self.clients, rng, self.min_size)


def counts_split(
    scheme: str, pools: Sequence[np.ndarray], alpha: float, clients: int, rng: np.random.RandomState, least: int = 0
) -> list[np.ndarray]:
    """`dirichlet_counts` from the shuffled rows of each class on."""
    drawn = redraw(
        scheme,
        lambda: rounded_draw(pools, rng.dirichlet(np.full(clients, alpha), len(pools))),
        least,
        "raise alpha, or lower min_size or clients" if least else "raise alpha, or lower clients",
    )
    return [rng.permutation(shard) for shard in share_out(*drawn)]


@dataclass(frozen=True)
class DirichletHybrid(Scheme):
    """Half the clients by Dir(alpha1), the others by Dir(alpha2) on what is left (FedLAW, figs. 5, 13)."""

    alpha1: Positive = 10.0
    """Concentration for the balanced half of the clients."""
    alpha2: Positive = 0.1
    """Concentration for the other clients."""
    clients: Annotated[int, Ge(2), Le(MOST)] = 20
    """Number of clients; the first half, rounded down, are the balanced ones."""
    equal_sizes: bool = False
    """Whether only the class mixes are drawn and all clients get equally many rows, as in FedLAW's figure 12 (3
    clients); how rows are filled in is ours."""

    needs_classes: ClassVar[bool] = True

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pools = [rng.permutation(pool) for pool in class_pools(data, rows)]
        half = self.clients // 2

        def draw() -> Draw | None:
            first = rng.dirichlet(np.full(self.clients, self.alpha1), len(pools))[:, :half]
            second = rng.dirichlet(np.full(self.clients - half, self.alpha2), len(pools))
            return rounded_draw(pools, np.hstack([first, (1 - first.sum(1, keepdims=True)) * second]))

        drawn = redraw("dirichlet_hybrid", draw, 0, "raise alpha1 and alpha2")
        if self.equal_sizes:
            return _equal_sizes(*drawn, rng)
        return [rng.permutation(shard) for shard in share_out(*drawn)]


def _equal_sizes(pools: Sequence[np.ndarray], counts: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
    """n // N rows for each client in turn, in the class mix of its column of `counts` [C, N].

    Where a class is used up, the client is filled at random from all rows that are left.
    """
    size = sum(map(len, pools)) // counts.shape[1]
    shards = []
    for mix in counts.T:
        wanted = (size * mix) // max(mix.sum(), 1)
        shard = np.concatenate([pool[:want] for pool, want in zip(pools, wanted, strict=True)])
        pools = [pool[want:] for pool, want in zip(pools, wanted, strict=True)]
        fill = rng.permutation(np.concatenate(pools))[: size - len(shard)]
        pools = [pool[~np.isin(pool, fill)] for pool in pools]
        shards.append(rng.permutation(np.concatenate([shard, fill])))
    return shards


@dataclass(frozen=True)
class DirichletLongtail(Scheme):
    """Classes thinned to a long tail of ratio rho, then `dirichlet_counts` (FedLAW, table 7)."""

    alpha: Positive
    """Concentration of the Dirichlet draws; a smaller one gives more skew."""
    rho: Annotated[float, Ge(1)] = 5.0
    """Ratio of the long tail: the first class keeps all its rows, the last one in rho."""
    clients: Count = 20
    """Number of clients."""

    needs_classes: ClassVar[bool] = True

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pools = [rng.permutation(pool) for pool in class_pools(data, rows)]
        keep = long_tail(np.array([len(pool) for pool in pools]), self.rho)
        kept = [pool[:k] for pool, k in zip(pools, keep, strict=True)]
        return counts_split("dirichlet_longtail", kept, self.alpha, self.clients, rng)


def capped_draw(
    pools: Sequence[np.ndarray], holders: np.ndarray, alpha: float, rng: np.random.RandomState
) -> Draw | None:
    """The draw of `dirichlet_capped` among clients that may hold a class (`holders` [C, N] bool); None if none can take one."""
    clients = holders.shape[1]
    fair = sum(map(len, pools)) / clients
    counts = np.zeros(holders.shape, np.int64)
    shuffled = []
    for c, pool in enumerate(pools):
        shuffled.append(rng.permutation(pool))
        shares = rng.dirichlet(np.full(clients, alpha)) * ((counts.sum(0) < fair) & holders[c])
        if not shares.sum() > 0:
            return None
        ends = (np.cumsum(shares / shares.sum()) * len(pool)).astype(np.int64)
        ends[np.flatnonzero(holders[c])[-1] :] = len(pool)  # the cumulative sum may end a rounding error below 1
        counts[c] = np.diff(ends, prepend=0)
    return shuffled, counts


@dataclass(frozen=True)
class DirichletCapped(MergingScheme):
    """Classes by Dir(alpha) over clients below n/N, train and test merged, 75/25 (FedALA, Zhang et al., 2023).

    With seed 1 it is the split of MNIST that FedALA's authors published; the 75/25 cut is drawn from our own streams.
    FedDisco's NIID-1 is ``least=10, merge=False``.
    """

    alpha: Positive = 0.1
    """Concentration of the Dirichlet draws; a smaller one gives more skew."""
    clients: Count = 20
    """Number of clients."""
    least: NonNegativeInt | None = 40
    """Rows that every client must have; draws are repeated until it holds. Null is min(40, n / 2N), as the library
    does now."""

    needs_classes: ClassVar[bool] = True

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        least = least_size(self.least, len(rows), self.clients)
        check_least("dirichlet_capped", "least", least, self.clients, len(rows))
        pools = class_pools(data, rows)
        everyone = np.ones((len(pools), self.clients), bool)
        drawn = redraw(
            "dirichlet_capped",
            lambda: capped_draw(pools, everyone, self.alpha, rng),
            least,
            "raise alpha, or lower least or clients",
            PATIENCE,
        )
        return share_out(*drawn)


@dataclass(frozen=True)
class ExtendedDirichlet(MergingScheme):
    """classes_per_client random classes a client, each split among its holders as in `dirichlet_capped` (Li et al., 2023; PFLlib).

    A try draws both the classes of the clients and the split. What rounding leaves of a class goes to its last holder.
    """

    classes_per_client: PositiveInt = 2
    """Classes that a client holds."""
    alpha: Positive = 0.1
    """Concentration of the Dirichlet draws; a smaller one gives more skew."""
    clients: Count = 20
    """Number of clients."""
    least: NonNegativeInt = 10
    """Rows that every client must have; draws are repeated until it holds."""

    needs_classes: ClassVar[bool] = True

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        classes = data.num_classes
        require(
            self.classes_per_client <= classes <= self.classes_per_client * self.clients,
            f"extended_dirichlet: {self.clients} clients of {self.classes_per_client} classes cannot hold {classes} "
            "classes; change classes_per_client or clients",
        )
        check_least("extended_dirichlet", "least", self.least, self.clients, len(rows))
        pools = class_pools(data, rows)
        holders_wanted = max(self.classes_per_client * self.clients // classes // 2, 1)

        def draw() -> Draw | None:
            holders = np.zeros((classes, self.clients), bool)
            for client in range(self.clients):
                holders[rng.choice(classes, self.classes_per_client, replace=False), client] = True
            if holders.sum(1).min() < holders_wanted:
                return None
            return capped_draw(pools, holders, self.alpha, rng)

        drawn = redraw(
            "extended_dirichlet",
            draw,
            self.least,
            "raise classes_per_client or alpha, or lower least or clients",
            PATIENCE,
        )
        return share_out(*drawn)
