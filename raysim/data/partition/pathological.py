"""Label skew by choice of classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.core.bounds import Count, NonNegativeInt, PositiveInt
from raysim.data.dataset import Dataset
from raysim.data.partition.base import (
    NOTHING,
    MergingScheme,
    Scheme,
    class_pools,
    least_size,
    require,
    share_out,
)


@dataclass(frozen=True)
class Pathological(MergingScheme):
    """A few classes a client in disjoint blocks, train and test merged, 75/25 (FedALA, Zhang et al., 2023).

    A class goes to the first clients in id order that still lack a class, so clients with near ids share classes. Rows
    are given out in the order of the data, unshuffled, as in the library. When the quotas of all clients are used up, the
    classes that remain are left out.
    """

    classes_per_client: PositiveInt = 2
    """Classes that a client holds."""
    clients: Count = 20
    """Number of clients."""
    balanced: bool = False
    """Whether the blocks of a class have equal sizes instead of random ones."""
    least: NonNegativeInt | None = 40
    """Random block sizes are at least least / C rows; null is min(40, n / 2N), as the library does now."""
    sharing: Literal["ceil", "floor"] = "ceil"
    """How N / C · classes_per_client, the number of clients that share a class, is rounded; floor is the code of
    2022."""

    needs_classes: ClassVar[bool] = True

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pools = class_pools(data, rows)
        quota = np.full(self.clients, self.classes_per_client)
        sharing, rest = divmod(self.clients * self.classes_per_client, data.num_classes)
        sharing += self.sharing == "ceil" and rest > 0
        require(
            sharing >= 1,
            f"pathological: {self.clients} clients of {self.classes_per_client} classes leave no whole client for each "
            f"of {data.num_classes} classes; raise classes_per_client or clients, or set sharing: ceil",
        )
        least = least_size(self.least, len(rows), self.clients) / data.num_classes
        counts = np.zeros((data.num_classes, self.clients), np.int64)
        for c, pool in enumerate(pools):
            takers = np.flatnonzero(quota > 0)[:sharing]
            if not takers.size:
                break
            quota[takers] -= 1
            counts[c, takers] = self._block_sizes(c, len(pool), len(takers), least, rng)
        return share_out(pools, counts)

    def _block_sizes(self, c: int, n: int, takers: int, least: float, rng: np.random.RandomState) -> np.ndarray:
        """[takers] sizes of the blocks of class c; the last one takes what is left."""
        equal = n / takers
        if self.balanced:
            sizes = np.full(takers - 1, int(equal))
        else:
            low, high = int(max(equal / 10, least)), int(equal)
            require(
                low < high or takers == 1,
                f"pathological: the {n} rows of class {c} do not make {takers} blocks of random size from {low} up; "
                "lower least or clients, or set balanced: true",
            )
            sizes = rng.randint(low, high, takers - 1) if takers > 1 else NOTHING
        return np.append(sizes, n - sizes.sum())


@dataclass(frozen=True)
class ClassGroups(Scheme):
    """Equal clients: a third has the lower half of the classes, a third the upper, a third all (FedLWS). Or clients
    that have the classes named for them (CCN, 2024, figure 1)."""

    clients: Count = 12
    """Number of clients; a multiple of 3, or one for each of `groups`."""
    groups: tuple[tuple[int, ...], ...] | None = None
    """The classes of each client, by number; those that share a class have equal parts of it. Null: the thirds."""

    needs_classes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.groups is not None:
            named = len(self.groups)
            require(self.clients == named >= 1, f"class_groups: clients is {self.clients}, but groups names {named}")
            return
        require(
            self.clients >= 3 and self.clients % 3 == 0, f"class_groups: clients is {self.clients}; use a multiple of 3"
        )

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        if self.groups is not None:
            return self._shares(self.groups, data, rows, rng)
        third = self.clients // 3
        is_lower = data.y[rows] < data.num_classes // 2
        lower, upper = rng.permutation(rows[is_lower]), rng.permutation(rows[~is_lower])
        # n / N each, or less where the rarer half of the classes does not give a third of the clients as much
        size = min(len(rows) // self.clients, len(lower) // third, len(upper) // third)
        require(
            size >= 1,
            f"class_groups: {len(lower)} and {len(upper)} samples of the two halves of the classes are too few "
            f"for {self.clients} clients; lower clients",
        )
        rest = rng.permutation(np.concatenate([lower[third * size :], upper[third * size :]]))
        return [shard for pool in (lower, upper, rest) for shard in pool[: third * size].reshape(third, size)]

    def _shares(
        self, groups: Sequence[Sequence[int]], data: Dataset, rows: np.ndarray, rng: np.random.RandomState
    ) -> list[np.ndarray]:
        """Equal parts of each class, at random, for the clients that have it."""
        wrong = sorted({c for group in groups for c in group} - set(range(data.num_classes)))
        require(
            not wrong, f"class_groups: groups names the classes {wrong}; {data.name} has 0 to {data.num_classes - 1}"
        )
        holds = np.array([[c in group for group in groups] for c in range(data.num_classes)])  # [C, N]
        pools = [rng.permutation(pool) for pool in class_pools(data, rows)]
        parts = np.array([len(pool) for pool in pools]) // holds.sum(1).clip(1)
        return share_out(pools, holds * parts[:, None])
