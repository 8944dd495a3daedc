"""Sparse matrices over clients are the dense ones."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.core.pairs import Pairs, sparse

N = 5


def dense(pairs: Pairs) -> torch.Tensor:
    made = torch.zeros(N, N, dtype=torch.float64)
    for client in range(N):
        others, values = pairs.row(client)
        made[client, others] = values
    return made


cohorts = st.lists(st.tuples(st.sets(st.integers(0, N - 1), min_size=1), st.integers(0, 9)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(cohorts)
def test_rows_add_up_as_in_a_matrix(cohorts):
    pairs, matrix = Pairs.none(N), torch.zeros(N, N, dtype=torch.float64)
    for clients, seed in cohorts:
        rows = sorted(clients)
        stream = torch.Generator().manual_seed(seed)
        more = torch.randn(len(rows), N, generator=stream).double() * (torch.rand(len(rows), N, generator=stream) < 0.4)
        pairs, matrix = pairs.plus(rows, sparse(more)), matrix.index_add(0, torch.tensor(rows), more)
        pairs = Pairs.of(N, pairs.memory)
    assert torch.equal(dense(pairs), matrix)
    half = Pairs.none(N).plus([0, 1], sparse(matrix[:2]))
    assert torch.equal(dense(pairs.without(half))[2:], matrix[2:])
    assert not dense(pairs.without(half))[:2].any()
