"""Whether a seed gives the same bits again, and on other numbers of workers: raysim beside other simulators.

    python benchmarks/bits.py --envs FOLDER [--workload W3] [--rounds 3] [--seeds 0 1] [--workers 1 1 2 2]

Each run is one of benchmarks/peers.py: its scripts, its environments. Every draw of a script follows from the seed. A
client's order of samples follows from seed, round and client, wherever it trains; BlazeFL has generators of its own for it.
What is compared is the SHA-256 of the last model's parameters. A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from peers import OWN, SCRIPTS, Given, Refused, Simulator, environment
from rounds import WORKLOADS

from raysim.store.manifest import manifest


def last_model(given: Given, name: str, python: str, workers: int, rounds: int) -> str:
    """SHA-256 of the parameters that a run of its own leaves."""
    with tempfile.TemporaryDirectory() as folder:
        one = Simulator(name, python, Path(folder) / name)
        try:
            given.lay_out(name, one.folder, workers)
            one.start(rounds, workers)
            for _ in range(1, rounds):
                one.simulate()
        finally:
            one.close()
    return sha256(b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in one.parameters)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, required=True)
    parser.add_argument("--peers", nargs="+", choices=OWN, default=list(OWN))
    parser.add_argument("--workload", choices=WORKLOADS, default="W3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 1, 2, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    pythons, found, results = {}, {}, []
    try:
        for name in ("raysim", *args.peers):
            pythons[name], found[name] = environment(name, args.envs.absolute())
        print(f"{'':10}{'seed':>5}" + "".join(f"{count} worker(s)".rjust(14) for count in args.workers))
        for seed in args.seeds:
            given = Given.of(WORKLOADS[args.workload], seed)
            for name, python in pythons.items():
                hashes = [last_model(given, name, python, count, args.rounds) for count in args.workers]
                results.append({"simulator": name, "seed": seed, "workers": args.workers, "sha256": hashes})
                print(f"{name:10}{seed:5}" + "".join(digest[:8].rjust(14) for digest in hashes), flush=True)
    except Refused as refusal:
        sys.exit(str(refusal))
    out = SCRIPTS.with_name("results") / f"bits-{time.strftime('%Y-%m-%dT%H%M')}.json"
    measured = {"command": " ".join(sys.argv), "environments": found, "machine": manifest("", args.seeds[0], {})}
    out.write_text(json.dumps(measured | {"results": results}, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
