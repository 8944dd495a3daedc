"""The papers' partitions: the rules' own algebra, recomputed, never yesterday's output."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import partition_of

from raysim.data import PARTITIONS, DataError, Dataset, Partition, Proxy, make_partition
from raysim.data.own import scheme_of, source_of
from raysim.data.partition import (
    ClassGroups,
    DirichletCapped,
    DirichletCounts,
    DirichletHybrid,
    DirichletLongtail,
    ExtendedDirichlet,
    IIDEqual,
    LabelSwap,
    Natural,
    Pathological,
    QuantitySkew,
)
from raysim.data.partition.base import Scheme
from raysim.data.partition.shards import Shards
from raysim.errors import ConfigError


def toy(train=2000, test=500, classes=10, client=None) -> Dataset:
    """Class-balanced splits whose rows are in no order of class."""
    y = np.concatenate([np.arange(train), np.arange(test)]) % classes
    x = np.zeros((len(y), 1), np.float32)
    return Dataset("toy", x, y.astype(np.int64), train, tuple(str(c) for c in range(classes)), client)


DATA = toy(client=np.arange(2500) // 7 % 20)  # 20 natural clients, in both splits

# One setting of every scheme, and whether it gives every row that it may partition to some client.
SCHEMES = {
    "dirichlet_counts": (DirichletCounts(0.3, 20), True),
    "dirichlet_hybrid": (DirichletHybrid(), True),
    "dirichlet_longtail": (DirichletLongtail(0.3), False),
    "dirichlet_capped": (DirichletCapped(0.3, 10, least=20), True),
    "pathological": (Pathological(), True),
    "extended_dirichlet": (ExtendedDirichlet(3, 1.0, 10), True),
    "iid_equal": (IIDEqual(7), False),
    "class_groups": (ClassGroups(), False),
    "label_swap": (LabelSwap(0.5), True),
    "natural": (Natural(), True),
    "quantity_skew": (QuantitySkew(2.0), True),
}


def test_every_scheme_is_tested():
    assert SCHEMES.keys() == PARTITIONS.keys()
    assert all(type(scheme) is PARTITIONS[name] for name, (scheme, _) in SCHEMES.items())
    assert all(cls.__doc__ for cls in PARTITIONS.values())


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_have_one_use_and_seeds_reproduce(name):
    scheme, covers = SCHEMES[name]
    proxy = Proxy(50)
    part = make_partition(DATA, scheme, seed=3, client_val_frac=0.2, proxy=proxy)
    rows = np.concatenate([*part.train, *part.test, *part.val, part.proxy])
    assert len(np.unique(rows)) == len(rows)
    if covers:
        partitioned = np.union1d(scheme.rows(DATA), part.proxy)
        assert np.array_equal(np.sort(rows), partitioned)
    assert not np.isin(part.server_test, part.proxy).any()
    assert not np.isin(part.server_test, np.concatenate([*part.train, *part.val])).any()
    assert np.isin(part.server_test, np.arange(2000, 2500)).all() or scheme.test_frac is not None
    assert (part.sizes == [len(r) for r in part.train]).all()
    assert part.sizes.sum() > 0
    assert all(r.dtype == np.int64 for r in (*part.train, *part.test, *part.val, part.server_test, part.proxy))

    again = make_partition(DATA, scheme, seed=3, client_val_frac=0.2, proxy=proxy)
    other = make_partition(DATA, scheme, seed=4, client_val_frac=0.2, proxy=proxy)
    assert part.sha256() == again.sha256() != other.sha256()


def test_seed_of_the_scheme_replaces_that_of_the_run():
    pinned = [make_partition(DATA, IIDEqual(7, seed=9), seed=s, client_test_frac=0.5).sha256() for s in (1, 2, 9)]
    assert len(set(pinned)) == 1
    assert pinned[0] == make_partition(DATA, IIDEqual(7), seed=9, client_test_frac=0.5).sha256()


def test_hold_outs_leave_the_split_alone():
    """Whatever is held out, a client's rows stay the same; ceil of the test share, floor of the validation share."""
    scheme = DirichletCounts(0.3, 20)
    plain = make_partition(DATA, scheme, seed=0)
    held = make_partition(DATA, scheme, seed=0, client_test_frac=0.25, client_val_frac=0.3)
    for whole, train, test, val in zip(plain.train, held.train, held.test, held.val, strict=True):
        assert np.array_equal(np.sort(whole), np.sort(np.concatenate([train, test, val])))
        assert np.array_equal(train, whole[np.isin(whole, train)])  # the order of training rows stays, too
        if len(whole) > 1:
            assert len(test) == math.ceil(len(whole) / 4)
            assert len(val) == (len(whole) - len(test)) * 3 // 10
    assert np.array_equal(held.server_test, plain.server_test)
    assert np.array_equal(plain.server_test, np.arange(2000, 2500))


