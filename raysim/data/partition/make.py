"""A scheme, hold-outs and a proxy set make a partition."""

import numpy as np

from raysim.core.rng import SERVER, seeded_for, stream_seed
from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.partition.base import NOTHING, Scheme, require
from raysim.data.partition.check import check_label_map, checked_rows, shards_of
from raysim.data.partition.proxy import Proxy
from raysim.data.partition.shards import Shards
from raysim.data.partition.table import Partition
from raysim.registry import REGISTRY

# Second word of each stream's seed, after the partition's own; the proxy set's is 3.
_HOLD_OUT_TEST, _HOLD_OUT_VAL = 1, 2


def make_partition(
    data: Dataset,
    scheme: Scheme,
    *,
    seed: int,
    client_test_frac: float = 0.0,
    client_val_frac: float = 0.0,
    proxy: Proxy | None = None,
) -> Partition:
    """Partition `data` over clients by `scheme`, without the rows of the proxy set, then hold out each client's test
    and validation rows at random.

    Of a client's m rows, ceil(client_test_frac · m) are for its test, as in FedALA's code, and of the m' others
    floor(client_val_frac · m') for validation; one training row always stays. The server tests on the test split. Where
    that was partitioned too or does not exist, it tests on the clients' test rows together (none, if nothing was held
    out). `scheme.seed`, if set, replaces `seed` for every draw. Raises DataError with what to change.
    """
    if scheme.seed is not None:
        seed = scheme.seed
    require(0 <= seed < 2**32, f"the partition's seed is {seed}; it must lie in 0..2**32 - 1")
    for name, frac in (("client_test_frac", client_test_frac), ("client_val_frac", client_val_frac)):
        require(0 <= frac < 1, f"{name} is {frac}; it must be at least 0 and below 1")
    if scheme.test_frac is not None:
        require(
            client_test_frac in (0, scheme.test_frac),
            f"client_test_frac is {client_test_frac}, but the partition holds out {scheme.test_frac} by itself; change "
            "its test_frac instead",
        )
        client_test_frac = scheme.test_frac

    if scheme.needs_classes and not data.has_classes:
        raise DataError(
            f"{data.name} has no single class for every sample, and this partition needs one; choose iid_equal, "
            "quantity_skew or natural"
        )

    proxy_rows = NOTHING if proxy is None else proxy.draw(data, seed)
    shards, label_map = _split(data, scheme, proxy_rows, seed)

    train, test = shards, shards.where(np.zeros(len(shards.rows), bool))
    if scheme.test_frac is None:  # then a client's rows of the test split are its test rows
        training = shards.rows < data.train_rows
        train, test = shards.where(training), shards.where(~training)
    counts = np.minimum(np.ceil(client_test_frac * train.sizes - 1e-9).astype(int), np.maximum(train.sizes - 1, 0))
    train, held = _held_out(train, counts, [seed, _HOLD_OUT_TEST])
    if len(held.rows):
        test = Shards.of(np.concatenate(both) for both in zip(test, held, strict=True))
    counts = np.floor(client_val_frac * train.sizes + 1e-9).astype(int)
    train, val = _held_out(train, counts, [seed, _HOLD_OUT_VAL])

    test_split = np.arange(data.train_rows, len(data.y))
    if proxy is None or not proxy.oracle:
        test_split = np.setdiff1d(test_split, proxy_rows)
    test_split_partitioned = (shards.rows >= data.train_rows).any()
    clients_test = np.sort(test.rows)
    server_test = clients_test if test_split_partitioned or not test_split.size else test_split
    return Partition(train, test, val, server_test, proxy_rows, label_map)


def _split(data: Dataset, scheme: Scheme, proxy_rows: np.ndarray, seed: int) -> tuple[Shards, np.ndarray | None]:
    """The rows of each client, and the labels that they see."""
    name, allowed = REGISTRY.table("partition").name_of(type(scheme)), np.zeros(len(data.y), bool)
    rng = np.random.RandomState(seed)
    with seeded_for(scheme, stream_seed(seed, 0, SERVER, "partition")):
        rows = checked_rows(scheme.rows(data), len(data.y), name)
        rows = np.setdiff1d(rows, proxy_rows) if len(proxy_rows) else rows
        allowed[rows] = True
        shards = shards_of(
            scheme.split(data, rows, rng), allowed, name, f"some of the {len(rows)} rows that split is given"
        )
        label_map = scheme.label_map(data, rng)
    require(
        scheme.clients in (None, len(shards)),
        f"{name}: clients is {scheme.clients}, but it returned {len(shards)} arrays; return one for each client, which may be "
        "empty",
    )
    if label_map is not None:
        check_label_map(label_map, len(shards), data.num_classes, name)
    return shards, label_map


def _held_out(shards: Shards, counts: np.ndarray, seed: list[int]) -> tuple[Shards, Shards]:
    """(kept, held out): of each client so many rows, each in the order of its rows."""
    held = np.zeros(len(shards.rows), bool)
    for client in np.flatnonzero(counts).tolist():
        rng, start = np.random.default_rng([*seed, client]), shards.offsets[client]
        held[start + rng.choice(len(shards[client]), counts[client], replace=False)] = True
    return shards.where(~held), shards.where(held)
