"""A seeded selection of `benchmarks/chaos.py`: the real command line is killed, starved and disturbed."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # where forked processes find it, too

import chaos

TRIALS = [
    *(("kill_at_file", case) for case in chaos.CASES),
    ("kill_command", "scaffold"),
    ("disk_full", "ditto"),
    ("read_only", "fedavg"),
    ("few_descriptors", "fedala"),
    ("clock_set_back", "fedlws"),
    ("client_fault", "fedavg"),
    ("storm", "scaffold"),
    ("memory_runs_out", "fedala"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize(("fault", "case"), TRIALS)
def test_the_end_is_undisturbed_or_explained(fault, case, folder):
    if chaos.FAULTS[fault].root and os.getuid():
        pytest.skip(f"{fault} needs root, to mount a small disk or to be somebody else")
    assert not chaos.play(fault, case, 1, folder).problems
