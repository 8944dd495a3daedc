"""Which client holds which samples: the partitions of the papers, and the server's proxy set.

A scheme draws from `numpy.random.RandomState`, in the order of the code that it stands for, so that its seed gives the
split of the paper. What raysim adds, per-client hold-outs and the proxy set, has streams of its own.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from raysim.data.datasets import Dataset
from raysim.data.errors import DataError

if TYPE_CHECKING:
    import pyarrow

NOTHING = np.empty(0, np.int64)
PATIENCE = 2000  # redraws of the schemes whose codes redraw for ever; 100 clients at alpha 0.1 need about 200

# The shuffled rows of each class, and how many of them each client gets, [C, N].
Draw = tuple[Sequence[np.ndarray], np.ndarray]

_HOLD_OUT_TEST, _HOLD_OUT_VAL, _PROXY = 1, 2, 3  # second word of each stream's seed, after the partition's own


@dataclass(frozen=True, eq=False)
class Partition:
    """Rows of a Dataset by client and use. A row has one use, except that the server may test on clients' test rows, and
    on an oracle's proxy set."""

    train: tuple[np.ndarray, ...]  # per client, int64; empty where a client got nothing
    test: tuple[np.ndarray, ...]
    val: tuple[np.ndarray, ...]
    server_test: np.ndarray  # rows that the global model is tested on
    proxy: np.ndarray  # rows of the server's proxy set
    label_map: np.ndarray | None = None  # [N, C] int64: what client i takes class c for (P9); None: the truth

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64 training samples."""
        return np.array([len(rows) for rows in self.train], np.int64)

    def label_counts(self, data: Dataset) -> np.ndarray:
        """[N, C] int64 training samples by client and by the label the client sees."""
        counts = np.zeros((self.clients, data.num_classes), np.int64)
        for client, rows in enumerate(self.train):
            labels = data.y[rows] if self.label_map is None else self.label_map[client, data.y[rows]]
            counts[client] = np.bincount(labels, minlength=data.num_classes)
        return counts

    def sha256(self) -> str:
        """Hash of all rows, their order and the label map: the same on every machine."""
        digest = hashlib.sha256(f"{self.clients} {self.label_map is not None}".encode())
        maps = [] if self.label_map is None else list(self.label_map)
        for rows in (*self.train, *self.test, *self.val, self.server_test, self.proxy, *maps):
            digest.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
        return digest.hexdigest()

    def to_table(self, data: Dataset | None = None) -> "pyarrow.Table":
        """Columns sample, client (-1: the server) and split; the number of clients and the label map are metadata.

        With `data` also label, the class that its holder takes the sample for, and the names of the classes: then the
        table tells all of the partition without the data set.
        """
        import pyarrow

        uses = [
            (client, split, rows)
            for split in ("train", "test", "val")
            for client, rows in enumerate(getattr(self, split))
        ]
        uses += [(-1, "server_test", self.server_test), (-1, "proxy", self.proxy)]
        lengths = [len(rows) for _, _, rows in uses]
        header = {"clients": self.clients, "label_map": None if self.label_map is None else self.label_map.tolist()}
        columns = {
            "sample": np.concatenate([rows for _, _, rows in uses]),
            "client": np.repeat(np.array([client for client, _, _ in uses], np.int64), lengths),
            "split": pyarrow.array(np.repeat([split for _, split, _ in uses], lengths)).dictionary_encode(),
        }
        if data is not None:
            truth = data.y[columns["sample"]]
            seen = truth if self.label_map is None else self.label_map[columns["client"], truth]
            columns["label"] = np.where(columns["client"] < 0, truth, seen)
            header |= {"data": data.name, "classes": data.classes}
        return pyarrow.table(columns).replace_schema_metadata({"raysim.partition": json.dumps(header)})

    @classmethod
    def from_table(cls, table: "pyarrow.Table") -> "Partition":
        """The partition that `to_table` wrote, row for row. Raises DataError for any other table."""
        stored = (table.schema.metadata or {}).get(b"raysim.partition")
        if stored is None or not {"sample", "client", "split"} <= set(table.column_names):
            raise DataError(
                "the table is no saved partition: it lacks a column sample, client or split, or its metadata"
            )
        header = json.loads(stored)
        sample, client = (table[name].to_numpy().astype(np.int64) for name in ("sample", "client"))
        split = table["split"].to_numpy()

        def by_client(name: str) -> tuple[np.ndarray, ...]:
            rows, owner = sample[split == name], client[split == name]
            return tuple(np.split(rows, np.searchsorted(owner, np.arange(1, header["clients"]))))

        label_map = None if header["label_map"] is None else np.array(header["label_map"], np.int64)
        return cls(
            by_client("train"),
            by_client("test"),
            by_client("val"),
            sample[split == "server_test"],
            sample[split == "proxy"],
            label_map,
        )


class Scheme:
    """A way to deal rows to clients. Subclasses are frozen dataclasses; unchanged, they deal the training split."""

    seed: int | None  # null: the run's seed
    test_frac: float | None = None  # share of a client's rows held out for its test, where the scheme's paper sets it

    def rows(self, data: Dataset) -> np.ndarray:
        """The rows to deal, before the proxy set is taken out of them."""
        return np.arange(data.train_rows)

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        """Disjoint subsets of `rows`, one a client."""
        raise NotImplementedError

    def label_map(self, data: Dataset, rng: np.random.RandomState) -> np.ndarray | None:
        """[N, C] labels that clients see, drawn after the split."""
        return None


class MergingScheme(Scheme):
    """A scheme of FedALA's library: train and test are one pool, and every client holds out its own test rows."""

    merge: bool
    test_frac: float

    def rows(self, data: Dataset) -> np.ndarray:
        return np.arange(len(data.y) if self.merge else data.train_rows)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise DataError(sentence)


