"""A federation whose data are three times the memory that its run may use, beside one whose data fit.

    python benchmarks/storage.py [--limit 1.25] [--rounds 12] [--cohort 20] [--fitting 200] [--ways stream cache]

Each client is a Parquet file of 500 images of 3×32×32 (PNG) and trains SimpleCNN, one after another in a process of one
thread. In turns, a round each:
    memory  clients whose images are decoded before the first round, in as much memory as it takes
    stream  as many clients as make the data three times the limit, with `data.storage: stream`
    cache   the same, with `data.cache`
The kernel refuses the last two more memory of their own than the limit (RLIMIT_DATA, in GiB). That it refuses them to hold
the same data in memory is tried first. Writes seconds and bytes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quiet import undisturbed

from raysim.store.manifest import manifest

WARM_UP = 2  # rounds
SAMPLES, SHAPE = 500, (3, 32, 32)
SIZE = SAMPLES * math.prod(SHAPE)  # bytes of a client, decoded


def write(folder: Path, clients: int, distinct: int) -> None:
    """A file for each client. The first ones differ, the others are links to them: reading one costs what any costs."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    folder.mkdir()
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    draw = np.random.default_rng(0)
    for number in range(clients):
        path = folder / f"train-{number:05d}.parquet"
        if number >= distinct:
            path.hardlink_to(folder / f"train-{number % distinct:05d}.parquet")
            continue
        y = np.arange(SAMPLES) % 10
        noise = draw.normal(0, 24, (SAMPLES, *SHAPE[1:], SHAPE[0]))
        images = []
        for pixels in (noise + 20 * y[:, None, None, None] + 40).clip(0, 255).astype(np.uint8):
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, "PNG")
            images.append({"bytes": stream.getvalue(), "path": None})
        pq.write_table(pa.table({"image": pa.array(images, kind), "label": y}), path)


def simulate(folder: str, clients: int, cohort: int, settings: dict[str, Any], limit: int | None) -> None:
    """A round for each line that comes in; a line of JSON goes out for it."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from raysim.config import from_dict
    from raysim.federation import Federation

    began = time.perf_counter()
    config = from_dict(
        {
            "data": {"name": {"parquet": {"path": folder, "client_files": True}}, "partition": "natural"} | settings,
            "model": {"name": "simple_cnn"},
            "rounds": {
                "total": 100_000, "participation": cohort / clients, "evaluate_every": 100_000,
                "checkpoint_every": 100_000,
            },
            "local": {"batch_size": 64, "lr": 0.01},
            "evaluate": {"global": False},
            "engine": "local",
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        federation = Federation(config, Path(out))
        print(json.dumps({"start_seconds": time.perf_counter() - began} | memory()), flush=True)
        for _ in sys.stdin:
            started, cpu = time.perf_counter(), time.process_time()
            federation.step()
            row = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
            print(json.dumps(row | memory()), flush=True)


def memory() -> dict[str, int]:
    """Bytes of this process: those that the limit counts, and how many of its own are in memory."""
    status = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return {"counted_bytes": 1024 * int(status["VmData"]), "resident_bytes": 1024 * int(status["RssAnon"])}


class Player:
    """A federation in a process of its own; `rows` is what it tells, of its start and of every round."""

    def __init__(self, *arguments: Any, stderr: int | None = None):
        # Without the last two, address space is reserved that is never used, and the limit counts it.
        settings = {
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        }  # fmt: skip
        command = [sys.executable, __file__, "--run", json.dumps(arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | settings
        )
        self.rows: list[dict[str, Any]] = []
        self.listen()

    def step(self) -> None:
        print(file=self.process.stdin, flush=True)
        self.listen()

    def listen(self) -> None:
        line = self.process.stdout.readline()
        if not line:
            raise MemoryError(f"a federation ended with {self.process.wait()}")
        self.rows.append(json.loads(line))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def refused(*arguments: Any) -> bool:
    """Whether such a federation has too little memory."""
    try:
        Player(*arguments, stderr=subprocess.DEVNULL).close()
    except MemoryError:
        return True
    return False


def measure(limit: int, rounds: int, cohort: int, fitting: int, ways: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder, clients = Path(name), -(-3 * limit // SIZE)
        write(folder / "all", clients, fitting)
        write(folder / "fitting", fitting, fitting)
        everything = str(folder / "all"), clients, cohort
        settings = {
            "stream": {"storage": "stream", "stream_bytes": 64 << 20},
            "cache": {"cache": str(folder / "cache")},
        }
        result: dict[str, Any] = {
            "clients": clients, "fitting": fitting, "cohort": cohort, "rounds": rounds, "limit_bytes": limit,
            "decoded_bytes": clients * SIZE,
            "memory_refused": refused(*everything, {}, limit),
        }  # fmt: skip
        players = {"memory": Player(str(folder / "fitting"), fitting, cohort, {}, None)}
        players |= {way: Player(*everything, settings[way], limit) for way in ways}
        if "cache" in ways:
            again = Player(*everything, settings["cache"], limit)
            result["cached_start_seconds"] = again.rows[0]["start_seconds"]
            again.close()

        def turn() -> None:
            for player in players.values():  # what disturbs one disturbs all
                player.step()

        for _ in range(WARM_UP):
            turn()
        turns = undisturbed(turn, rounds)
        result |= turns.recorded()
        for what, player in players.items():
            player.close()
            start, timed = player.rows[0], [player.rows[1 + WARM_UP + t] for t in turns.kept]
            pairs = [(players["memory"].rows[1 + WARM_UP + t], player.rows[1 + WARM_UP + t]) for t in turns.kept]
            result[what] = {
                "start_seconds": start["start_seconds"],
                "seconds": statistics.median(row["seconds"] for row in timed),
                # Of that of `memory`: by the clock, and where no core is idle, so that every second of CPU counts.
                "speed": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
                "speed_without_idle_cores": statistics.median(a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs),
                "resident_bytes": [row["resident_bytes"] for row in player.rows],  # after the start and each round
                "counted_bytes": max(row["counted_bytes"] for row in player.rows),
            }
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1.25, help="GiB")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cohort", type=int, default=20, help="clients of a round")
    parser.add_argument("--fitting", type=int, default=200, help="clients whose data fit")
    parser.add_argument("--ways", nargs="+", choices=("stream", "cache"), default=("stream", "cache"))
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        simulate(*args.run)
        return
    result = measure(int(args.limit * 2**30), args.rounds, args.cohort, args.fitting, args.ways)
    print(f"{result['clients']} clients, {result['decoded_bytes'] / 2**30:.2f} GiB decoded, limit {args.limit:g} GiB; "
          f"held in memory it {'is refused' if result['memory_refused'] else 'FITS'}")  # fmt: skip
    for what in ("memory", *args.ways):
        row = result[what]
        first, last = row["resident_bytes"][3] / 2**20, row["resident_bytes"][-1] / 2**20
        print(f"{what:7} start {row['start_seconds']:6.1f} s, round {row['seconds']:.2f} s, speed {row['speed']:.2f} "
              f"({row['speed_without_idle_cores']:.2f} by seconds of CPU), "
              f"resident {first:.0f} MiB after 3 rounds, {last:.0f} MiB after {len(row['resident_bytes']) - 1}")  # fmt: skip
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    out = folder / f"storage-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps({**manifest("", 0, {}), "result": result}, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
