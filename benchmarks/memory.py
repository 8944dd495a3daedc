"""What holds a run's memory: each of its processes, Ray's own among them, by libraries, object store and the rest.

    python benchmarks/memory.py [--workloads W1 W2 W3] [--rounds 6]

Memory is proportional (PSS): a page that n processes share counts an n-th in each of them. It is taken after so many rounds.
Writes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml
from rounds import WORKLOADS, configuration, descendants

from raysim.config import to_dict
from raysim.store.manifest import manifest

KINDS = {  # part of a command line -> what the table calls the process
    "raysim run": "command line",
    "ray::Driver": "driver",
    "gcs_server": "Ray's control store",
    "raylet/raylet": "raylet",
    "Agent": "Ray's agents",
    "forked.py serve": "server of forks",
    "ray::": "actors",  # named after what they do
}


def kind(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return next((kind for part, kind in KINDS.items() if part in command), "others")


def held(pid: int) -> Counter[str]:
    """MiB by what holds them."""
    found: Counter[str] = Counter()
    holder = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *others = line.split()
        if not first.endswith(":"):  # a mapping: addresses, rights, offset, device, inode, path
            path = others[4] if len(others) > 4 else ""
            holder = (
                "object store" if "/dev/shm" in path or "plasma" in path else "libraries" if path[:1] == "/" else "data"
            )
        elif first == "Pss:":
            found[holder] += int(others[0]) / 1024
    return found


def measure(workload: str, rounds: int) -> dict[str, dict[str, float]]:
    """MiB by process and holder."""
    with tempfile.TemporaryDirectory() as folder:
        config = to_dict(configuration(WORKLOADS[workload], "ray"))
        config["rounds"]["total"] = 100 * rounds
        file = Path(folder, "run.yaml")
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "raysim", "run", str(file), "--out", str(Path(folder, "run"))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        for line in process.stdout:
            if line.startswith("round") and int(line.split()[1].partition("/")[0]) >= rounds:
                break
        else:
            raise SystemExit(process.wait())
        table: dict[str, Counter[str]] = {}
        for pid in [process.pid, *descendants(process.pid)]:
            one = kind(pid)
            table[one] = table.get(one, Counter()) + held(pid) + Counter(processes=1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        process.wait()
    return {one: dict(holders) for one, holders in table.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    results = {}
    for workload in args.workloads:
        table = results[workload] = measure(workload, args.rounds)
        print(f"{workload:20}{'processes':>10}{'libraries':>10}{'object store':>13}{'data':>8}")
        for one, holders in sorted(table.items()):
            cells = [holders.get(name, 0) for name in ("processes", "libraries", "object store", "data")]
            print(f"{one:20}{cells[0]:10.0f}{cells[1]:10.0f}{cells[2]:13.0f}{cells[3]:8.0f}")
        print(f"total {sum(sum(h.values()) - h['processes'] for h in table.values()):.0f} MiB\n", flush=True)
    path = Path(__file__).parent / "results" / f"memory-{time.strftime('%Y-%m-%dT%H%M')}.json"
    told = {"command": " ".join(sys.argv), "mebibytes": results, "machine": manifest("", 0, {})}
    path.write_text(json.dumps(told, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
