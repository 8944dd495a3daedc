"""One order of additions, whoever adds: any packing, schedule and fan-in gives the bits of the recursive definition."""

import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import raysim.engine.sums
from raysim.core import tree
from raysim.core.layers import LayerMap
from raysim.engine.merging import schedule
from raysim.engine.shares import Pace, cut
from raysim.engine.sums import chunks, equal_columns
from raysim.host.messages import SumRequest
from raysim.models import Inputs, build

N = 5  # floats of a row


def by_definition(rows: Tensor, weights: list[float], lo: int, hi: int) -> Tensor | None:
    """Scale the leaves, split in the middle, add; a leaf of weight zero is not there."""
    if hi - lo == 1:
        return rows[lo] * weights[lo] if weights[lo] else None
    middle = (lo + hi) // 2
    left, right = by_definition(rows, weights, lo, middle), by_definition(rows, weights, middle, hi)
    return right if left is None else left if right is None else left + right


def weighted_sum(rows: Tensor, weights: list[float], node: tree.Node) -> Tensor | None:
    """What a host that holds the node's `rows` makes of them."""
    out = torch.full_like(rows[0], torch.nan)
    weighted = tree.WeightedSum([(0, len(out), np.array(weights))], node, out)
    for start, stop in weighted.blocks():
        weighted.add(rows[:, start:stop].numpy(), start, out[start:stop].numpy())
    return out if any(weights[slice(*node)]) else None


def partial(sums: list[Tensor | None]) -> tree.Partial:
    """Of pieces of `N` floats each."""
    return tree.Partial(
        torch.cat([torch.empty(0), *(s for s in sums if s is not None)]), tuple(s is not None for s in sums)
    )


def same(a: tree.Partial, b: tree.Partial) -> bool:
    return a.sent == b.sent and a.value.equal(b.value)


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[Tensor, list[list[float]], list[list[int]], list[str], int]:
    """Rows [K, N] of wild magnitudes, weights of two pieces, the positions of each host, its machine, and a fan-in."""
    K = draw(st.integers(1, 17))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(K, N, generator=generator) * 10 ** torch.randint(-3, 4, (K, 1), generator=generator)
    weight = st.one_of(st.just(0.0), st.floats(-2, 2, allow_subnormal=False))
    weights = [draw(st.lists(weight, min_size=K, max_size=K)) for _ in range(2)]
    hosts = draw(st.integers(1, min(K, 7)))
    if draw(st.booleans()):  # contiguous runs, as cohorts are dealt
        edges = sorted(draw(st.lists(st.integers(0, K), min_size=hosts - 1, max_size=hosts - 1)))
        held = [list(range(a, b)) for a, b in zip([0, *edges], [*edges, K], strict=True)]
    else:  # any, as after losses
        owner = draw(st.lists(st.integers(0, hosts - 1), min_size=K, max_size=K))
        held = [[p for p in range(K) if owner[p] == host] for host in range(hosts)]
    held = [positions for positions in held if positions]
    machines = draw(st.lists(st.sampled_from("ABC"), min_size=len(held), max_size=len(held)))
    return rows, weights, held, machines, draw(st.integers(2, 8))


@given(cohorts(), st.integers(0, 9))
def test_any_packing_gives_the_bits_of_the_definition(cohort, turn):
    rows, weights, held, machines, fan_in = cohort
    K, sizes = len(rows), [N] * len(weights)
    spare: list[torch.Tensor] = []

    def leaf(p: int) -> tree.Partial:
        while spare:  # memory that is not in use any more
            spare.pop().fill_(torch.nan)
        return partial([rows[p] * w[p] if w[p] else None for w in weights])

    partials: list[tree.Partials] = []
    for positions in held:
        sums: tree.Partials = {}
        for node in tree.cover(set(positions), K):
            sums[node] = partial([weighted_sum(rows[slice(*node)], w, node) for w in weights])
            assert same(tree.accumulate(node, leaf, sizes, spare), sums[node])  # the sum that is made while training
        partials.append(sums)
    leader = 0
    for level in schedule(range(len(held)), machines, fan_in, turn):
        for leader, *others in level:
            for other in others:
                partials[leader] |= partials[other]
                partials[other] = {}
            partials[leader] = tree.merge(partials[leader], K, sizes)
    root = tree.merge(partials[leader], K, sizes)
    assert root.keys() == {(0, K)}
    assert same(root[0, K], partial([by_definition(rows, w, 0, K) for w in weights]))


