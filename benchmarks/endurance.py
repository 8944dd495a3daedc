"""Whether a long run stays as it began: memory, open files and seconds a round of 1,500 rounds, on both engines.

    python benchmarks/endurance.py [--rounds 1500] [--engines local ray]

Memory is the private and a share of the shared memory (PSS) of all processes that the run has started, Ray's own among them.
CPU is of the same processes: it tells a run that slows down from a machine that does. Writes the samples and a figure to
benchmarks/results/.
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
from typing import Any

import numpy as np
import psutil
import yaml

from raysim.report.canvas import PAGE, Canvas, legend, styled
from raysim.report.series import plot
from raysim.store import tables
from raysim.store.manifest import manifest

CONFIG: dict[str, Any] = {
    "name": "endurance",
    "data": {
        "name": {"synthetic": {"samples": 2000, "shape": [1, 16, 16], "classes": 4}},
        "partition": {"dirichlet_counts": {"alpha": 0.5, "clients": 40, "min_size": 4}},
    },
    "model": {"name": "tiny_bn_cnn"},
    "rounds": {"participation": 0.25, "evaluate_every": 10},
    "local": {"batch_size": 10, "lr": 0.05},
    "client": ["scaffold"],
    "server": ["fedlws"],
}
EVERY = 2.0  # seconds between looks


def watched(command: list[str]) -> list[dict[str, float]]:
    """Run a command; a row every few seconds with the memory in MiB and the open files of all its processes, the seconds of
    CPU that they have used, and those that the machine's host has given to others."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    rows, began, root = [], time.time(), psutil.Process(process.pid)
    while process.poll() is None:
        memory = files = used = 0.0
        for one in [root, *root.children(recursive=True)]:
            try:
                memory += one.memory_full_info().pss / 2**20
                files += one.num_fds()
                used += sum(one.cpu_times()[:2])
            except psutil.Error:  # it has ended meanwhile
                continue
        stolen = psutil.cpu_times().steal
        rows.append({"seconds": time.time() - began, "memory": memory, "files": files, "used": used, "stolen": stolen})
        time.sleep(EVERY)
    if process.returncode:
        raise SystemExit(process.returncode)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--engines", nargs="*", default=["local", "ray"])
    args = parser.parse_args()
    stem = Path(__file__).parent / "results" / f"endurance-{time.strftime('%Y-%m-%dT%H%M')}"
    results: dict[str, Any] = {}
    for engine in args.engines:
        with tempfile.TemporaryDirectory() as folder:
            file, run = Path(folder, "run.yaml"), Path(folder, "run")
            rounds = {**CONFIG["rounds"], "total": args.rounds}
            file.write_text(yaml.safe_dump({**CONFIG, "rounds": rounds, "engine": engine}))
            rows = watched([sys.executable, "-m", "raysim", "run", str(file), "--out", str(run)])
            walls = np.array(tables.read(run, "rounds")["wall"].to_pylist())
        tenths = np.array_split(np.diff(walls, prepend=0.0), 10)
        # The run's clock starts after the process's, and stops a little before it.
        edges = np.array([0.0, *(walls[part[-1]] for part in np.array_split(np.arange(len(walls)), 10))])
        edges += rows[-1]["seconds"] - walls[-1]
        at = [row["seconds"] for row in rows]
        used = np.maximum.accumulate([row["used"] for row in rows])  # processes that have ended are not seen any more
        cpu, stolen = (np.diff(np.interp(edges, at, column)) for column in (used, [row["stolen"] for row in rows]))
        middle = [row for row in rows if row["seconds"] > rows[-1]["seconds"] * 0.1]
        results[engine] = {
            "rows": rows,
            "seconds_a_round_by_tenth": [float(np.median(part)) for part in tenths],
            "cpu_seconds_a_round_by_tenth": (10 * cpu / len(walls)).tolist(),
            "stolen_share_by_tenth": (stolen / np.diff(edges) / psutil.cpu_count()).tolist(),
            "memory_after_a_tenth": middle[0]["memory"], "memory_at_the_end": rows[-3]["memory"],
            "files_after_a_tenth": middle[0]["files"], "files_at_the_end": rows[-3]["files"],
        }  # fmt: skip
        print(engine, {key: value for key, value in results[engine].items() if key != "rows"}, flush=True)
    told = {"command": " ".join(sys.argv), "rounds": args.rounds, "machine": manifest("", 0, {}), "results": results}
    stem.with_suffix(".json").write_text(json.dumps(told, indent=2) + "\n")
    draw(results, stem.with_suffix(".png"))
    print(stem)


def draw(results: dict[str, Any], path: Path) -> None:
    with styled():
        figure = Canvas(PAGE, 2.1)
        memory, files, pace = figure.subplots(1, 3)
        lines = []
        for i, result in enumerate(results.values()):
            seconds = np.array([row["seconds"] for row in result["rows"]])
            for axes, what in ((memory, "memory"), (files, "files")):
                plot(axes, i, seconds, np.array([row[what] for row in result["rows"]]))
            lines.append(plot(pace, i, np.arange(5, 100, 10), np.array(result["cpu_seconds_a_round_by_tenth"])))
        memory.set(xlabel="time (s)", ylabel="memory (MiB)", ylim=(0, None))
        files.set(xlabel="time (s)", ylabel="open files", ylim=(0, None))
        pace.set(xlabel="of the run (%)", ylabel="CPU seconds a round", ylim=(0, None))
        legend(figure, lines, list(results))
    figure.save(path)


if __name__ == "__main__":
    main()
