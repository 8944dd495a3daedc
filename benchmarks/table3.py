"""Table 3 of the FedLWS paper for raysim: seconds to aggregate 20 clients with FedAvg, FedLAW and FedLWS, and others' ratios.

    python benchmarks/table3.py [--models simple_cnn resnet20] [--repeats 9] [--server-steps 10] [--ray simple_cnn]

The 20 models are there already, made by clients that train nothing; what is timed is what a round does then: plan, sum,
server steps. What is ready by then is not in it: statistics that clients measure while they train (CCN's latents, FedLDF's
norms), and what of a plan a round makes before it (FedAvg's and FedDisco's, the prior weights of others). Methods take
turns in changing order.

FedLAW learns on 200 proxy samples for 100 epochs, 200 steps. Its seconds are split into the proxy samples' passes,
forward and backward, and the rest. Where all its steps would take more than --limit seconds it is timed over
--server-steps of them and extrapolated (marked ~). The paper's seconds, on its own machine, stand beside.

Through Ray the same ratios, with what the plans cost: reductions (R), visits to the clients (V), computations on one
host (C). A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raysim.config import from_dict
from raysim.core.aggregator import Aggregator
from raysim.core.client import ClientMethod, LocalRun
from raysim.core.cohort import AskedCohort
from raysim.core.local_run import RoundInfo
from raysim.core.server import Downlink, RoundScratch
from raysim.core.server_model import ServerModel
from raysim.core.tree import BLOCK
from raysim.engine.collectives import HostedCohort
from raysim.engine.dispatcher import Dispatcher
from raysim.federation import Federation, aggregator, host_spec
from raysim.methods import CLIENTS
from raysim.methods.fedlaw import LearnedWeights
from raysim.store.manifest import manifest

CLIENTS_IN_COHORT, PROXY_SAMPLES, EPOCHS = 20, 200, 100
# Seconds for FedAvg, FedLAW and FedLWS in table 3 of the paper (Shi et al., 2025).
PAPER = {
    "simple_cnn": (0.019, 4.83, 0.035),
    "resnet20": (0.10, 7.11, 0.12),
    "vit": (0.18, 9.80, 0.21),
    "wrn56_4": (0.561, 20.08, 0.832),
    "densenet121": (1.359, 27.25, 1.756),
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedlws": {"server": ["fedlws"]},
    "ccn": {"weighting": ["ccn"]},
    "feddisco": {"weighting": ["feddisco"]},
    "ldawa": {"weighting": [{"ldawa": {"warmup": 0}}]},
    "fednova": {"weighting": ["fednova"]},
    "fedldf": {"weighting": [{"fedldf": {"top_n": 4}}]},
}
Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Untrained(ClientMethod):
    """Every client ends with a model of its own at no cost."""

    def train(self, run: LocalRun) -> None:
        noise = torch.rand(len(run.params), generator=torch.Generator().manual_seed(run.client))
        run.params.add_(noise, alpha=1e-3)
        run.steps = 1 + run.client % 3  # FedNova divides by them


def configuration(model: str, engine: Any, sections: Mapping[str, Any]) -> Any:
    """Clients of unequal size: where sizes are equal FedAvg's sum and FedLWS's are one."""
    CLIENTS["untrained"] = Untrained
    return from_dict(
        {
            "data": {
                "name": {"synthetic": {"samples": 160, "test_samples": 400, "shape": [3, 32, 32]}},
                "partition": {"dirichlet_counts": {"alpha": 1.0, "clients": CLIENTS_IN_COHORT, "min_size": 2}},
                "proxy": {"samples": PROXY_SAMPLES},
            },
            "model": {"name": model},
            "rounds": {"total": 1},
            "local": {"batch_size": 10, "lr": 0.1},
            "client": ["untrained"],
            "engine": engine,
            **sections,
        }
    )


class Trained:
    """Twenty trained models on an engine, to be aggregated by any method again and again."""

    def __init__(self, model: str, engine: Any, folder: Path):
        plain = configuration(model, engine, {})
        self.federation = Federation(
            plain, folder, make_engine=partial(self._measuring, plain.engine.make, model, engine)
        )
        self.server = self.federation.server
        round_info = RoundInfo(0, 0, 1, CLIENTS_IN_COHORT, 0.1, 160)
        engine = self.federation.engine
        dispatcher = Dispatcher(engine, round_info, range(CLIENTS_IN_COHORT), Downlink())
        self.cohort = HostedCohort(engine, dispatcher, dispatcher.train())
        assert len(self.cohort.clients) == CLIENTS_IN_COHORT
        self.asked = AskedCohort(self.cohort.clients, self.cohort.sizes, self.cohort.layers)

    def _measuring(self, make: Any, model: str, engine: Any, config: Any, spec: Any, *rest: Any) -> Any:
        """An engine whose clients measure what any of the methods asks for."""
        configs = {name: configuration(model, engine, sections) for name, sections in METHODS.items()}
        self.data = rest[:2]  # and the partition
        specs = {name: host_spec(config, *self.data) for name, config in configs.items()}
        self.aggregators = {name: aggregator(configs[name], specs[name]) for name in METHODS}
        probes = tuple(dict.fromkeys(probe for s in specs.values() for probe in s.probes))
        return make(config, replace(spec, probes=probes), *rest)

    def fedlaw(self, epochs: int) -> Aggregator:
        config = configuration(
            self.federation.config.model.name, "local", {"weighting": [{"fedlaw": {"epochs": epochs}}]}
        )
        return aggregator(config, host_spec(config, *self.data))

    def aggregate(self, method: Aggregator) -> float:
        """What a round does once its clients are back, and its seconds; the server keeps the model it had."""
        self.server.scratch = RoundScratch()
        early = method.plan_early(self.asked, self.server)
        early.adopt(self.server)
        begun = time.perf_counter()
        mixture = method.plan(self.cohort, self.server, early)
        method.transform(method.reduce(mixture, self.cohort), mixture, self.cohort, self.server)
        return time.perf_counter() - begun

    def close(self) -> None:
        self.federation.close()


def timed(action: Any) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def in_turns(trained: Trained, repeats: int) -> dict[str, Any]:
    """Seconds of each method: medians, and the median of its ratios to FedAvg's in the same turn."""
    seconds: Seconds = {name: [] for name in METHODS}
    names = list(METHODS)
    for turn in range(repeats + 1):
        random.Random(turn).shuffle(names)  # what ran before leaves its marks in the caches
        for name in names:
            taken = trained.aggregate(trained.aggregators[name])
            if turn:
                seconds[name].append(taken)
    ratios = {name: [a / b for a, b in zip(s, seconds["fedavg"], strict=True)] for name, s in seconds.items()}
    return {
        name: {"seconds": statistics.median(s), "fastest": min(s), "ratio": statistics.median(ratios[name])}
        for name, s in seconds.items()
    }