def test_order_matters_at_all():
    """The near miss: other orders of the same additions do give other bits."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 1000, generator=generator)
    defined = by_definition(rows, [1.0] * 9, 0, 9)
    assert not by_definition(rows.flip(0), [1.0] * 9, 0, 9).equal(defined)


@pytest.mark.parametrize("ops", [np, torch])
def test_blocks_and_pieces_in_one_host(ops, monkeypatch):
    """Rows longer than a block, pieces longer and shorter than it, clients that are in some; as on a GPU, too."""
    monkeypatch.setattr(tree, "BLOCK", 4)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(13, 40, generator=generator)
    edges = [0, 1, 3, 4, 14, 20, 30, 33, 40]
    weights = torch.randn(len(edges) - 1, 13, generator=generator).double()
    weights[1, 2:7] = weights[2, 2:7] = weights[4, 1:] = weights[6] = 0
    weights[3] = weights[5, ::2] = 1
    pieces = [(a, b, w.numpy()) for a, b, w in zip(edges, edges[1:], weights, strict=False)]
    for node in (0, 13), (3, 9), (12, 13):
        out = torch.full((40,), torch.nan)
        weighted = tree.WeightedSum(pieces, node, out)
        weighted.ops = ops
        view = np.asarray if ops is np else torch.as_tensor
        weighted.space, weighted._sums = view(weighted.space), view(weighted._sums)
        weighted.pieces = [(a, b, view(scale), *rest) for a, b, scale, *rest in weighted.pieces]
        for start, stop in weighted.blocks():
            weighted.add(view(rows[slice(*node), start:stop]), start, view(out[start:stop]))
        for start, stop, w in pieces:
            expected = by_definition(rows[:, start:stop], w.tolist(), *node)
            assert out[start:stop].isnan().all() if expected is None else out[start:stop].equal(expected)


def test_what_is_remembered_of_the_order_is_bounded():
    """Of a thousand clients, in any company: 32 MiB of steps."""
    steps = tree.additions(1000, tuple(range(1000)))
    assert len(steps) == 999
    size = sys.getsizeof(steps) + sum(map(sys.getsizeof, steps))
    assert size * tree.additions.cache_info().maxsize < 32 << 20


@given(st.integers(1, 40), st.data())
def test_cover(clients, data):
    """The fewest nodes of the tree that hold exactly these positions."""
    held = data.draw(st.sets(st.integers(0, clients - 1), min_size=1))
    nodes = tree.cover(held, clients)
    assert sorted(p for lo, hi in nodes for p in range(lo, hi)) == sorted(held)

    def all_nodes(node: tree.Node) -> list[tree.Node]:
        below = [n for child in tree.children(node) for n in all_nodes(child)] if node[1] - node[0] > 1 else []
        return [node, *below]

    in_tree = all_nodes((0, clients))
    assert set(nodes) <= set(in_tree)
    full = [(lo, hi) for lo, hi in in_tree if set(range(lo, hi)) <= held]
    assert not any(a != b and b[0] <= a[0] and a[1] <= b[1] for a in nodes for b in full)  # none fits a larger one


def test_contiguous_runs_travel_in_few_sums():
    for hosts in (2, 5, 10):
        runs = cut([1.0] * 1000, [1.0] * hosts)
        assert sum(len(tree.cover(set(range(*run)), 1000)) for run in runs) <= 2 * 10 * hosts
    assert len(tree.cover(set(range(500)), 1000)) == 1


@given(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=20), st.integers(2, 8), st.integers(0, 9))
def test_schedule(machines, fan_in, turn):
    """Everybody's sums reach one host, each sent once; machines are done with themselves before they meet."""
    machines = sorted(machines)  # as hosts are ordered
    levels = schedule(range(len(machines)), machines, fan_in, turn)
    waiting = set(range(len(machines)))
    crossed = False
    for level in levels:
        members = [host for group in level for host in group]
        assert len(members) == len(set(members))
        assert set(members) <= waiting
        crosses = [len({machines[host] for host in group}) > 1 for group in level]
        crossed = crossed or any(crosses)
        if crossed:
            assert all(crosses)
            assert len({machines[host] for host in waiting}) == len(waiting)
        for group in level:
            assert 2 <= len(group) <= fan_in
            waiting -= set(group[1:])
    assert len(waiting) == 1


