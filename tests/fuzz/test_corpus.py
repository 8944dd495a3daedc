"""What a coverage-guided fuzzer has found on its way (`benchmarks/fuzzing.py`) is taken in, or refused in a sentence."""

from pathlib import Path

import pytest
from fuzz.targets import TARGETS, taken_or_refused

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_of_the_fuzzer(target: str, tmp_path: Path) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        taken_or_refused(target, path.read_bytes(), tmp_path)
