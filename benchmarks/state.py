"""What it costs to save the clients' states and to come back to them, beside what the disk can do.

    python benchmarks/state.py [--states 1140x580000 ...] [--repeat 3]

STATESxBYTES: so many clients with so many bytes each. In turns: the bytes alone, as one file that is written and synced;
a checkpoint of all states; a checkpoint after a hundred of them have changed; and, in a new process, resuming. Writes
seconds to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CHANGED = 100


def plain(folder: Path, total: int) -> float:
    """Seconds to write and sync so many bytes."""
    block, started = os.urandom(1 << 20), time.perf_counter()
    with open(folder / "plain", "wb", buffering=0) as file:
        for start in range(0, total, 1 << 20):
            file.write(block[: min(1 << 20, total - start)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    (folder / "plain").unlink()
    return seconds


def states(clients: range, size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Of two arrays each, made before: what is timed is saving."""
    block = np.frombuffer(os.urandom(size + 4 * len(clients)), np.uint8)
    for i, client in enumerate(clients):
        state = block[4 * i : 4 * i + size // 4 * 4].view(np.float32)
        yield client, {"state.a": state[: len(state) // 2], "state.b": state[len(state) // 2 :]}


def resume(folder: Path) -> dict[str, float]:
    """Seconds to come back to a checkpoint, and to read the states of the clients of a round."""
    from raysim.federation.checkpoint import Checkpoints

    started = time.perf_counter()
    checkpoints = Checkpoints(folder)
    latest = checkpoints.latest()
    assert latest is not None
    checkpoints.load(latest)
    resumed = time.perf_counter()
    clients = list(checkpoints.states)
    for client in clients[:: max(1, len(clients) // CHANGED)]:
        checkpoints.states[client]
    return {"resume_seconds": resumed - started, "read_100_seconds": time.perf_counter() - resumed}


def measure(clients: int, size: int) -> dict[str, float]:
    from raysim.federation.checkpoint import Checkpoints

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        row: dict[str, float] = {"plain_seconds": plain(folder, clients * size)}
        checkpoints, made = Checkpoints(folder), [*states(range(clients), size)]
        for what, t, some in (("checkpoint", 1, made), ("changed_100", 2, made[:CHANGED])):
            started = time.perf_counter()
            checkpoints.save(t, {}, {}, some)
            row[f"{what}_seconds"] = time.perf_counter() - started
        command = [sys.executable, __file__, "--resume", str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        return row | json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["1140x580000", "3479x580000", "100000x2000", "1000000x2000"]
    parser.add_argument("--states", nargs="*", default=sizes, metavar="STATESxBYTES")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--resume", type=Path, help="measure that alone, and print it as JSON")
    args = parser.parse_args()
    if args.resume:
        print(json.dumps(resume(args.resume)))
        return
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.repeat):
        for name in args.states:
            clients, size = map(int, name.split("x"))
            runs.setdefault(name, []).append(measure(clients, size))
            print(name, {key: round(value, 3) for key, value in runs[name][-1].items()}, flush=True)
    rows = []
    for name, found in runs.items():
        clients, size = map(int, name.split("x"))
        medians = {key: statistics.median(run[key] for run in found) for key in found[0]}
        over = statistics.median(run["checkpoint_seconds"] - run["plain_seconds"] for run in found)
        bandwidth = clients * size / medians["plain_seconds"] / 1e6
        rows.append({"clients": clients, "bytes": size, **medians, "over_plain_seconds": over, "disk_mb_s": bandwidth})
    from raysim.store.manifest import manifest

    out = Path(__file__).parent / "results" / f"state-{time.strftime('%Y-%m-%dT%H%M')}.json"
    result = {"command": " ".join(sys.argv), "rows": rows, "runs": runs, "machine": manifest("", 0, {})}
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(out)


if __name__ == "__main__":
    main()