def _pools(data: Dataset, rows: np.ndarray) -> list[np.ndarray]:
    """`rows` by class, in order."""
    return [rows[data.y[rows] == c] for c in range(data.num_classes)]


def _deal(pools: Sequence[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Deals `counts` [C, N] rows from the front of each class pool to the clients in turn; the rest stays undealt."""
    parts = [np.split(pool, ends)[:-1] for pool, ends in zip(pools, np.cumsum(counts, axis=1), strict=True)]
    return [np.concatenate(shard) for shard in zip(*parts, strict=True)]


def _redraw(scheme: str, draw: Callable[[], Draw | None], least: int, way_out: str, redraws: int = 100) -> Draw:
    """The first draw in which every client has `least` rows; a draw that cannot be dealt is None."""
    best = None
    for _ in range(1 + redraws):
        drawn = draw()
        if drawn is not None:
            smallest = int(drawn[1].sum(0).min())
            if smallest >= least:
                return drawn
            best = max(best or 0, smallest)
    found = "no draw could be dealt" if best is None else f"the smallest client had {best} samples at best, not {least}"
    raise DataError(f"{scheme}: in {redraws} redraws {found}; {way_out}")


def _rounded_draw(pools: Sequence[np.ndarray], shares: np.ndarray) -> Draw | None:
    """Class shares [C, N] to counts as FedLAW's code cuts: rounded half to even, each client from where the one before
    ended, cut where the class is used up; the last client takes what is left."""
    if not np.isfinite(shares).all():  # a tiny alpha underflows: every gamma variate of a class is 0
        return None
    sizes = np.array([len(pool) for pool in pools])[:, None]
    ends = np.minimum(np.cumsum(np.rint(shares * sizes), axis=1), sizes).astype(np.int64)
    ends[:, -1:] = sizes
    return pools, np.diff(ends, axis=1, prepend=0)


@dataclass(frozen=True)
class DirichletCounts(Scheme):
    """P1: each class split over clients by Dir(alpha), sizes unequal (FedLAW, Li et al., 2023; FedLWS)."""

    alpha: float
    clients: int = 20
    min_size: int = 0  # 0: as in the codes, a client may get nothing
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self.alpha > 0, f"dirichlet_counts: alpha is {self.alpha}; it must be positive")
        _require(self.clients >= 1, f"dirichlet_counts: clients is {self.clients}; it must be at least 1")

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pools = [rng.permutation(pool) for pool in _pools(data, rows)]
        drawn = _redraw(
            "dirichlet_counts",
            lambda: _rounded_draw(pools, rng.dirichlet(np.full(self.clients, self.alpha), len(pools))),
            self.min_size,
            "raise alpha, or lower min_size or clients",
        )
        return [rng.permutation(shard) for shard in _deal(*drawn)]


@dataclass(frozen=True)
class DirichletHybrid(Scheme):
    """P2: half the clients by Dir(alpha1), the others by Dir(alpha2) on what is left (FedLAW, figs. 5, 13)."""

    alpha1: float = 10.0
    alpha2: float = 0.1
    clients: int = 20  # the first clients // 2 are the balanced ones
    equal_sizes: bool = False  # FedLAW's figure 12 (3 clients): only class mixes are drawn; the filling is ours
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.alpha1 > 0 and self.alpha2 > 0,
            f"dirichlet_hybrid: alpha1 is {self.alpha1} and alpha2 {self.alpha2}; both must be positive",
        )
        _require(self.clients >= 2, f"dirichlet_hybrid: clients is {self.clients}; it must be at least 2")

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pools = [rng.permutation(pool) for pool in _pools(data, rows)]
        half = self.clients // 2

        def draw() -> Draw | None:
            first = rng.dirichlet(np.full(self.clients, self.alpha1), len(pools))[:, :half]
            second = rng.dirichlet(np.full(self.clients - half, self.alpha2), len(pools))
            return _rounded_draw(pools, np.hstack([first, (1 - first.sum(1, keepdims=True)) * second]))

        drawn = _redraw("dirichlet_hybrid", draw, 0, "raise alpha1 and alpha2")
        if self.equal_sizes:
            return _equal_sizes(*drawn, rng)
        return [rng.permutation(shard) for shard in _deal(*drawn)]


def _equal_sizes(pools: Sequence[np.ndarray], counts: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
    """Client by client, n // N rows in the class mix of its column of `counts` [C, N], as far as the classes last; what
    is short is filled at random from all that is left."""
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
    """P3: classes thinned to a long tail of ratio rho, then P1 (FedLAW, table 7)."""

    alpha: float
    rho: float = 5.0  # the first class keeps all its rows, the last one in rho
    clients: int = 20
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self.rho >= 1, f"dirichlet_longtail: rho is {self.rho}; it must be at least 1")
        DirichletCounts(self.alpha, self.clients)

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pools = [rng.permutation(pool) for pool in _pools(data, rows)]
        keep = _long_tail(np.array([len(pool) for pool in pools]), self.rho)
        kept = np.concatenate([pool[:k] for pool, k in zip(pools, keep, strict=True)])
        return DirichletCounts(self.alpha, self.clients).split(data, kept, rng)


def _long_tail(sizes: np.ndarray, ratio: float) -> np.ndarray:
    """floor(sizes_c · ratio ** (-c / (C - 1))), [C] int64."""
    tail = ratio ** (-np.arange(len(sizes)) / max(len(sizes) - 1, 1))
    # A product that rounding left just below a whole number is that number.
    return np.floor(sizes * tail + 1e-9).astype(np.int64)


def _capped_draw(
    pools: Sequence[np.ndarray], holders: np.ndarray, alpha: float, rng: np.random.RandomState
) -> Draw | None:
    """P4's draw among the clients that may hold a class (`holders` [C, N] bool); None if nobody can take a class."""
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
    """P4: classes by Dir(alpha) over clients below n/N, train and test merged, 75/25 (FedALA, Zhang et al., 2023).

    With seed 1 it is the split of MNIST that FedALA's authors published; the 75/25 cut is drawn from our own streams.
    FedDisco's NIID-1 is ``least=10, merge=False``.
    """

    alpha: float = 0.1
    clients: int = 20
    least: int | None = 40  # redraw until every client has as many; null: min(40, n / 2N), as the library does now
    merge: bool = True  # also deal the test split (False for Tiny-ImageNet)
    test_frac: float = 0.25
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self.alpha > 0, f"dirichlet_capped: alpha is {self.alpha}; it must be positive")
        _check_merged("dirichlet_capped", self.clients, self.test_frac)

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pools = _pools(data, rows)
        everyone = np.ones((len(pools), self.clients), bool)
        drawn = _redraw(
            "dirichlet_capped",
            lambda: _capped_draw(pools, everyone, self.alpha, rng),
            _least(self.least, len(rows), self.clients),
            "raise alpha, or lower least or clients",
            PATIENCE,
        )
        return _deal(*drawn)


def _least(least: int | None, n: int, clients: int) -> int:
    return min(40, n // (2 * clients)) if least is None else least


def _check_merged(scheme: str, clients: int, test_frac: float) -> None:
    _require(clients >= 1, f"{scheme}: clients is {clients}; it must be at least 1")
    # 0 would leave nothing to test on: the merged test split belongs to the clients.
    _require(0 < test_frac < 1, f"{scheme}: test_frac is {test_frac}; it must lie between 0 and 1")


@dataclass(frozen=True)
class Pathological(MergingScheme):
    """P5: a few classes a client in disjoint blocks, train and test merged, 75/25 (FedALA, Zhang et al., 2023).

    A class goes to the first clients in id order that still lack a class, so clients with near ids share classes. Rows
    are dealt in the order of the data, unshuffled, as in the library. When the quotas of all clients are used up, the
    classes that remain are left out.
    """

    classes_per_client: int = 2
    clients: int = 20
    balanced: bool = False  # equal blocks within a class, instead of random sizes
    least: int | None = 40  # random sizes are at least least / C; null: min(40, n / 2N), as the library does now
    sharing: Literal["ceil", "floor"] = "ceil"  # of N / C · classes_per_client clients a class; floor: the code of 2022
    merge: bool = True
    test_frac: float = 0.25
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.classes_per_client >= 1,
            f"pathological: classes_per_client is {self.classes_per_client}; it must be at least 1",
        )
        _check_merged("pathological", self.clients, self.test_frac)

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pools = _pools(data, rows)
        quota = np.full(self.clients, self.classes_per_client)
        sharing, rest = divmod(self.clients * self.classes_per_client, data.num_classes)
        sharing += self.sharing == "ceil" and rest > 0
        _require(
            sharing >= 1,
            f"pathological: {self.clients} clients of {self.classes_per_client} classes leave no whole client for each "
            f"of {data.num_classes} classes; raise classes_per_client or clients, or set sharing: ceil",
        )
        least = _least(self.least, len(rows), self.clients) / data.num_classes
        counts = np.zeros((data.num_classes, self.clients), np.int64)
        for c, pool in enumerate(pools):
            takers = np.flatnonzero(quota > 0)[:sharing]
            if not takers.size:
                break
            quota[takers] -= 1
            counts[c, takers] = self._block_sizes(c, len(pool), len(takers), least, rng)
        return _deal(pools, counts)

    def _block_sizes(self, c: int, n: int, takers: int, least: float, rng: np.random.RandomState) -> np.ndarray:
        """[takers] sizes of the blocks of class c; the last one takes what is left."""
        equal = n / takers
        if self.balanced:
            sizes = np.full(takers - 1, int(equal))
        else:
            low, high = int(max(equal / 10, least)), int(equal)
            _require(
                low < high or takers == 1,
                f"pathological: the {n} rows of class {c} do not make {takers} blocks of random size from {low} up; "
                "lower least or clients, or set balanced: true",
            )
            sizes = rng.randint(low, high, takers - 1) if takers > 1 else NOTHING
        return np.append(sizes, n - sizes.sum())


@dataclass(frozen=True)
class ExtendedDirichlet(MergingScheme):
    """P6: classes_per_client random classes a client, each split by P4 among its holders (Li et al., 2023; PFLlib).

    A try draws both the classes of the clients and the split. What rounding leaves of a class goes to its last holder.
    """

    classes_per_client: int = 2
    alpha: float = 0.1
    clients: int = 20
    least: int = 10
    merge: bool = True
    test_frac: float = 0.25
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.alpha > 0 and self.classes_per_client >= 1,
            f"extended_dirichlet: alpha is {self.alpha} and classes_per_client {self.classes_per_client}; alpha must "
            "be positive, classes_per_client at least 1",
        )
        _check_merged("extended_dirichlet", self.clients, self.test_frac)

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        classes = data.num_classes
        _require(
            self.classes_per_client <= classes <= self.classes_per_client * self.clients,
            f"extended_dirichlet: {self.clients} clients of {self.classes_per_client} classes cannot hold {classes} "
            "classes; change classes_per_client or clients",
        )
        pools = _pools(data, rows)
        holders_wanted = max(self.classes_per_client * self.clients // classes // 2, 1)

        def draw() -> Draw | None:
            holders = np.zeros((classes, self.clients), bool)
            for client in range(self.clients):
                holders[rng.choice(classes, self.classes_per_client, replace=False), client] = True
            if holders.sum(1).min() < holders_wanted:
                return None
            return _capped_draw(pools, holders, self.alpha, rng)

        drawn = _redraw(
            "extended_dirichlet",
            draw,
            self.least,
            "raise classes_per_client or alpha, or lower least or clients",
            PATIENCE,
        )
        return _deal(*drawn)


def _equal_shards(scheme: str, rows: np.ndarray, clients: int, rng: np.random.RandomState) -> list[np.ndarray]:
    size = len(rows) // clients
    _require(size >= 1, f"{scheme}: {len(rows)} samples are too few for {clients} clients; lower clients")
    return list(rng.permutation(rows)[: size * clients].reshape(clients, size))


@dataclass(frozen=True)
class IIDEqual(Scheme):
    """P7: floor(n / N) random samples each (FedLAW's and FedLWS's iid flag; FedLDF: 50 × 1000)."""

    clients: int = 20
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self.clients >= 1, f"iid_equal: clients is {self.clients}; it must be at least 1")

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        return _equal_shards("iid_equal", rows, self.clients, rng)


