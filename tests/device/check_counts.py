"""What a local step, a client, a round and a test ask of a GPU. These numbers may fall; where they rise, a GPU becomes slower."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from device import emulated
from launches import batch_of_a_test, costs

emulated.install()

# Launches, uploads, downloads, syncs. An upload a pass is the order of its samples; a client's one download has its numbers.
# By method, and by how many clients train together.
COUNTS = {
    ("fedavg", 1): ([30.5, 0.25, 0, 0], [10, 0, 1, 1], [0, 1, 2, 2]),
    ("fedavg", 8): ([8.75, 0.25, 0, 0], [14.75, 0, 1, 1], [0, 1, 2, 2]),
    ("scaffold", 1): ([31.5, 0.25, 0, 0], [18, 1, 3, 3], [0, 4, 2, 2]),
    ("moon", 1): ([115.5, 0.25, 0, 0], [10, 1, 2, 2], [0, 1, 2, 2]),
    ("moon", 8): ([23.875, 0.25, 0, 0], [14.875, 1, 2, 2], [0, 1, 2, 2]),
}


@pytest.mark.parametrize(("name", "together"), COUNTS)
def test_what_a_method_asks_for(name: str, together: int) -> None:
    found = costs(name, "tiny_bn_cnn", batch_clients=together)
    for part, most in zip(("step", "client", "round"), COUNTS[name, together], strict=True):
        assert all(count <= limit for count, limit in zip(found[part], most, strict=True)), (part, found[part])


def test_a_test_waits_for_nothing_but_its_scores() -> None:
    assert batch_of_a_test("tiny_bn_cnn") == [18, 0, 0, 0]
