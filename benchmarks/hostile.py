"""The suite's tests of damaged files, configurations and values, with damage that the suite has not tried.

    python benchmarks/hostile.py [--seeds 1 2 3]

Every reader of `tests/fuzz/` gets as many inputs as in the suite, anew for each seed: it must take them or refuse them with a
sentence, within bounds of time and memory. Counts go to benchmarks/results/; a reader that fails makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from raysim.store.manifest import manifest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fuzz.mutate import CASES  # noqa: E402

TESTS = ("tests/fuzz/test_data.py", "tests/fuzz/test_documents.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    inputs: dict[str, int] = {}  # by reader
    failed: list[str] = []
    for seed in args.seeds:
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            command = [sys.executable, "-m", "pytest", "-q", *TESTS, f"--junitxml={report.name}"]
            subprocess.run(command, cwd=ROOT, env=os.environ | {"RAYSIM_FUZZ_SEED": str(seed)})
            for case in ElementTree.parse(report.name).iter("testcase"):
                name = case.attrib["name"]
                inputs[name] = inputs.get(name, 0) + CASES
                if case.find("failure") is not None or case.find("error") is not None:
                    failed.append(f"{name}, seed {seed}")
    result = {
        "command": " ".join(sys.argv), "inputs": inputs, "all": sum(inputs.values()), "failed": failed,
        "machine": manifest("", 0, {}),
    }  # fmt: skip
    out = Path(__file__).parent / "results" / f"hostile-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(out)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