@dataclass(frozen=True)
class ClassGroups(Scheme):
    """P8: equal clients; a third has the lower half of the classes, a third the upper, a third all (FedLWS)."""

    clients: int = 12
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.clients >= 3 and self.clients % 3 == 0, f"class_groups: clients is {self.clients}; use a multiple of 3"
        )

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        third = self.clients // 3
        is_lower = data.y[rows] < data.num_classes // 2
        lower, upper = rng.permutation(rows[is_lower]), rng.permutation(rows[~is_lower])
        # n / N each, or less where the rarer half of the classes does not give a third of the clients as much
        size = min(len(rows) // self.clients, len(lower) // third, len(upper) // third)
        _require(
            size >= 1,
            f"class_groups: {len(lower)} and {len(upper)} samples of the two halves of the classes are too few "
            f"for {self.clients} clients; lower clients",
        )
        rest = rng.permutation(np.concatenate([lower[third * size :], upper[third * size :]]))
        return [shard for pool in (lower, upper, rest) for shard in pool[: third * size].reshape(third, size)]


@dataclass(frozen=True)
class LabelSwap(Scheme):
    """P9: P7, but corrupted clients exchange two labels in all their data (FedLAW, table 8).

    The paper does not say which two: every corrupted client draws its own pair.
    """

    fraction: float  # of the clients, rounded: 0.25, 0.5 or 0.75 in the paper
    clients: int = 20
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.fraction <= 1, f"label_swap: fraction is {self.fraction}; it must lie in 0..1")
        _require(self.clients >= 1, f"label_swap: clients is {self.clients}; it must be at least 1")

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        return _equal_shards("label_swap", rows, self.clients, rng)

    def label_map(self, data: Dataset, rng: np.random.RandomState) -> np.ndarray:
        _require(data.num_classes >= 2, f"label_swap: {data.name} has one class, so there is nothing to exchange")
        seen = np.tile(np.arange(data.num_classes), (self.clients, 1))
        for client in rng.choice(self.clients, round(self.fraction * self.clients), replace=False):
            pair = rng.choice(data.num_classes, 2, replace=False)
            seen[client, pair] = pair[::-1]
        return seen


