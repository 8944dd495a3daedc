"""A draw belongs to (seed, round, client, purpose) and to nothing else."""

import itertools
import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from raysim.core.rng import SERVER, draw, generator, stream_seed
from raysim.federation import sample


def test_streams_differ_in_every_coordinate():
    names = ("batches", "ala", "model", "")
    keys = list(itertools.product((0, 1, 11), (0, 1, 11), (SERVER, 0, 1, 11), names))
    assert len({stream_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= stream_seed(*key) < 2**63 for key in keys)
    draws = {tuple(torch.randint(2**31, (2,), generator=generator(*key)).tolist()) for key in keys}
    assert len(draws) == len(keys)


def test_a_stream_starts_anew_and_leaves_torchs_alone():
    before = torch.get_rng_state()
    a, b = (torch.rand(5, generator=generator(3, 1, 2, "batches")) for _ in range(2))
    assert a.equal(b)
    assert torch.get_rng_state().equal(before)


def test_streams_are_the_same_in_every_process():
    """No hash() of text, which Python salts for each process."""
    code = "from raysim.core.rng import stream_seed; print(stream_seed(3, 1, 2, 'batches'))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert int(printed) == stream_seed(3, 1, 2, "batches")


def test_cohorts():
    """Sorted, without repetition, from (seed, round) alone; over many rounds every client is drawn equally often."""
    counts = torch.zeros(20)
    for t in range(2000):
        drawn = sample(5, t, clients=20, cohort=6)
        assert list(drawn) == sorted(set(drawn))
        assert len(drawn) == 6
        counts[list(drawn)] += 1
    assert sample(5, 7, 20, 6) == sample(5, 7, 20, 6) != sample(6, 7, 20, 6) != sample(5, 8, 20, 6)
    # 600 expected, standard deviation 20: five of them
    assert ((counts - 600).abs() < 100).all()
    assert sample(5, 0, 20, 20) == tuple(range(20))


@given(n=st.integers(1, 100_000), share=st.floats(0, 0.2), seed=st.integers(0, 2**63 - 1))
def test_few_of_many_are_the_first_of_torchs_permutation(n, share, seed):
    k = int(share * n)
    whole = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert draw(n, k, seed) == whole[:k].tolist()
