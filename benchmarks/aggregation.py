"""Seconds to aggregate K models: the tree of the Ray engine, a gather to the driver, and an in-place sum in one process.

    python benchmarks/aggregation.py [--clients 20 100] [--repeats 21]

The models are trained by nobody (a client method that only scales what it received), so that only aggregation counts.
Tree and in-place sum take turns, medians in steady state: Ray's object store is slower while its memory is new.
A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("RAY_worker_niceness", "0")  # actors are to compete as the loops do; Ray would make them yield

from raysim.config import from_dict
from raysim.core.client import ClientMethod, LocalRun
from raysim.core.local_run import RoundInfo
from raysim.core.server import Downlink
from raysim.engine.collectives import HostedCohort
from raysim.engine.dispatcher import Dispatcher
from raysim.federation import Federation
from raysim.methods import CLIENTS
from raysim.store.manifest import manifest

WARM_UP = 50  # turns until the object store gives out memory that processes have touched before
MODELS = {"fedavg_cnn": (1, 28, 28), "resnet18": (3, 32, 32)}


@dataclass(frozen=True)
class Untrained(ClientMethod):
    """Every client ends with a model of its own at no cost."""

    def train(self, run: LocalRun) -> None:
        run.params.mul_(1 + 1e-3 * run.client)


def federation(model: str, clients: int, folder: Path) -> Federation:
    from raysim.engine.ray.engine import ray_engine

    CLIENTS["untrained"] = Untrained
    config = from_dict(
        {
            "data": {
                "name": {"synthetic": {"samples": 10 * clients, "test_samples": 10, "shape": MODELS[model]}},
                "partition": {"iid_equal": {"clients": clients}},
            },
            "model": {"name": model},
            "rounds": {"total": 1},
            "local": {"batch_size": 10, "lr": 0.1},
            "client": ["untrained"],
            # To measure the gather that the engine would refuse, it must be allowed.
            "engine": {
                "ray": {"clients_per_actor": -(-clients // len(os.sched_getaffinity(0))), "gather_bytes": 1 << 40}
            },
        }
    )
    return Federation(config, folder, make_engine=ray_engine)


def in_turns(actions: dict[str, Any], repeats: int, before: int = 0) -> dict[str, float]:
    """Median seconds of each action; the first `before` turns do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(before + repeats):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            if turn >= before:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(s) for name, s in seconds.items()}


def measure(model: str, clients: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        fed = federation(model, clients, Path(folder))
        round_info = RoundInfo(0, 0, 1, clients, 0.1, 10 * clients)
        dispatcher = Dispatcher(fed.engine, round_info, range(clients), Downlink())
        cohort = HostedCohort(fed.engine, dispatcher, dispatcher.train())
        mix = cohort.by_size()
        weights = mix.per_client().tolist()
        rows = torch.rand(min(clients, 20), fed.server.layers.S)  # more than fits into a cache
        total = torch.zeros(rows.shape[1])

        def add(rows: Iterable[torch.Tensor]) -> None:
            total.zero_()
            for row, weight in zip(rows, weights, strict=True):
                total.add_(row, alpha=weight)

        result: dict[str, Any] = {"model": model, "parameters": fed.server.layers.P, "clients": clients}
        result |= in_turns({"gather": lambda: add(cohort.gather())}, max(1, repeats // 10), before=1)
        sums = {"tree": lambda: cohort.reduce(mix), "in_place": lambda: add(islice(cycle(rows), clients))}
        result |= in_turns(sums, repeats, WARM_UP)
        fed.close()
    return result


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    results = []
    print(
        f"{'model':12}{'parameters':>12}{'K':>5}{'tree':>9}{'gather':>9}{'in-place':>10}{'tree/in-place':>15}   (seconds)"
    )
    for model in args.models:
        for clients in args.clients:
            r = measure(model, clients, args.repeats)
            results.append(r)
            print(f"{model:12}{r['parameters']:12,}{clients:5}{r['tree']:9.4f}{r['gather']:9.4f}{r['in_place']:10.4f}"
                  f"{r['tree'] / r['in_place']:15.2f}", flush=True)  # fmt: skip
    ray.shutdown()
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    out = folder / f"aggregation-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps({**manifest("", 0, {}), "results": results}, indent=1) + "\n")
    print(f"written to {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}")


if __name__ == "__main__":
    main()