@dataclass(frozen=True)
class Natural(Scheme):
    """The clients of the data themselves: the column `client` of a Parquet folder, `client_train` of an .npz file.

    Where test rows have clients too, they are those clients' test sets.
    """

    clients: int | None = None  # fewer clients than the data has, as FEMNIST's 10 or 20 in CCN; null: all
    pick: Literal["groups", "largest"] = "groups"  # join the data's clients at random, or keep those with most samples
    seed: int | None = None

    def rows(self, data: Dataset) -> np.ndarray:
        return np.arange(len(data.y))

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        if data.client is None:
            raise DataError(
                f"natural: {data.name} names no clients; add a column `client` to its training files or choose another "
                "partition"
            )
        owner = data.client[rows]  # [rows], -1: nobody's, which only a test row may be
        nameless = (owner < 0) & (rows < data.train_rows)
        if nameless.any():
            raise DataError(f"natural: training row {rows[np.argmax(nameless)]} of {data.name} has no client; name one")
        ids, sizes = np.unique(owner[rows < data.train_rows], return_counts=True)
        clients = len(ids) if self.clients is None else self.clients
        _require(
            1 <= clients <= len(ids),
            f"natural: {data.name} has {len(ids)} clients, so clients cannot be {clients}; lower it or leave it out",
        )
        if clients == len(ids):
            groups = list(np.arange(clients)[:, None])
        elif self.pick == "groups":
            groups = np.array_split(rng.permutation(len(ids)), clients)
        else:
            groups = list(np.sort(np.argsort(-sizes, kind="stable")[:clients])[:, None])

        group_of = np.full(len(ids) + 1, -1)  # the last entry is for rows whose client has no training rows
        for client, members in enumerate(groups):
            group_of[members] = client
        position = np.searchsorted(ids, owner)
        holder = group_of[np.where(np.append(ids, -1)[position] == owner, position, len(ids))]
        order = np.argsort(holder, kind="stable")
        ends = np.searchsorted(holder[order], np.arange(clients + 1))
        return [rows[order[a:b]] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class QuantitySkew(Scheme):
    """Sizes by Dir(alpha), labels IID (Li et al., Federated Learning on Non-IID Data Silos, 2022)."""

    alpha: float = 0.5
    clients: int = 20
    min_size: int = 10
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self.alpha > 0, f"quantity_skew: alpha is {self.alpha}; it must be positive")
        _require(self.clients >= 1, f"quantity_skew: clients is {self.clients}; it must be at least 1")

    def split(self, data: Dataset, rows: np.ndarray, rng: np.random.RandomState) -> list[np.ndarray]:
        pool = rng.permutation(rows)
        drawn = _redraw(
            "quantity_skew",
            lambda: _rounded_draw([pool], rng.dirichlet(np.full(self.clients, self.alpha), 1)),
            self.min_size,
            "raise alpha, or lower min_size or clients",
        )
        return _deal(*drawn)


