"""Which host trains whom, and who tries again: without an engine."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from raysim.engine.base import ATTEMPTS
from raysim.engine.dispatcher import WorkQueue, one_by_one
from raysim.engine.shares import assign


def slowest(shares: Sequence[Sequence[int]], costs: Sequence[float], factors: Sequence[float]) -> float:
    """Time of the host that takes longest; client c is the c-th cost."""
    return max(factor * sum(costs[c] for c in share) for share, factor in zip(shares, factors, strict=False))


def best(costs: Sequence[float], factors: Sequence[float]) -> float:
    """The least time of all ways to cut."""
    n, hosts = len(costs), len(factors)
    cuts = itertools.combinations_with_replacement(range(n + 1), hosts - 1)
    return min(slowest([range(a, b) for a, b in itertools.pairwise((0, *cut, n))], costs, factors) for cut in cuts)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_faster(seed: int) -> None:
    draw = np.random.default_rng(seed)
    costs, factors = draw.integers(1, 20, 9).tolist(), draw.choice([1.0, 1.0, 2.0, 4.0], 3).tolist()
    shares = assign(one_by_one(range(9)), costs, factors)
    assert [*itertools.chain(*shares)] == [*range(9)]
    assert len(shares) <= 3
    if len({*factors}) == 1:
        assert slowest(shares, costs, factors) == pytest.approx(best(costs, factors))


def test_groups_stay_whole() -> None:
    assert assign([(2, 3), (5, 7), (11, 13)], [2.0] * 3, [1.0, 1.0]) == [(2, 3, 5, 7), (11, 13)]
    assert assign([(2, 11), (3, 7), (5,)], [2, 2, 4], [1.0, 1.0]) == [(2, 11, 3, 7), (5,)]
    assert assign(one_by_one((2, 3, 5)), [1.0] * 3, [1.0] * 4) == [(2,), (3,), (5,)]
    assert assign([], [], [1.0]) == []
    assert assign(one_by_one((0, 1, 2)), [1.0] * 3, [1.0, 2.0]) == [(0, 1), (2,)]  # 2 and 2 seconds


def pairs(clients: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [*dict.fromkeys((c // 2 * 2, c // 2 * 2 + 1) for c in clients)]


def test_waves() -> None:
    queue = WorkQueue(pairs)
    queue.add(0, [(0, 1), (2, 3)])
    queue.add(1, [(4, 5)])
    assert queue.wave("ab") == [(0, (0, 1)), (1, (4, 5))]
    assert queue
    assert queue.wave("ab") == [(0, (2, 3))]
    assert not queue
    assert queue.wave("ab") == []
    queue.add(0, [(0, 1)])
    queue.add(1, [(2, 3)])
    assert [queue.wave("aa") for _ in range(3)] == [[(1, (2, 3))], [(0, (0, 1))], []]  # two hosts in one process


def test_a_unit_under_which_processes_die() -> None:
    queue = WorkQueue(pairs)
    queue.add(3, [(6, 7)])
    assert queue.lost(3, (0, 1, 2, 3))
    assert queue.wave("abcd") == [(3, (0, 1, 2, 3))]  # before what waits there
    assert queue.lost(3, (0, 1, 2, 3))
    assert [queue.wave("abcd") for _ in range(3)] == [[(3, (0, 1))], [(3, (2, 3))], [(3, (6, 7))]]
    assert ATTEMPTS == 3
    assert not queue.lost(3, (2, 3))
    assert not queue


def test_clients_that_fail_try_on_the_next_host_with_their_group() -> None:
    queue = WorkQueue(pairs)
    for _ in range(ATTEMPTS - 1):
        assert queue.failed((3,), 1, 2) == [(2, 3)]
        assert queue.wave("ab") == [(0, (2, 3))]
    assert queue.failed((3,), 1, 2) == []
    assert queue.failed((), 0, 2) == []
    assert not queue
