"""A coverage-guided fuzzer on raysim's readers of files that somebody else may have written.

    pip install -e ".[fuzz]"
    python benchmarks/fuzzing.py yaml --seconds 600

The targets are those of tests/fuzz/targets.py. What makes a reader raise anything but its own errors ends the run, and lies
beside it as `crash-*`. Of the inputs that reach new code the smallest, at most `--keep`, are added to tests/fuzz/corpus/TARGET;
the suite replays them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
CORPUS = TESTS / "fuzz/corpus"


def fuzz(target: str, arguments: list[str]) -> None:
    """In a process of its own: libFuzzer ends it."""
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    import atheris

    with atheris.instrument_imports(include=["yaml", "pickle", "raysim"]):
        from fuzz.targets import taken_or_refused
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    atheris.Setup(["fuzz", *arguments], lambda data: taken_or_refused(target, data, folder))
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--keep", type=int, default=20)
    parser.add_argument("--libfuzzer", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # the process of its own
    args = parser.parse_args()
    if args.libfuzzer:
        fuzz(args.target, args.libfuzzer)
        return
    kept = CORPUS / args.target
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as found:
        again = [sys.executable, __file__, args.target, "--libfuzzer"]
        limits = [f"-max_total_time={args.seconds}", "-timeout=20", "-rss_limit_mb=4096"]
        subprocess.run([*again, found, str(kept), *limits], check=True)
        smallest = sorted(Path(found).iterdir(), key=lambda path: path.stat().st_size)[: args.keep]
        for path in smallest:
            shutil.copy(path, kept)
    print(f"{len(smallest)} inputs more are kept in {kept}")


if __name__ == "__main__":
    main()