PARTITIONS: dict[str, type[Scheme]] = {
    "dirichlet_counts": DirichletCounts,
    "dirichlet_hybrid": DirichletHybrid,
    "dirichlet_longtail": DirichletLongtail,
    "dirichlet_capped": DirichletCapped,
    "pathological": Pathological,
    "extended_dirichlet": ExtendedDirichlet,
    "iid_equal": IIDEqual,
    "class_groups": ClassGroups,
    "label_swap": LabelSwap,
    "natural": Natural,
    "quantity_skew": QuantitySkew,
}


@dataclass(frozen=True)
class Proxy:
    """P10: the server's labelled set, class-balanced up to one sample or long-tailed, out of one split."""

    samples: int  # of all classes together
    from_: Literal["test", "train"] = "test"  # the split they are drawn from
    long_tail: float | None = None
    """Ratio of the first class's size to the last's, 10 in FedLAW's table 6. The first class has its share of `samples`, the
    others less, so that the set is smaller."""
    balanced_sampling: bool = False  # the server's batches have all classes equally often (FedLAW's table 6)
    oracle: bool = False  # tests use these samples too: what is learned on them is a bound and no method's result

    def __post_init__(self) -> None:
        _require(self.samples >= 0, f"proxy: samples is {self.samples}; it cannot be negative")
        _require(
            not self.oracle or self.from_ == "test",
            "proxy: an oracle learns on what it is tested on; its samples are from the test split",
        )
        _require(
            self.long_tail is None or self.long_tail >= 1,
            f"proxy: long_tail is {self.long_tail}; it is the ratio of the largest class to the smallest, at least 1",
        )

    def draw(self, data: Dataset, seed: int) -> np.ndarray:
        """Rows in shuffled order. Raises DataError if a class of the split has too few."""
        split = slice(data.train_rows, None) if self.from_ == "test" else slice(data.train_rows)
        rows = np.random.default_rng([seed, _PROXY]).permutation(np.arange(len(data.y))[split])
        share, extra = divmod(self.samples, data.num_classes)
        if self.long_tail is None:
            quota = share + (np.arange(data.num_classes) < extra)
        else:
            quota = _long_tail(np.full(data.num_classes, self.samples / data.num_classes), self.long_tail)
        kept = np.zeros(len(rows), bool)
        for c, asked in enumerate(quota):
            at = np.flatnonzero(data.y[rows] == c)
            if len(at) < asked:
                raise DataError(
                    f"proxy: the {self.from_} split of {data.name} has {len(at)} rows of class {data.classes[c]}, but "
                    f"{asked} are asked for; lower proxy.samples or draw from the other split"
                )
            kept[at[:asked]] = True
        return rows[kept]


