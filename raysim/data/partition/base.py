"""What every scheme is, and what several of them share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from raysim.core.bounds import OpenFraction, Seed
from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.partition.shards import Shards

NOTHING = np.empty(0, np.int64)

# The shuffled rows of each class, and how many of them each client gets, [C, N].
Draw = tuple[Sequence[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Seeded:
    """What every scheme draws from."""

    seed: Seed | None = field(default=None, kw_only=True)
    """Seed of the draws; null takes the seed of the run."""


class Scheme(Seeded):
    """A way to partition rows over clients. Subclasses are frozen dataclasses; by default they partition the training
    split."""

    needs_classes: ClassVar[bool] = False
    """Whether the scheme works only where every sample has one class."""

    clients: int | None = None
    """Clients in the federation; null where the data decide."""
    test_frac: float | None = None
    """Share of each client's rows that is held out for its test, where the scheme's paper sets it."""

    def rows(self, data: Dataset) -> np.ndarray:
        """[n] int64: the rows to partition, before the proxy set is taken out of them."""
        return np.arange(data.train_rows)

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> Sequence[np.ndarray]:
        """Disjoint subsets of `rows`, one for each client. Raises DataError where the rows do not suffice."""
        raise NotImplementedError

    def label_map(self, data: Dataset, rng: np.random.RandomState) -> np.ndarray | None:
        """[N, C] int64: the labels that clients see, drawn after the split; None is the truth."""
        return None


@dataclass(frozen=True)
class MergingScheme(Scheme):
    """A scheme of FedALA's library: train and test are one pool, and every client holds out its own test rows."""

    merge: bool = field(default=True, kw_only=True)
    """Whether the test split is partitioned too; false for Tiny-ImageNet."""
    test_frac: OpenFraction = field(default=0.25, kw_only=True)
    """Share of each client's rows that is held out for its test; 0 would leave nothing to test on, because the merged test
    split belongs to the clients."""

    def rows(self, data: Dataset) -> np.ndarray:
        return np.arange(len(data.y) if self.merge else data.train_rows)


def require(holds: bool, sentence: str) -> None:
    """Raise DataError with `sentence` unless the condition holds."""
    if not holds:
        raise DataError(sentence)


def class_pools(data: Dataset, rows: np.ndarray) -> list[np.ndarray]:
    """`rows` by class, in order."""
    return [rows[data.y[rows] == c] for c in range(data.num_classes)]


def share_out(pools: Sequence[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Each client's rows: `counts` [C, N] rows from the front of each class pool, client by client; the rest is left out."""
    parts = [np.split(pool, ends)[:-1] for pool, ends in zip(pools, np.cumsum(counts, axis=1), strict=True)]
    return [np.concatenate(shard) for shard in zip(*parts, strict=True)]


def check_least(scheme: str, setting: str, least: int, clients: int, rows: int) -> None:
    """Before any draw, whether there are `least` rows for every client; `setting` is what asks for them."""
    require(
        least * clients <= rows,
        f"{scheme}: {clients} clients of at least {least} samples need {least * clients}, but there are {rows}; lower "
        f"{setting} or clients",
    )


def redraw(scheme: str, draw: Callable[[], Draw | None], least: int, way_out: str, redraws: int = 100) -> Draw:
    """The first draw in which every client has `least` rows; a draw that cannot be carried out is None."""
    best = None
    for _ in range(1 + redraws):
        drawn = draw()
        if drawn is not None:
            smallest = int(drawn[1].sum(0).min())
            if smallest >= least:
                return drawn
            best = max(best or 0, smallest)
    found = (
        "no draw could be carried out"
        if best is None
        else f"the smallest client had {best} samples at best, not {least}"
    )
    raise DataError(f"{scheme}: in {redraws} redraws {found}; {way_out}")


def rounded_draw(pools: Sequence[np.ndarray], shares: np.ndarray) -> Draw | None:
    """Class shares [C, N] to counts, as FedLAW's code rounds them.

    The cumulative counts are rounded half to even and end where the class is used up; the last client takes what is
    left. None where the shares are not finite.
    """
    if not np.isfinite(shares).all():  # a tiny alpha underflows: every gamma variate of a class is 0
        return None
    sizes = np.array([len(pool) for pool in pools])[:, None]
    ends = np.minimum(np.cumsum(np.rint(shares * sizes), axis=1), sizes).astype(np.int64)
    ends[:, -1:] = sizes
    return pools, np.diff(ends, axis=1, prepend=0)


def equal_shards(scheme: str, rows: np.ndarray, clients: int, rng: np.random.RandomState) -> Shards:
    """floor(n / N) random rows for each client."""
    size = len(rows) // clients
    require(size >= 1, f"{scheme}: {len(rows)} samples are too few for {clients} clients; lower clients")
    return Shards.sized(rng.permutation(rows)[: size * clients], np.full(clients, size))


def long_tail(sizes: np.ndarray, ratio: float) -> np.ndarray:
    """floor(sizes_c · ratio ** (-c / (C - 1))), [C] int64."""
    tail = ratio ** (-np.arange(len(sizes)) / max(len(sizes) - 1, 1))
    # A product that rounding left just below a whole number is that number.
    return np.floor(sizes * tail + 1e-9).astype(np.int64)


def least_size(least: int | None, n: int, clients: int) -> int:
    """Rows that every client must have; None is what FedALA's library uses now."""
    return min(40, n // (2 * clients)) if least is None else least