def test_a_client_keeps_one_training_row():
    part = make_partition(toy(20, 5, 5), IIDEqual(20), seed=0, client_test_frac=0.9, client_val_frac=0.9)
    assert (part.sizes == 1).all()


@settings(max_examples=30, deadline=None)
@given(
    classes=st.integers(1, 6),
    clients=st.integers(1, 9),
    alpha=st.sampled_from([0.05, 0.5, 5.0]),
    seed=st.integers(0, 99),
)
def test_p1_follows_its_matrix(classes, clients, alpha, seed):
    """Recomputes Q with the generator's public stream, then cuts by the rule in plain words."""
    data = toy(60 * classes + 1, classes, classes)
    part = make_partition(data, DirichletCounts(alpha, clients), seed=seed)

    rng = np.random.RandomState(seed)
    sizes = np.bincount(data.y[: data.train_rows], minlength=classes)
    for n in sizes:
        rng.shuffle(np.arange(n))
    q = rng.dirichlet(np.repeat(alpha, clients), classes)  # [C, N]
    counts = part.label_counts(data)
    for c, n in enumerate(sizes):
        left = n
        for k in range(clients - 1):
            expected = min(round(q[c, k] * n), left)  # Python rounds half to even, as the rule does
            assert counts[k, c] == expected
            assert abs(expected - q[c, k] * n) <= 1 or expected == left
            left -= expected
        assert counts[-1, c] == left


def test_p1_is_near_even_for_a_large_alpha_and_leaves_clients_empty_for_a_small_one():
    even = make_partition(DATA, DirichletCounts(1e8, 10), seed=0).label_counts(DATA)
    assert (np.abs(even - 20) <= 1).all()  # 200 of a class over 10 clients
    skewed = make_partition(DATA, DirichletCounts(0.01, 100), seed=0)
    assert skewed.clients == 100
    assert (skewed.sizes == 0).any()
    assert skewed.sizes.sum() == 2000


def test_p1_min_size_redraws_and_gives_up_with_a_way_out():
    small = make_partition(DATA, DirichletCounts(0.3, 20), seed=0).sizes.min()
    assert make_partition(DATA, DirichletCounts(0.3, 20, min_size=small + 5), seed=0).sizes.min() >= small + 5
    with pytest.raises(DataError, match=r"dirichlet_counts: in 100 redraws .* not 100; raise alpha, or lower min_size"):
        make_partition(DATA, DirichletCounts(0.3, 20, min_size=100), seed=0)
    with pytest.raises(DataError, match="no draw could be carried out; raise alpha"):  # gamma variates underflow to 0
        make_partition(toy(400, 10, 40), DirichletCounts(1e-4, 3), seed=0)


