"""Seconds a round of every method beside FedAvg on the same clients, in turns, and the work that explains the ratio.

    python benchmarks/methods.py [--methods fedala ditto] [--rounds 7] [--clients 8] [--samples 100] [--model fedavg_cnn] [--tapes]

All federations hold the same samples and run one round each in turn, in this process on one thread, so that what
disturbs one disturbs all. The first rounds, in which buffers grow and FedALA's weights settle, are not counted. `work` is
the ratio of floating-point operations (matrix products and convolutions, forward and backward) in one further round. With
`--tapes` every federation takes its turn without tapes, too: `tape` is the ratio of CPU seconds with and without.
A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from catalogue import SETTINGS, Setting
from torch.utils.flop_counter import FlopCounterMode

from raysim.config import Config, from_dict
from raysim.federation import Federation, prepare
from raysim.store.manifest import manifest

SEED, WARM_UP, BATCH = 0, 3, 10
CASES: dict[str, Setting] = SETTINGS


def configuration(args: argparse.Namespace, sections: dict[str, Any], tape: str = "auto") -> Config:
    """All clients take part: every method can, and FedALA's are settled as soon as can be."""
    raw: dict[str, Any] = {
        "name": "benchmark",
        "seed": SEED,
        "data": {
            "name": {
                "synthetic": {"samples": args.clients * args.samples, "test_samples": 400, "shape": [1, 28, 28]},
            },
            "partition": {"iid_equal": {"clients": args.clients}},
        },
        "model": {"name": args.model},
        "rounds": {"total": 100_000, "evaluate_every": 100_000, "checkpoint_every": 100_000},
        "local": {"batch_size": BATCH, "lr": 0.01},
        "evaluate": {"global": False},
        "engine": {"local": {"tape": tape}},
    }
    for name, section in sections.items():
        raw[name] = raw[name] | section if isinstance(section, dict) else section
    return from_dict(raw)


def contest(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    federations, loops, samples = {}, {}, {}
    for name in ["FedAvg", *args.methods]:
        config = configuration(args, CASES[name].sections(name) if name in CASES else {})
        key = repr(config.data)
        samples[key] = samples.get(key) or prepare(config)  # one copy of the samples for all
        federations[name] = Federation(config, folder / name, partitioned=samples[key])
        if args.tapes:
            config = configuration(args, CASES[name].sections(name) if name in CASES else {}, "never")
            loops[name] = Federation(config, folder / f"{name} without", partitioned=samples[key])
    seconds: dict[str, list[float]] = {name: [] for name in federations}
    tapes: dict[str, list[float]] = {name: [] for name in loops}
    for t in range(WARM_UP + args.rounds):
        for name, federation in federations.items():
            begun, cpu = time.perf_counter(), time.process_time()
            federation.step()
            taken, cpu = time.perf_counter() - begun, time.process_time() - cpu
            if t >= WARM_UP:
                seconds[name].append(taken)
            if name in loops:
                begun = time.process_time()
                loops[name].step()
                if t >= WARM_UP:
                    tapes[name].append(cpu / (time.process_time() - begun))
    plain, results = None, []
    for name, federation in federations.items():
        with FlopCounterMode(display=False) as counter:
            federation.step()
        federation.close()
        if name in loops:
            loops[name].close()
        operations = counter.get_total_flops()
        plain = plain or operations
        # Ratios of neighbours in time, then their median: a slow minute is in both.
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["FedAvg"], strict=True))
        results.append(
            {
                "method": name, "seconds": statistics.median(seconds[name]), "quartiles": quartiles(seconds[name]),
                "ratio": ratio, "work": operations / plain, "explanation": CASES[name].work if name in CASES else "",
                **({"tape": statistics.median(tapes[name]), "tape_quartiles": quartiles(tapes[name])} if name in tapes else {}),
            }
        )  # fmt: skip
    return results


def quartiles(values: list[float]) -> list[float]:
    cuts = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return [cuts[0], cuts[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=CASES, default=list(CASES), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--samples", type=int, default=100, help="a client")
    parser.add_argument("--model", default="fedavg_cnn")
    parser.add_argument("--tapes", action="store_true", help="also without them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = contest(args, Path(folder))
    print(
        f"{args.clients} clients of {args.samples} samples, batches of {BATCH}, {args.model}; medians of {args.rounds} rounds"
    )
    print(f"{'method':14}{'seconds':>9}{'ratio':>7}{'work':>7}{'tape':>7}")
    for r in results:
        print(
            f"{r['method']:14}{r['seconds']:9.4f}{r['ratio']:7.2f}{r['work']:7.2f}{r.get('tape', math.nan):7.2f}"
            f"  {r['explanation']}"
        )
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    out = folder / f"methods-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps({**manifest("", SEED, {}), "settings": vars(args), "results": results}, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
