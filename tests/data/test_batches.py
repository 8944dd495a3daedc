import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysim.data import batch_slices


@given(n=st.integers(0, 200), batch_size=st.integers(1, 50))
def test_slices_cover_everything_but_a_dropped_last_batch(n, batch_size):
    rows = list(range(n))
    kept = [rows[s] for s in batch_slices(n, batch_size, drop_last=False)]
    assert [row for batch in kept for row in batch] == rows
    assert all(len(batch) == batch_size for batch in kept[:-1])
    assert all(kept)

    dropped = [rows[s] for s in batch_slices(n, batch_size, drop_last=True)]
    full = [batch for batch in kept if len(batch) == batch_size]
    assert dropped == (full or kept)  # a client with less than one batch trains on what it has


def test_batch_size_must_be_positive():
    with pytest.raises(ValueError, match="batch_size is 0"):
        batch_slices(5, 0, drop_last=False)
