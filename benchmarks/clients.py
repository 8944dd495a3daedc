"""What a federation costs that has many clients of which few take part: a hundred a round, of a thousand to a million.

    python benchmarks/clients.py [--clients 1000 10000 100000 1000000] [--rounds 20]

Each size is run in a process of its own. Writes seconds and memory to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quiet import MOST, undisturbed

COHORT, SAMPLES = 100, 2  # clients a round, samples a client


def configuration(clients: int, rounds: int) -> dict[str, Any]:
    return {
        "name": "clients", "engine": "local",
        "data": {
            "name": {"synthetic": {"samples": int(1.25 * SAMPLES * clients), "shape": [1, 1, 2], "classes": 4}},
            "partition": {"iid_equal": {"clients": clients}},
        },
        "model": {"name": "mlp", "options": {"hidden": [4]}},
        "rounds": {
            "total": MOST * rounds, "participation": COHORT / clients, "evaluate_every": 10_000, "checkpoint_every": 10_000
        },
        "local": {"batch_size": SAMPLES, "lr": 0.1},
    }  # fmt: skip


def measure(clients: int, rounds: int) -> dict[str, float]:
    from raysim.config import from_dict
    from raysim.data.partition import make_partition
    from raysim.federation import Federation

    def megabytes() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    config = from_dict(configuration(clients, rounds))
    data = config.data.name.load(config.data.folder)
    before, started = megabytes(), time.perf_counter()
    partition = make_partition(data, config.data.partition, seed=config.seed)
    prepared, memory = time.perf_counter(), megabytes()
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(config, Path(folder), partitioned=(data, partition))
        built, seconds = time.perf_counter(), list[float]()

        def turn() -> None:
            began = time.perf_counter()
            federation.step()
            seconds.append(time.perf_counter() - began)

        turns = undisturbed(turn, rounds)
        federation.close()
    return {
        "clients": clients, "partition_seconds": prepared - started, "partition_megabytes": memory - before,
        "build_seconds": built - prepared, "round_seconds": statistics.median(seconds[t] for t in turns.kept),
        "megabytes_in_all": megabytes() - before, **turns.recorded(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--one", action="store_true", help="measure in this process, and print it as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.clients[0], args.rounds)))
        return
    rows = []
    for clients in args.clients:
        command = [sys.executable, __file__, "--one", "--clients", str(clients), "--rounds", str(args.rounds)]
        rows.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1]))
        print({key: round(value, 3) for key, value in rows[-1].items()}, flush=True)
    from raysim.store.manifest import manifest

    out = Path(__file__).parent / "results" / f"clients-{time.strftime('%Y-%m-%dT%H%M')}.json"
    result = {"command": " ".join(sys.argv), "rows": rows, "machine": manifest("", 0, {})}
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(out)


if __name__ == "__main__":
    main()