def _held_out(rows: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out), each in the order of `rows`."""
    held = np.zeros(len(rows), bool)
    held[rng.choice(len(rows), count, replace=False)] = True
    return rows[~held], rows[held]


def make_partition(
    data: Dataset,
    scheme: Scheme,
    *,
    seed: int,
    client_test_frac: float = 0.0,
    client_val_frac: float = 0.0,
    proxy: Proxy | None = None,
) -> Partition:
    """Deals `data` to clients by `scheme`, after the proxy set was taken out, then holds out each client's test and
    validation rows at random.

    Of a client's m rows, ceil(client_test_frac · m) are for its test, as in FedALA's code, and of the m' others
    floor(client_val_frac · m') for validation; one training row always stays. The server tests on the test split, or,
    where that was dealt to the clients or does not exist, on the clients' test rows together (none, if nothing was held
    out). `scheme.seed`, if set, replaces `seed` for every draw. Raises DataError with what to change.
    """
    if scheme.seed is not None:
        seed = scheme.seed
    _require(0 <= seed < 2**32, f"the partition's seed is {seed}; it must lie in 0..2**32 - 1")
    for name, frac in (("client_test_frac", client_test_frac), ("client_val_frac", client_val_frac)):
        _require(0 <= frac < 1, f"{name} is {frac}; it must be at least 0 and below 1")
    if scheme.test_frac is not None:
        _require(
            client_test_frac in (0, scheme.test_frac),
            f"client_test_frac is {client_test_frac}, but the partition holds out {scheme.test_frac} by itself; change "
            "its test_frac instead",
        )
        client_test_frac = scheme.test_frac

    proxy_rows = NOTHING if proxy is None else proxy.draw(data, seed)
    rng = np.random.RandomState(seed)
    shards = scheme.split(data, np.setdiff1d(scheme.rows(data), proxy_rows), rng)
    label_map = scheme.label_map(data, rng)

    train, test, val = [], [], []
    for client, shard in enumerate(shards):
        given = NOTHING
        if scheme.test_frac is None:  # then a test row that was dealt is test data by nature
            shard, given = shard[shard < data.train_rows], shard[shard >= data.train_rows]
        count = min(math.ceil(client_test_frac * len(shard) - 1e-9), max(len(shard) - 1, 0))
        shard, held = _held_out(shard, count, np.random.default_rng([seed, _HOLD_OUT_TEST, client]))
        count = math.floor(client_val_frac * len(shard) + 1e-9)
        shard, validation = _held_out(shard, count, np.random.default_rng([seed, _HOLD_OUT_VAL, client]))
        train.append(shard)
        test.append(np.concatenate([given, held]))
        val.append(validation)

    test_split = np.arange(data.train_rows, len(data.y))
    if proxy is None or not proxy.oracle:
        test_split = np.setdiff1d(test_split, proxy_rows)
    test_split_was_dealt = np.isin(test_split, np.concatenate(shards)).any()
    clients_test = np.sort(np.concatenate(test))
    server_test = clients_test if test_split_was_dealt or not test_split.size else test_split
    return Partition(tuple(train), tuple(test), tuple(val), server_test, proxy_rows, label_map)
