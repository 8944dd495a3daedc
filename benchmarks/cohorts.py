"""What large cohorts and large models cost in seconds and memory, on Ray with two actors.

    python benchmarks/cohorts.py [--rounds 3] [--cases "10,000 clients" ...]

Cases: 5,000 and 10,000 clients a round of a tiny model; ResNet-18 with a hundred clients a round; an MLP of 90 million
parameters with twenty. Memory is the private and a share of the shared memory (PSS) of all processes, Ray's among them.
FedAMP's distances between a thousand clients of 60,000 parameters are timed as well. Writes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from endurance import watched

from raysim.store import tables
from raysim.store.manifest import manifest

CASES: dict[str, dict[str, Any]] = {
    "5,000 clients": {"clients": 5000, "shape": [1, 1, 2], "model": {"name": "mlp", "options": {"hidden": [4]}}},
    "10,000 clients": {"clients": 10_000, "shape": [1, 1, 2], "model": {"name": "mlp", "options": {"hidden": [4]}}},
    "ResNet-18, 100 clients": {"clients": 100, "shape": [3, 32, 32], "model": {"name": "resnet18"}},
    "90 M parameters, 20 clients": {
        "clients": 20, "shape": [3, 32, 32], "model": {"name": "mlp", "options": {"hidden": [9000, 6900]}}
    },
    "FedAMP, 1,000 clients": {
        "clients": 1000, "shape": [1, 1, 64], "client": ["fedamp"],
        "model": {"name": "mlp", "options": {"hidden": [850]}},
    },
}  # fmt: skip


def configuration(case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Every client takes part, with two samples."""
    data = {"samples": int(2.5 * case["clients"]), "shape": case["shape"], "classes": 4}
    return {
        "name": "cohorts", "model": case["model"], "client": case.get("client", []),
        "data": {"name": {"synthetic": data}, "partition": {"iid_equal": {"clients": case["clients"]}}},
        "rounds": {"total": rounds, "evaluate_every": 10_000, "checkpoint_every": 10_000},
        "local": {"batch_size": 2, "lr": 0.01},
        "engine": {"ray": {"clients_per_actor": -(-case["clients"] // 2)}},
    }  # fmt: skip


def simulate(case: dict[str, Any], rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file, run = Path(folder, "run.yaml"), Path(folder, "run")
        file.write_text(yaml.safe_dump(configuration(case, rounds)))
        rows = watched([sys.executable, "-m", "raysim", "run", str(file), "--out", str(run)])
        ran = tables.read(run, "rounds").to_pydict()
    return {
        "seconds": statistics.median(ran["seconds"]), "seconds_plan": statistics.median(ran["seconds_plan"]),
        "most_mebibytes": max(row["memory"] for row in rows),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    results = {}
    for name in args.cases:
        results[name] = simulate(CASES[name], args.rounds)
        print(name, {key: round(value, 2) for key, value in results[name].items()}, flush=True)
    path = Path(__file__).parent / "results" / f"cohorts-{time.strftime('%Y-%m-%dT%H%M')}.json"
    told = {"command": " ".join(sys.argv), "results": results, "machine": manifest("", 0, {})}
    path.write_text(json.dumps(told, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