def test_p2_has_a_balanced_half_and_a_skewed_one():
    counts = make_partition(DATA, DirichletHybrid(1e6, 0.1, 20), seed=0).label_counts(DATA)
    assert (np.abs(counts[:10] - 10) <= 1).all()  # 200 / 20 of each class
    assert (np.abs(counts[10:].sum(0) - 100) <= 10).all()
    assert (counts[10:] == 0).mean() > 0.3

    rng = np.random.RandomState(5)  # the two matrices, from the generator's public stream
    for _ in range(10):
        rng.shuffle(np.arange(200))
    first = rng.dirichlet([10.0] * 3, 10)[:, :1]
    second = rng.dirichlet([0.1] * 2, 10)
    share = np.hstack([first, (1 - first) * second])
    counts = make_partition(DATA, DirichletHybrid(clients=3), seed=5).label_counts(DATA)
    assert (np.abs(counts.T - share * 200) <= 1.5).all()  # the last client takes what rounding left of two others

    toy_of_figure_12 = make_partition(DATA, DirichletHybrid(clients=3, equal_sizes=True), seed=5)
    assert (toy_of_figure_12.sizes == 2000 // 3).all()
    mix = counts[0] / counts[0].sum()
    assert np.abs(toy_of_figure_12.label_counts(DATA)[0] / 666 - mix).max() < 0.02


def test_p3_thins_classes_to_a_long_tail():
    total = make_partition(DATA, DirichletLongtail(1.0, rho=5), seed=0).label_counts(DATA).sum(0)
    assert total.tolist() == [math.floor(200 * 5 ** (-c / 9) + 1e-9) for c in range(10)]
    assert total[0] == 200
    assert total[9] == 40


@pytest.mark.parametrize(("alpha", "seed"), [(0.1, 8), (1.0, 9), (100.0, 10)])
def test_p3_is_the_authors_split_client_by_client(alpha, seed):
    """Their procedure in plain words: shuffle a class and cut it to its share of the tail, class after class; then one
    matrix, whose rounded counts are dealt from the front of each class; then shuffle each client's rows."""
    rng, clients = np.random.RandomState(seed), 20
    classes = [[row for row in range(DATA.train_rows) if DATA.y[row] == c] for c in range(10)]
    for c, rows in enumerate(classes):
        rng.shuffle(rows)
        del rows[int(200 * 0.2 ** (c / 9)) :]
    shares = rng.dirichlet([alpha] * clients, 10)
    expected: list[list[int]] = [[] for _ in range(clients)]
    for c, rows in enumerate(classes):
        start = 0
        for k in range(clients):
            stop = len(rows) if k == clients - 1 else start + round(shares[c, k] * len(rows))
            expected[k] += rows[start:stop]
            start = min(stop, len(rows))
    for rows in expected:
        rng.shuffle(rows)
    part = make_partition(DATA, DirichletLongtail(alpha, rho=5, clients=clients), seed=seed)
    assert [rows.tolist() for rows in part.train] == expected


MNIST_COUNTS = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)  # of the classes, train and test together
# Client sizes of the MNIST split, Dirichlet(0.1) over 20 clients, that FedALA's authors published.
FEDALA_SIZES = [2630, 499, 1630, 2541, 1917, 6189, 1256, 1269, 3600, 4006]
FEDALA_SIZES += [3116, 3772, 3613, 2134, 5730, 5448, 3628, 5653, 5266, 6103]