@contextmanager
def stopwatch(owner: type, *methods: str) -> Iterator[dict[str, list[float]]]:
    """Seconds of every call of some methods of a class."""
    taken: dict[str, list[float]] = {name: [] for name in methods}
    originals = {name: getattr(owner, name) for name in methods}

    def watched(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = originals[name](*args, **options)
            taken[name].append(time.perf_counter() - begun)
            return result

        return call

    for name in methods:
        setattr(owner, name, watched(name))
    try:
        yield taken
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def learned(trained: Trained, server_steps: int, limit: float) -> dict[str, Any]:
    """FedLAW's seconds, in the proxy samples' passes and in the rest."""
    steps_an_epoch = -(-PROXY_SAMPLES // 128)

    def split(epochs: int) -> tuple[float, float, float, float]:
        """Seconds of a step's pass and of its rest, and of what comes once: the passes of the losses, and the rest."""
        with stopwatch(ServerModel, "gradient", "mean_loss") as passes, stopwatch(LearnedWeights, "learn") as learning:
            total = trained.aggregate(trained.fedlaw(epochs))
        (learn,), steps = learning["learn"], epochs * steps_an_epoch
        gradients, losses = sum(passes["gradient"]), sum(passes["mean_loss"])
        return gradients / steps, (learn - gradients) / steps, losses, total - learn - losses

    split(1)  # kernels are chosen in the first passes
    steps = EPOCHS * steps_an_epoch
    timed_steps = -(-server_steps // steps_an_epoch) * steps_an_epoch
    found = split(timed_steps // steps_an_epoch)
    extrapolated = (found[0] + found[1]) * steps > limit
    if not extrapolated:
        timed_steps, found = steps, split(EPOCHS)
    a_pass, a_rest, losses, once = found
    passes, rest = a_pass * steps + losses, a_rest * steps + once
    return {
        "seconds": passes + rest, "passes": passes, "rest": rest, "rest_share": rest / (passes + rest), "pass_a_step": a_pass,
        "rest_a_step": a_rest, "rest_once": once, "steps_timed": timed_steps, "extrapolated": extrapolated,
    }  # fmt: skip


def cost(trained: Trained, method: Aggregator) -> str:
    """Collectives of one aggregation."""
    with stopwatch(HostedCohort, "_sum", "_visit", "compute") as calls:
        trained.aggregate(method)
    count = Counter({"R": len(calls["_sum"]), "V": len(calls["_visit"]), "C": len(calls["compute"])})
    return " ".join(f"{n}{letter}" for letter, n in count.items() if n)


def flat(trained: Trained, repeats: int) -> dict[str, float]:
    """Seconds of matrix products alone, which promise no order of additions: FedAvg's sum; FedLWS's two sums, and the
    clients' products with one of them, to which their distances come down. Block by block, which stays in the cache."""
    rows, weights = trained.cohort.gather(), trained.cohort.by_size().per_client().float()
    both = torch.stack([weights, torch.full_like(weights, 1 / len(weights))])

    def one_sum() -> None:
        for block in rows.split(BLOCK, dim=1):
            weights @ block

    def two_sums_and_products() -> None:
        for block in rows.split(BLOCK, dim=1):
            block @ (both @ block)[1]

    seconds: dict[str, list[float]] = {"fedavg": [], "fedlws": []}
    for _ in range(repeats):
        seconds["fedavg"].append(timed(one_sum))
        seconds["fedlws"].append(timed(two_sums_and_products))
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def show(result: Mapping[str, Any]) -> None:
    model, found, law, flat = (result[key] for key in ("model", "methods", "fedlaw", "flat"))
    fedavg, lws, theirs = found["fedavg"], found["fedlws"], PAPER[model]
    print(f"{model}, {result['parameters']:,} parameters")
    print(f"  FedAvg {fedavg['seconds']:.4f} s (paper {theirs[0]})")
    print(
        f"  FedLWS {lws['seconds']:.4f} s, {lws['ratio']:.2f} x FedAvg (paper {theirs[2]}, {theirs[2] / theirs[0]:.2f} x)"
    )
    if law:
        sign = "~" if law["extrapolated"] else ""
        print(f"  FedLAW {sign}{law['seconds']:.2f} s, of which {100 * law['rest_share']:.1f} % is not the proxy samples' "
              f"passes; {law['steps_timed']} steps timed (paper {theirs[1]})")  # fmt: skip
    others = (f"{name} {r['ratio']:.2f}" for name, r in found.items() if name not in ("fedavg", "fedlws"))
    print(f"  x FedAvg: {', '.join(others)}")
    more = flat["fedlws"] / flat["fedavg"]
    print(f"  bare matrix products: FedAvg {flat['fedavg']:.5f} s, FedLWS {more:.2f} x FedAvg", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=PAPER, default=list(PAPER))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--server-steps", type=int, default=10, help="of FedLAW, where not all are timed; 0: no FedLAW")
    parser.add_argument("--limit", type=float, default=120, help="seconds that FedLAW may take on one model")
    parser.add_argument("--ray", nargs="*", choices=PAPER, default=["simple_cnn", "resnet20", "vit"], metavar="MODEL")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            trained = Trained(model, "local", Path(folder))
            found = in_turns(trained, args.repeats)
            law = learned(trained, args.server_steps, args.limit) if args.server_steps else None
            result = {
                "engine": "local", "model": model, "parameters": trained.server.layers.P, "methods": found, "fedlaw": law,
                "flat": flat(trained, args.repeats),
                "paper": dict(zip(("fedavg", "fedlaw", "fedlws"), PAPER[model], strict=True)),
            }  # fmt: skip
            trained.close()
        show(result)
        results.append(result)
    if args.ray:
        results += through_ray(args.ray, args.repeats)
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    out = folder / f"table3-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps({**manifest("", 0, {}), "results": results}, indent=1) + "\n")
    print(f"written to {out}")


def through_ray(models: list[str], repeats: int) -> list[dict[str, Any]]:
    import ray

    cores = len(os.sched_getaffinity(0))
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    engine = {"ray": {"clients_per_actor": -(-CLIENTS_IN_COHORT // cores)}}
    results = []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            trained = Trained(model, engine, Path(folder))
            found = in_turns(trained, repeats)
            for name, r in found.items():
                r["cost"] = cost(trained, trained.aggregators[name])
            trained.close()
        print(
            f"{model} through Ray, {cores} actors: FedAvg {found['fedavg']['seconds']:.4f} s, {found['fedavg']['cost']}"
        )
        others = (f"{name} {r['ratio']:.2f} ({r['cost']})" for name, r in found.items() if name != "fedavg")
        print(f"  x FedAvg: {', '.join(others)}", flush=True)
        results.append({"engine": "ray", "actors": cores, "model": model, "methods": found})
    ray.shutdown()
    return results


if __name__ == "__main__":
    main()
