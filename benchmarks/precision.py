"""Accuracy with `local.precision: bf16` beside fp32: the same federations, seed by seed.

    python benchmarks/precision.py [--data mnist cifar10] [--seeds 8 9 10] [--parallel 2]

A seed has the same split, first model, cohorts and batches in both. The score is the mean of the last three evaluations. A
CPU without bfloat16, on which raysim refuses it, is made to compute with it nevertheless: that is some ten times slower, and
PyTorch's kernels for it round at least as often. The data are those of configs/fedala and configs/fedldf. A result is
written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from claims import difference

from raysim import machine
from raysim.config import from_dict
from raysim.federation import Federation
from raysim.store.manifest import manifest
from raysim.store.tables import read

DATA: dict[str, dict[str, Any]] = {  # some 250 images a client, ten of twenty clients a round
    "mnist": {
        "data": {"name": {"parquet": "mnist_dir0.1"}, "client_val_frac": 0.9},
        "model": {"name": "fedavg_cnn"},
        "rounds": {"total": 25},
    },
    "cifar10": {
        "data": {"name": {"parquet": "cifar10_subset"}, "client_val_frac": 0.75},
        "model": {"name": "simple_cnn"},
        "rounds": {"total": 50},
    },
}
HAS_BF16 = machine.computes_bf16()
Run = tuple[str, int, str]  # data, seed and precision


def ran(run: Run) -> list[float]:
    """The run's evaluations: accuracies in %."""
    name, seed, precision = run
    torch.set_num_threads(1)
    machine.computes_bf16 = lambda: True
    raw: dict[str, Any] = {
        "name": "precision",
        "seed": seed,
        "data": {"partition": {"dirichlet_counts": {"alpha": 0.5, "clients": 20}}},
        "rounds": {"participation": 0.5, "evaluate_every": 5, "checkpoint_every": 1000},
        "local": {"batch_size": 32, "lr": 0.05, "precision": precision},
        "engine": "local",
    }
    for section, values in DATA[name].items():
        raw[section] = raw.get(section, {}) | values
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(from_dict(raw), Path(folder))
        while federation.step():
            pass
        federation.close()
        return [100 * value for value in read(Path(folder), "rounds")["accuracy"].to_pylist() if value is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--seeds", type=int, nargs="+", default=[8, 9, 10])
    parser.add_argument("--parallel", type=int, default=2)
    args = parser.parse_args()
    runs: list[Run] = [(name, s, p) for p in ("bf16", "fp32") for name in reversed(args.data) for s in args.seeds]
    with mp.get_context("spawn").Pool(args.parallel) as pool:
        curves = dict(zip(runs, pool.map(ran, runs, chunksize=1), strict=True))
    told: dict[str, Any] = {"command": " ".join(sys.argv), "cpu_has_bf16": HAS_BF16, "machine": manifest("", 0, {})}
    for name in args.data:
        by_precision = {
            p: {seed: statistics.mean(curves[name, seed, p][-3:]) for seed in args.seeds} for p in ("bf16", "fp32")
        }
        means = {p: statistics.mean(scores.values()) for p, scores in by_precision.items()}
        apart = difference(by_precision["bf16"], by_precision["fp32"])
        interval = " to ".join(f"{end:+.2f}" for end in apart["interval"] or ()) or "one seed"
        print(
            f"{name}: fp32 {means['fp32']:.2f} %, bf16 {means['bf16']:.2f} %, apart {apart['mean']:+.2f} ({interval})"
        )
        told[name] = {"scores": by_precision, "difference": apart}
    told["curves"] = {" ".join(map(str, run)): curve for run, curve in curves.items()}
    out = Path(__file__).parent / "results" / f"precision-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