def test_p4_with_seed_1_is_the_published_split():
    """The procedure reads nothing but the class counts, so any data with those of MNIST gives the published sizes."""
    y = np.repeat(np.arange(10), MNIST_COUNTS)
    data = Dataset("counts", np.zeros((70_000, 1), np.uint8), y, 60_000, tuple("0123456789"))
    part = make_partition(data, DirichletCapped(seed=1), seed=77)
    assert [len(a) + len(b) for a, b in zip(part.train, part.test, strict=True)] == FEDALA_SIZES
    assert part.sizes.tolist() == [n * 3 // 4 for n in FEDALA_SIZES]
    assert np.array_equal(part.server_test, np.sort(np.concatenate(part.test)))


def test_p4_matches_the_authors_files_client_by_client():
    folder = Path(os.environ.get("RAYSIM_DATA", "")) / "mnist_dir0.1"
    if "RAYSIM_DATA" not in os.environ or not folder.is_dir():
        pytest.skip("needs mnist_dir0.1, FedALA's published MNIST split, in the folder that RAYSIM_DATA names")
    import pyarrow.parquet as parquet

    tables = [
        parquet.read_table(folder / f"{split}.parquet", columns=["label", "client"]) for split in ("train", "test")
    ]
    y, client = (np.concatenate([table[name].to_numpy() for table in tables]) for name in ("label", "client"))
    data = Dataset("mnist", np.zeros((len(y), 1), np.uint8), y, len(tables[0]), tuple("0123456789"), client)

    published = make_partition(data, Natural(), seed=0)
    ours = make_partition(data, DirichletCapped(seed=1), seed=0)
    assert np.array_equal(published.sizes, ours.sizes)
    for k in range(20):
        theirs = np.concatenate([published.train[k], published.test[k]])
        mine = np.concatenate([ours.train[k], ours.test[k]])
        assert np.array_equal(np.bincount(y[theirs], minlength=10), np.bincount(y[mine], minlength=10))


@pytest.mark.parametrize("seed", range(5))
def test_p4_fills_everybody_and_caps(seed):
    part = make_partition(DATA, DirichletCapped(0.3, 10, least=40), seed=seed)
    held = np.array([len(a) + len(b) for a, b in zip(part.train, part.test, strict=True)])
    assert held.min() >= 40
    assert held.sum() == 2500
    # Only one class, 250 rows, can lift a client beyond its 2500 / 10; nothing is added to it after that.
    assert held.max() < 250 + 250
    part = make_partition(DATA, DirichletCapped(0.3, 10, least=40, merge=False), seed=seed)
    assert max(rows.max() for rows in (*part.train, *part.test)) < 2000
    assert np.array_equal(part.server_test, np.arange(2000, 2500))


def test_p4_least_of_the_library_and_a_clear_end():
    assert make_partition(DATA, DirichletCapped(0.3, 50, least=None), seed=0).sizes.min() >= 25 * 3 // 4  # 2500 / 2·50
    with pytest.raises(DataError, match=r"dirichlet_capped: in 2000 redraws .* not 250; raise alpha, or lower least"):
        make_partition(DATA, DirichletCapped(0.3, 10, least=250), seed=0)


def test_p5_deals_classes_in_client_order():
    part = make_partition(DATA, Pathological(), seed=1)
    counts = part.label_counts(DATA) + [np.bincount(DATA.y[rows], minlength=10) for rows in part.test]
    for client in range(20):  # 20 · 2 / 10 = 4 clients a class: clients 0..3 share classes 0 and 1, and so on
        assert np.flatnonzero(counts[client]).tolist() == [client // 4 * 2, client // 4 * 2 + 1]
    for c in range(10):
        first = counts[c // 2 * 4 : c // 2 * 4 + 3, c]  # all but the last of the four draw their size
        assert ((first >= 250 // 40) & (first < 250 / 4)).all()  # 6 = max(250 / (10 · 4), 40 / 10)
        assert counts[:, c].sum() == 250
    shards = [np.sort(np.concatenate([a, b])) for a, b in zip(part.train, part.test, strict=True)]
    ones = np.concatenate([rows[DATA.y[rows] == 0] for rows in shards[:4]])
    assert np.array_equal(ones, np.flatnonzero(DATA.y == 0))  # disjoint blocks, in the order of data and clients


def test_p5_switches_change_the_split():
    balanced = make_partition(DATA, Pathological(balanced=True, merge=False), seed=1)
    assert np.array_equal(balanced.sizes, [75] * 20)  # 2 classes · 200 / 4 clients, three quarters of them
    data = toy(400, 100, 4)
    holders = {
        sharing: (make_partition(data, Pathological(2, 5, sharing=sharing), seed=1).label_counts(data) > 0)
        .sum(0)
        .tolist()
        for sharing in ("ceil", "floor")
    }
    # 5 · 2 / 4 = 2.5 clients a class. ceil: 0, 1, 2 take classes 0 and 1, 3 and 4 are left. floor: 4 gets nothing.
    assert holders == {"ceil": [3, 3, 2, 2], "floor": [2, 2, 2, 2]}
    with pytest.raises(DataError, match="lower least or clients, or set balanced"):
        make_partition(data, Pathological(4, 100), seed=1)
    with pytest.raises(DataError, match="leave no whole client for each of 4 classes"):
        make_partition(data, Pathological(1, 3, sharing="floor"), seed=1)


def test_p6_keeps_to_the_classes_of_a_client():
    part = make_partition(DATA, ExtendedDirichlet(2, 1.0, 20, least=10), seed=0)
    counts = part.label_counts(DATA) + [np.bincount(DATA.y[rows], minlength=10) for rows in part.test]
    assert ((counts > 0).sum(1) <= 2).all()
    assert (counts > 0).any(0).all()
    assert counts.sum(1).min() >= 10
    with pytest.raises(DataError, match="4 clients of 2 classes cannot hold 10 classes"):
        make_partition(DATA, ExtendedDirichlet(2, 1.0, 4), seed=0)


def test_p7_p8_have_equal_sizes():
    assert make_partition(DATA, IIDEqual(7), seed=0).sizes.tolist() == [2000 // 7] * 7
    part = make_partition(DATA, ClassGroups(), seed=0)
    assert part.sizes.tolist() == [2000 // 12] * 12
    counts = part.label_counts(DATA)
    assert (counts[:4, :5] > 0).all()
    assert (counts[:4, 5:] == 0).all()
    assert (counts[4:8, 5:] > 0).all()
    assert (counts[4:8, :5] == 0).all()
    assert (counts[8:] > 0).all()


def test_clients_share_the_classes_that_are_named_for_them():
    part = make_partition(DATA, ClassGroups(3, groups=((0, 1, 2), (1, 2), (2, 8))), seed=0)
    counts = part.label_counts(DATA)[:, [0, 1, 2, 8]]  # of 200 samples each
    assert counts.tolist() == [[200, 100, 66, 0], [0, 100, 66, 0], [0, 0, 66, 200]]
    assert part.sizes.tolist() == counts.sum(1).tolist()
    assert len(np.unique(np.concatenate(part.train))) == part.sizes.sum()


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_p9_corrupted_clients_exchange_two_labels(fraction):
    part = make_partition(DATA, LabelSwap(fraction), seed=0)
    changed = part.label_map != np.arange(10)
    assert sorted(changed.sum(1)) == [0] * round(20 * (1 - fraction)) + [2] * round(20 * fraction)
    assert all(np.array_equal(row[row], np.arange(10)) for row in part.label_map)  # twice exchanged is unchanged
    clean = make_partition(DATA, IIDEqual(20), seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(part.train, clean.train, strict=True))  # as iid_equal
    seen, true = part.label_counts(DATA), clean.label_counts(DATA)
    assert all(np.array_equal(s[m], t) for s, m, t in zip(seen, part.label_map, true, strict=True))


@pytest.mark.parametrize(
    ("scheme", "setting", "rows"),
    [
        (DirichletCounts(0.3, 20, min_size=101), "min_size", 2000),
        (DirichletCapped(0.3, 10, least=251), "least", 2500),
        (DirichletCapped(0.3, 10, least=201, merge=False), "least", 2000),
        (ExtendedDirichlet(clients=251), "least", 2500),
        (QuantitySkew(clients=201), "min_size", 2000),
    ],
)
def test_what_the_samples_cannot_fill_is_refused_before_a_draw(scheme, setting, rows):
    """No draw gives N clients `least` samples each where N · least is more than there are."""
    least, rng = getattr(scheme, setting), np.random.RandomState(0)
    needed = (
        f"{scheme.clients} clients of at least {least} samples need {scheme.clients * least}, but there are {rows};"
    )
    with pytest.raises(DataError, match=f": {needed} lower {setting} or clients"):
        scheme.split(DATA, scheme.rows(DATA), rng)
    assert rng.random_sample() == np.random.RandomState(0).random_sample()


def test_natural_split_of_both_splits():
    part = make_partition(DATA, Natural(), seed=0)
    for client in range(20):
        assert np.array_equal(part.train[client], np.flatnonzero((DATA.client == client) & (np.arange(2500) < 2000)))
        assert np.array_equal(part.test[client], np.flatnonzero((DATA.client == client) & (np.arange(2500) >= 2000)))
    assert np.array_equal(part.server_test, np.arange(2000, 2500))

    sizes = np.bincount(DATA.client[:2000])
    largest = make_partition(DATA, Natural(3, pick="largest"), seed=0)
    assert sorted(largest.sizes) == sorted(sizes)[-3:]
    assert np.array_equal(largest.server_test, np.sort(np.concatenate(largest.test)))
    groups = make_partition(DATA, Natural(6), seed=0)
    assert groups.sizes.sum() == 2000
    assert groups.clients == 6
    owners = [set(DATA.client[np.concatenate([a, b])]) for a, b in zip(groups.train, groups.test, strict=True)]
    assert sum(map(len, owners)) == 20 == len(set.union(*owners))  # whole natural clients only


def test_natural_clients_keep_their_numbers_whatever_the_proxy_set_takes():
    client, proxy = np.append(np.repeat([3, 5, 8, 9], [30, 21, 5, 4]), np.full(40, 2)), Proxy(50, from_="train")
    client[proxy.draw(toy(60, 40), 0)[0]] = 2  # the only training row of the first client, who has all of the test
    data = toy(60, 40, client=client)
    part = make_partition(data, Natural(), seed=0, proxy=proxy)
    assert part.clients == 5
    for i, name in enumerate([2, 3, 5, 8, 9]):
        assert np.array_equal(part.train[i], np.setdiff1d(np.flatnonzero(client[:60] == name), part.proxy))
    assert part.sizes[0] == 0
    assert np.array_equal(part.test[0], np.arange(60, 100))
    largest = make_partition(data, Natural(2, pick="largest"), seed=0, proxy=proxy)  # of what is left
    assert [rows.tolist() for rows in largest.train] == [rows.tolist() for rows in part.train if len(rows)]
    assert make_partition(data, Natural(5), seed=0, proxy=proxy).sha256() == part.sha256()


def test_natural_split_without_clients_in_the_test_split():
    client = np.concatenate([np.arange(2000) % 4 * 5, np.full(500, -1)])  # ids 0, 5, 10, 15
    part = make_partition(toy(client=client), Natural(), seed=0, client_test_frac=0.25)
    assert part.sizes.tolist() == [375] * 4
    assert [len(rows) for rows in part.test] == [125] * 4
    assert np.array_equal(part.server_test, np.arange(2000, 2500))
    client[2000:] = 7  # a writer who has no training rows is no client
    assert np.array_equal(make_partition(toy(client=client), Natural(), seed=0).server_test, np.arange(2000, 2500))
    client[12] = -1
    with pytest.raises(DataError, match="training row 12 of toy has no client"):
        make_partition(toy(client=client), Natural(), seed=0)
    with pytest.raises(DataError, match="natural: toy names no clients; add a column `client`"):
        make_partition(toy(), Natural(), seed=0)
    with pytest.raises(DataError, match="has 20 clients, so clients cannot be 21"):
        make_partition(DATA, Natural(21), seed=0)


def test_quantity_skew_varies_sizes_only():
    data = toy(20_000, 10, 2)
    part = make_partition(data, QuantitySkew(0.5, 10, min_size=100), seed=0)
    assert part.sizes.min() >= 100
    assert part.sizes.max() > 3 * part.sizes.min()
    share = part.label_counts(data)[:, 0] / part.sizes
    assert (np.abs(share - 0.5) < 4 * 0.5 / np.sqrt(part.sizes)).all()  # four standard deviations of a fair coin


@given(samples=st.integers(0, 300), seed=st.integers(0, 50), split=st.sampled_from(["test", "train"]))
@settings(max_examples=25, deadline=None)
def test_p10_is_balanced_up_to_one(samples, seed, split):
    part = make_partition(DATA, IIDEqual(10), seed=seed, proxy=Proxy(samples, split))
    counts = np.bincount(DATA.y[part.proxy], minlength=10)
    assert counts.sum() == samples
    assert counts.max() - counts.min() <= 1
    assert ((part.proxy >= 2000) == (split == "test")).all()
    assert len(part.server_test) == 500 - samples * (split == "test")


def test_p10_long_tail_and_shortage():
    part = make_partition(DATA, IIDEqual(10), seed=0, proxy=Proxy(200, long_tail=10))
    expected = [math.floor(20 * 0.1 ** (c / 9) + 1e-9) for c in range(10)]
    assert np.bincount(DATA.y[part.proxy]).tolist() == expected
    assert expected[0] == 20
    assert expected[9] == 2
    with pytest.raises(DataError, match="the test split of toy has 50 rows of class 0, but 51 are needed; lower"):
        make_partition(DATA, IIDEqual(10), seed=0, proxy=Proxy(501))


def test_server_tests_on_clients_rows_where_there_is_no_test_split():
    part = make_partition(toy(400, 0), IIDEqual(4), seed=0, client_test_frac=0.25)
    assert np.array_equal(part.server_test, np.sort(np.concatenate(part.test)))
    assert len(part.server_test) == 100


@pytest.mark.parametrize("scheme", [LabelSwap(0.5), DirichletCounts(0.01, 100), DirichletCapped(0.3, 10)])
def test_saved_partition_comes_back_to_the_bit(scheme, tmp_path):
    import pyarrow.parquet as parquet

    part = make_partition(DATA, scheme, seed=0, client_val_frac=0.3, proxy=Proxy(30))
    parquet.write_table(part.to_table(), tmp_path / "partition.parquet")
    assert partition_of(parquet.read_table(tmp_path / "partition.parquet")).sha256() == part.sha256()


def test_hash_sees_order_owner_use_and_labels():
    a, b, none = np.array([1, 2, 3]), np.array([4]), np.empty(0, np.int64)
    parts = [
        Partition((a, b), (none, none), (none, none), none, none),
        Partition((a[::-1], b), (none, none), (none, none), none, none),
        Partition((b, a), (none, none), (none, none), none, none),
        Partition((a, none), (none, b), (none, none), none, none),
        Partition((a, b), (none, none), (none, none), none, none, np.array([[0, 1], [1, 0]])),
    ]
    assert len({part.sha256() for part in parts}) == len(parts)


@pytest.mark.parametrize(
    ("scheme", "fields", "sentence"),
    [
        ("dirichlet_counts", {"alpha": 0.0}, r"dirichlet_counts\.alpha: must be a number > 0, but is 0"),
        ("dirichlet_hybrid", {"clients": 1}, r"dirichlet_hybrid\.clients: must be a whole number >= 2"),
        ("dirichlet_longtail", {"alpha": 1.0, "rho": 0.5}, r"dirichlet_longtail\.rho: must be a number >= 1"),
        ("dirichlet_capped", {"test_frac": 0.0}, r"dirichlet_capped\.test_frac: must be a number > 0 and < 1"),
        ("label_swap", {"fraction": 1.5}, r"label_swap\.fraction: must be a number >= 0 and <= 1"),
    ],
)
def test_bounds_are_those_of_the_fields(scheme, fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        tiny(data={"partition": {scheme: fields}})


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: ClassGroups(10), "clients is 10; use a multiple of 3"),
        (lambda: ClassGroups(groups=((0,), (1,))), "clients is 12, but groups names 2"),
        (
            lambda: make_partition(DATA, ClassGroups(1, groups=((0, 10),)), seed=0),
            r"the classes \[10\]; toy has 0 to 9",
        ),
        (lambda: Proxy(10, long_tail=0.1), "long_tail is 0.1"),
        (
            lambda: make_partition(toy(10, 5), IIDEqual(20), seed=0),
            "10 samples are too few for 20 clients; lower clients",
        ),
        (lambda: make_partition(DATA, IIDEqual(2), seed=0, client_test_frac=1.0), "client_test_frac is 1.0"),
        (lambda: make_partition(DATA, IIDEqual(2), seed=-1), "seed is -1"),
        (lambda: make_partition(DATA, DirichletCapped(), seed=0, client_test_frac=0.5), "change its test_frac instead"),
    ],
)
def test_wrong_settings_say_what_to_change(wrong, sentence):
    with pytest.raises(DataError, match=sentence):
        wrong()


def test_shards_are_the_parts_that_they_were_made_of():
    parts = [np.array([4, 1]), np.array([], np.int64), np.array([7])]
    shards = Shards.of(parts)
    assert [part.tolist() for part in shards] == [part.tolist() for part in parts]
    assert shards.sizes.tolist() == [2, 0, 1]
    assert shards.owners.tolist() == [0, 0, 2]
    assert shards[-1].tolist() == [7]
    assert [part.tolist() for part in shards.where(np.array([False, True, True]))] == [[1], [], [7]]
    assert np.shares_memory(shards[0], shards.rows)
    with pytest.raises(IndexError):
        shards[3]


# Partitions of a user's: what each of them returns for 2000 training rows, and what the refusal says.
RETURNED = [
    (lambda: [[0, 1], [1, 2]], "1 is given to client 0 and client 1; give each to one client"),
    (lambda: [[], [5, 5]], "5 is given to client 1 and client 1"),
    (lambda: [[0], [2000]], "client 1 gets 2000; give it"),
    (lambda: [[-1]], "client 0 gets -1; give it"),
    (lambda: [np.array([0.5, 1.9])], r"client 0 gets an array \[2\] of float64; give it an array \[m\] of"),
    (lambda: [np.ones(2000, bool)], r"client 0 gets an array \[2000\] of bool; .* as np.flatnonzero makes them"),
    (lambda: [[[0], [1]]], r"client 0 gets an array \[2, 1\] of int64"),
    (lambda: [[[0], [1, 2]]], "client 0 gets what is no array"),
    (lambda: np.arange(3), r"client 0 gets an array \[\] of int64"),
    (lambda: None, "it returned None; return a list with an array of"),
    (lambda: {0: [1], 1: [2]}, "it returned a dict"),
]


def own(made) -> type[Scheme]:
    @dataclass(frozen=True)
    class Own(Scheme):
        def split(self, data, rows, rng):
            return made()

    return Own


@pytest.mark.parametrize(("made", "sentence"), RETURNED)
@pytest.mark.parametrize("of", [own, lambda made: scheme_of(lambda labels, rng: made())], ids=["class", "function"])
def test_an_own_partition_gives_disjoint_rows_of_those_that_it_has(of, made, sentence):
    with pytest.raises(DataError, match=sentence):
        make_partition(DATA, of(made)(), seed=0)


@pytest.mark.parametrize("of", [own, lambda made: scheme_of(lambda labels, rng: made())], ids=["class", "function"])
def test_an_own_partition_may_return_any_list_of_positions(of):
    for made in ([[3, 1], [], [7]], ([], np.array([3], np.uint8), (1,)), np.array([[3, 1], [7, 2]])):
        part = make_partition(DATA, of(lambda made=made: iter(made))(), seed=0)  # of a generator too
        assert [rows.tolist() for rows in part.train] == [list(rows) for rows in made]
        assert all(rows.dtype == np.int64 for rows in part.train)


def test_positions_of_an_own_partition_are_in_the_labels_without_the_proxy():
    def ends(labels, rng):
        return [[0], [len(labels) - 1]]

    proxy = Proxy(50, from_="train")
    part = make_partition(DATA, scheme_of(ends)(), seed=0, proxy=proxy)
    left = np.setdiff1d(np.arange(2000), part.proxy)
    assert [rows.tolist() for rows in part.train] == [[left[0]], [left[-1]]]
    with pytest.raises(DataError, match=f"client 0 gets {part.proxy[0]}; give it some of the 1950 rows"):
        make_partition(DATA, own(lambda: [part.proxy[:1]])(), seed=0, proxy=proxy)


def test_an_own_partition_has_as_many_clients_as_it_says():
    def halves(labels, rng, clients: int = 4):
        return np.array_split(np.arange(len(labels)), 2)

    assert make_partition(DATA, scheme_of(halves)(2), seed=0).clients == 2
    with pytest.raises(DataError, match="halves: clients is 4, but it returned 2 arrays; return one for each client"):
        make_partition(DATA, scheme_of(halves)(), seed=0)


@pytest.mark.parametrize(
    ("method", "made", "sentence"),
    [
        ("rows", lambda *_: np.array([0.0]), "rows must return"),
        ("rows", lambda *_: np.array([2500]), r"rows in 0\.\.2499"),
        (
            "label_map",
            lambda *_: np.zeros((2, 3), int),
            r"label_map must return an array \[1, 10\] of classes in 0\.\.9",
        ),
        ("label_map", lambda *_: np.full((1, 10), -1), "label_map must return"),
    ],
)
def test_what_else_an_own_partition_returns(method, made, sentence):
    with pytest.raises(DataError, match=f"other: .*{sentence}"):
        make_partition(DATA, type("Other", (own(lambda: [[0]]),), {method: made})(), seed=0)


@pytest.mark.parametrize(
    ("of", "parameters", "sentence"),
    [
        (scheme_of, "labels, rng, rows: int = 2", "its parameter rows has the name of a method of Scheme; rename it"),
        (scheme_of, "labels, rng, label_map: int = 2", "its parameter label_map has the name of a method of Scheme"),
        (source_of, "files: int = 2", "its parameter files has the name of a method of Source"),
        (scheme_of, "labels", "give it the parameters labels and rng"),
    ],
)
def test_parameters_that_a_function_cannot_have(of, parameters, sentence):
    scope: dict = {}
    exec(f"def mine({parameters}): ...", scope)
    with pytest.raises(DataError, match=f"mine: {sentence}"):
        of(scope["mine"])
