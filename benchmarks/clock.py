"""What simulated time costs, on W3 of `rounds.py`: 100 clients a round, two small steps each.

    python benchmarks/clock.py [--rounds 40] [--parts clients round busy]

    clients  seconds and greatest MB of the traits and the availability of a million clients
    round    CPU seconds of a round with log-normal speeds, 4G and Markov availability, over those without, round by round in turns
    busy     share of the time in which two actors train, with FedBuff and log-normal speeds, and with synchronous rounds:
             of the rounds, and of their training; and how much two cores could have at most, as all other processes need some

A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rounds import SEED, WORKLOADS, configuration

from raysim.config import Config, from_dict, to_dict
from raysim.core.availability import Markov
from raysim.core.simulated import LogNormal, SimulatedClock
from raysim.federation import Federation
from raysim.store import tables
from raysim.store.manifest import manifest

TARGETS = {"seconds": 3.0, "mb": 60.0, "ratio": 1.02, "busy": 0.9}
CLOCK: dict[str, Any] = {"speed": {"lognormal": {"median": 75, "sigma": 1.0}}, "network": "4g"}
COMES_AND_GOES = {"availability": {"markov": {"available": 7200, "away": 14400}}, "interrupt": "ignore"}
WARM_UP = 3  # rounds


def w3(engine: Any, **changes: Any) -> Config:
    written = to_dict(configuration(WORKLOADS["W3"], engine))
    for section, settings in changes.items():
        written[section] |= settings
    return from_dict(written)


def of_a_million(n: int = 10**6) -> dict[str, float]:
    """Seconds without, and greatest MB with, a count of what NumPy allocates besides the amounts that are given."""
    clock = SimulatedClock(speed=LogNormal(75.0, 0.6), network="4g", availability=Markov(7200.0, 14400.0))
    ids, amount, at = np.arange(n), np.full(n, 1e5), np.zeros(n)

    def work() -> None:
        clock.seconds(0, ids, amount, amount, amount)
        clock.state(0, ids, at)

    work()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return {"seconds": seconds, "mb": most}


def of_a_round(rounds: int) -> dict[str, Any]:
    """CPU seconds of this process, which trains the clients itself."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: Federation(w3("local", **changes), Path(folder) / name)
            for name, changes in (("without", {}), ("with", {"clock": CLOCK | COMES_AND_GOES}))
        }
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(WARM_UP + rounds):
            for name in sorted(runs, reverse=bool(turn % 2)):
                began = time.process_time()
                runs[name].step()
                if turn >= WARM_UP:
                    taken[name].append(time.process_time() - began)
        for run in runs.values():
            run.close()
    ratios = [a / b for a, b in zip(taken["with"], taken["without"], strict=True)]
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    return {
        "ratio": medians["with"] / medians["without"],
        "quartiles_of_pairs": statistics.quantiles(ratios),
        **medians,
    }


def of_actors(rounds: int, buffer: int, selection: Any) -> dict[str, Any]:
    """Of `buffer` updates a round."""
    import ray  # after `rounds`, which says how nice actors are

    from raysim.engine.ray.engine import ray_engine

    engine = {"ray": {"clients_per_actor": buffer // 2, "gpu_per_client": 0}}
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        config = w3(engine, clock=CLOCK, rounds={"selection": selection})
        run = Federation(config, Path(folder), make_engine=ray_engine)
        for _ in range(WARM_UP):
            run.step()
        everything = [psutil.Process(), *psutil.Process().children(recursive=True)]
        training = [process for process in everything if process.cmdline()[0] == "ray::HostActor"]
        before = cpu_seconds(training), cpu_seconds(everything)
        for _ in range(rounds):
            run.step()
        of_training, of_all = (
            cpu_seconds(processes) - then for processes, then in zip((training, everything), before, strict=True)
        )
        run.close()
        spans, table = (tables.read(Path(folder), name).to_pandas() for name in ("timeline", "rounds"))
    ray.shutdown()
    trained = spans[(spans.phase == "train") & (spans["round"] >= WARM_UP)]
    worked, table = float((trained.stop - trained.start).sum()), table[WARM_UP:]
    actors = spans.host.nunique()
    return {
        "actors": actors, "buffer": buffer, "of_training": worked / (actors * float(table.seconds_train.sum())),
        "of_rounds": worked / (actors * float(table.seconds.sum())), "at_most": of_training / of_all,
    }  # fmt: skip


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--parts", nargs="+", choices=("clients", "round", "busy"), default=["clients", "round", "busy"]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if "clients" in args.parts:
        found["clients"] = of_a_million()
    if "round" in args.parts:
        found["round"] = of_a_round(args.rounds)
    if "busy" in args.parts:
        found["synchronous"] = of_actors(args.rounds, 100, "uniform")
        found["busy"] = [
            of_actors(args.rounds, buffer, {"fedbuff": {"buffer": buffer, "concurrency": 100}}) for buffer in (100, 10)
        ]
    print(json.dumps(found, indent=1))
    out = Path(__file__).parent / "results" / f"clock-{time.strftime('%Y-%m-%dT%H%M')}.json"
    written = {**manifest("", SEED, {}), "settings": vars(args), "targets": TARGETS, "results": found}
    out.write_text(json.dumps(written, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