@pytest.mark.parametrize("machines", ["AAAA", "AABB", "ABCD"])
def test_hosts_take_turns(machines):
    roots = {schedule(range(4), machines, 4, turn)[-1][0][0] for turn in range(4)}
    assert roots == {0, 1, 2, 3}


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 8))
def test_cut_has_the_cheapest_dearest_run(costs, runs):
    found = cut(costs, [1.0] * runs)
    assert [p for lo, hi in found for p in range(lo, hi)] == list(range(len(costs)))
    assert len(found) <= runs

    def dearest(edges: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in zip((0, *edges), (*edges, len(costs)), strict=True))

    every = (e for k in range(min(runs, len(costs))) for e in combinations(range(1, len(costs)), k))
    assert dearest(tuple(lo for lo, _ in found[1:])) <= min(map(dearest, every)) * (1 + 1e-6)


@pytest.mark.parametrize(("slowness", "alike"), [([1, 1, 3], False), ([1, 4], False), ([1, 1.1, 1, 0.95], True)])
def test_hosts_get_work_by_their_speed(slowness, alike):
    """After some rounds with other clients each time, and times that vary, nobody waits long for the slowest host."""
    rng, pace, late = np.random.default_rng(0), Pace(), []
    sizes = rng.integers(20, 60, 200)
    for _ in range(12):
        clients = np.sort(rng.choice(200, 60, replace=False))
        factors = [pace.factor(host) for host in range(len(slowness))]
        runs = cut(pace.costs(clients.tolist(), sizes[clients].tolist()), factors)
        host_of = {int(c): host for host, (lo, hi) in enumerate(runs) for c in clients[lo:hi]}
        took = {c: sizes[c] * slowness[host] * rng.uniform(0.95, 1.05) for c, host in host_of.items()}
        pace.learn(took, sizes[[*took]].tolist(), host_of)
        loads = np.bincount([*host_of.values()], [*took.values()])
        late.append(loads.max() * sum(1 / s for s in slowness) / sizes[clients].sum())
    assert max(late[6:]) < 1.25  # of what hosts need that all end at once
    assert ({pace.factor(host) for host in range(len(slowness))} == {1.0}) == alike


@pytest.mark.parametrize("chunk", [7, 100, 10**6])
def test_pieces_and_chunks(chunk, monkeypatch):
    """Pieces tile the value, have one weight a client, and are no longer than a message, which holds several."""
    monkeypatch.setattr(raysim.engine.sums, "CHUNK", chunk)
    layers = LayerMap.of(build("tiny_bn_cnn", Inputs((1, 8, 8), 4)))
    weights = torch.rand(3, layers.L, generator=torch.Generator().manual_seed(0))
    pieces = equal_columns(layers.expand(weights).T.numpy(), layers)
    assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])]
    assert pieces[-1][1] == layers.S
    elements = layers.per_element(layers.expand(weights))
    for start, stop, column in pieces:
        assert stop - start <= chunk
        assert np.array_equal(elements[:, start:stop], np.repeat(column[:, None], stop - start, axis=1))
    factors = list(range(len(pieces)))
    parts = chunks(SumRequest({}, pieces, factors, factors[::-1]))
    assert [piece for part in parts for piece in part.pieces] == pieces
    assert [factor for part in parts for factor in part.factors] == factors
    assert [kept for part in parts for kept in part.server_coefficients] == factors[::-1]
    assert all(chunk <= sum(part.sizes) < 2 * chunk for part in parts[:-1])
