"""A scheme, hold-outs and a proxy set make a partition."""

import math

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.partition.base import NOTHING, Scheme, require
from raysim.data.partition.proxy import Proxy
from raysim.data.partition.table import Partition

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
    rng = np.random.RandomState(seed)
    shards = scheme.split(data, np.setdiff1d(scheme.rows(data), proxy_rows), rng)
    label_map = scheme.label_map(data, rng)

    train, test, val = [], [], []
    for client, shard in enumerate(shards):
        given = NOTHING
        if scheme.test_frac is None:  # then a client's rows of the test split are its test rows
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
    test_split_partitioned = np.isin(test_split, np.concatenate(shards)).any()
    clients_test = np.sort(np.concatenate(test))
    server_test = clients_test if test_split_partitioned or not test_split.size else test_split
    return Partition(tuple(train), tuple(test), tuple(val), server_test, proxy_rows, label_map)


def _held_out(rows: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(kept, held out), each in the order of `rows`."""
    held = np.zeros(len(rows), bool)
    held[rng.choice(len(rows), count, replace=False)] = True
    return rows[~held], rows[held]
