"""Those faults of `benchmarks/chaos.py` that strike at a certain operation: the real command line is killed and starved."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.mutate import in_memory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # where forked processes find it, too

import chaos


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with in_memory() as path:
        yield path


@pytest.fixture(autouse=True)
def no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "PATIENCE", None)
    monkeypatch.setattr(chaos, "ROUNDS", 5)


def test_a_command_may_die_before_each_of_its_files(folder):
    trial = chaos.simulate("kill_at_each_file", "stack", 1, folder)
    assert not trial.problems and not trial.said
    died = (trial.folder / "deaths").read_text().splitlines()
    print(died)
    assert {
        "os.rename .config.yaml.tmp", "os.rename .manifest.json.tmp", "os.rename .part-0-0-0.parquet.tmp",
        "open round-0.safetensors", "open round-0.states", "os.rename .round-0.json.tmp", "os.remove round-0.json",
        "os.rename .part-0-0-0-0.parquet.tmp", "os.remove part-0-0-0.parquet", "os.rename .model.safetensors.tmp",
        "os.rename .result.json.tmp",
    } <= {*died}  # fmt: skip


@pytest.mark.parametrize("fault", ["disk_full", "read_only", "few_descriptors", "clock_set_back", "client_fault"])
def test_the_end_is_undisturbed_or_explained(fault, folder):
    if chaos.FAULTS[fault].root and os.getuid():
        pytest.skip(f"{fault} needs root, to mount a small disk")
    trial = chaos.simulate(fault, "stack", 1, folder)
    print(trial.said)
    assert not trial.problems
