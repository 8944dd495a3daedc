"""What clients' states cost as segments, as one safetensors file a checkpoint, and in SQLite.

    python benchmarks/state_formats.py [--states 1140x580000 100000x2000] [--repeat 2]

STATESxBYTES: so many clients with so many bytes each. Every form saves all states, then a hundred that have changed, with
the file synced, and reads a hundred back in a new object. Each is measured in a process of its own. Writes seconds, bytes
on disk and the greatest resident memory beyond the states to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from state import CHANGED, states

State = tuple[int, dict[str, np.ndarray]]


class Segments:
    """raysim's own."""

    def __init__(self, folder: Path):
        from raysim.federation.checkpoint import Checkpoints

        self.checkpoints = Checkpoints(folder)
        if latest := self.checkpoints.latest():
            self.checkpoints.load(latest)

    def save(self, t: int, some: list[State]) -> None:
        self.checkpoints.save(t, {}, {}, some)

    def read(self, clients: Iterable[int]) -> None:
        for client in clients:
            self.checkpoints.states[client]


class Safetensors:
    """A file for each checkpoint, with what has changed; the newest that has a client counts."""

    def __init__(self, folder: Path):
        from safetensors import safe_open

        self.folder, self.files = folder, {}
        for path in sorted(folder.glob("*.safetensors")):
            opened = safe_open(path, "np")
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def save(self, t: int, some: list[State]) -> None:
        from safetensors.numpy import save_file

        path = self.folder / f"{t}.safetensors"
        save_file({f"{client}/{name}": array for client, state in some for name, array in state.items()}, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def read(self, clients: Iterable[int]) -> None:
        for client in clients:
            for name in ("state.a", "state.b"):
                self.files[f"{client}/{name}"].get_tensor(f"{client}/{name}")


class SQLite:
    """A row for each client, in one transaction a checkpoint."""

    def __init__(self, folder: Path):
        self.base = sqlite3.connect(folder / "states.db")
        self.base.execute("PRAGMA journal_mode=WAL")
        self.base.execute("PRAGMA synchronous=FULL")
        self.base.execute("CREATE TABLE IF NOT EXISTS states (client INTEGER PRIMARY KEY, a BLOB, b BLOB)")

    def save(self, t: int, some: list[State]) -> None:
        with self.base:
            rows = ((client, *(array.data for array in state.values())) for client, state in some)
            self.base.executemany("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", rows)

    def read(self, clients: Iterable[int]) -> None:
        for client in clients:
            self.base.execute("SELECT a, b FROM states WHERE client = ?", (client,)).fetchone()


FORMS = {"segments": Segments, "safetensors": Safetensors, "sqlite": SQLite}


def measure(form: str, clients: int, size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, tempfile.TemporaryDirectory() as first:
        folder, made = Path(name), [*states(range(clients), size)]
        FORMS[form](Path(first)).save(1, made[:1])  # what is imported late is imported now
        store, row = FORMS[form](folder), {}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for what, t, some in (("all", 1, made), (f"changed_{CHANGED}", 2, made[:CHANGED])):
            started = time.perf_counter()
            store.save(t, some)
            row[f"{what}_seconds"] = time.perf_counter() - started
        row["megabytes_of_memory"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        row["megabytes_on_disk"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        started = time.perf_counter()
        FORMS[form](folder).read(range(0, clients, max(1, clients // CHANGED)))
        return row | {"open_and_read_100_seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", nargs="*", default=["1140x580000", "100000x2000"], metavar="STATESxBYTES")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--form", nargs=3, metavar=("FORM", "STATES", "BYTES"), help="measure that alone, print JSON")
    args = parser.parse_args()
    if args.form:
        print(json.dumps(measure(args.form[0], int(args.form[1]), int(args.form[2]))))
        return
    rows = []
    for name in args.states:
        found: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
        for _ in range(args.repeat):
            for form, its in found.items():
                command = [sys.executable, __file__, "--form", form, *name.split("x")]
                its.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
        for form, its in found.items():
            medians = {key: round(statistics.median(one[key] for one in its), 4) for key in its[0]}
            rows.append({"states": name, "form": form, **medians})
            print(rows[-1], flush=True)
    from raysim.store.manifest import manifest

    out = Path(__file__).parent / "results" / f"state_formats-{time.strftime('%Y-%m-%dT%H%M')}.json"
    result = {"command": " ".join(sys.argv), "rows": rows, "machine": manifest("", 0, {})}
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(out)


if __name__ == "__main__":
    main()
