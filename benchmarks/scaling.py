"""Seconds a round against hosts, clients, participation, model size, fan-in and machines, and what a cost model makes of them.

    python benchmarks/scaling.py [--rounds 9] [--without-machines] [--from benchmarks/results/scaling-....json]

Where clients wait for a fixed time instead of training, as for a device of their own, many hosts scale on few cores, and what
is measured is all the rest of a round. Clients that train are measured on as many hosts as there are cores; with more, a
point shows overhead only. Machines are network namespaces (`machines.py`, needs root) with links of a fixed rate, slow
enough for two cores. Rounds in which a virtual machine's host took the cores away are left out. The prices of the cost model
(`costmodel.py`) are fitted to some of the points and have to predict the others.

A result and a figure are written to benchmarks/results/; --from draws those of an earlier run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import outlook
import psutil
import torch
from costmodel import FLOAT, PHASES, PRICES, Prices, Setting, efficiency, fit, paid_for, parts
from machines import Machines, missing
from quiet import undisturbed
from ray import cloudpickle

os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would make actors yield to everybody else

from raysim.config import Config, from_dict
from raysim.core.client import ClientMethod, LocalRun
from raysim.core.local_run import RoundInfo
from raysim.engine.ray.engine import ray_engine
from raysim.engine.ray.placement import Resources
from raysim.engine.ray.pool import Pool
from raysim.federation import Federation
from raysim.host.messages import SumRequest, TrainRequest
from raysim.methods import CLIENTS
from raysim.report.canvas import PAGE, SHADED, Canvas, colour, dash, decades, styled
from raysim.store import tables
from raysim.store.manifest import manifest

CORES = len(os.sched_getaffinity(0))
WARM_UP = 3  # rounds
LINK = 400e6 / 8  # bytes a second between machines
MACHINES, SLOTS = 4, 16
GOAL = 0.15  # greatest relative error of a held-out round


@dataclass(frozen=True)
class Waiting(ClientMethod):
    """A client that returns what it got, after a while."""

    seconds: float

    def train(self, run: LocalRun) -> None:
        time.sleep(self.seconds)


CLIENTS["waiting"] = Waiting


@dataclass(frozen=True)
class Point:
    """What is measured."""

    hosts: int
    cohort: int
    clients: int = 0  # in the federation; 0: the cohort
    width: int = 64  # of the perceptron's one hidden layer; each unit has 21 floats
    waits: float = 0.02  # seconds; 0: the client trains
    fan_in: int = 4
    nodes: int = 1
    held_out: bool = False  # from the fit

    @property
    def samples(self) -> int:
        """That each client trains on."""
        return 0 if self.waits else 100

    def configuration(self) -> Config:
        clients = self.clients or self.cohort
        images = {"samples": clients * max(1, self.samples), "test_samples": 4, "shape": [1, 4, 4], "classes": 4}
        return from_dict(
            {
                "name": "scaling",
                "data": {"name": {"synthetic": images}, "partition": {"iid_equal": {"clients": clients}}},
                "model": {"name": "mlp", "options": {"hidden": [self.width]}},
                "rounds": {
                    "total": 10_000, "participation": self.cohort / clients, "evaluate_every": 10_000,
                    "checkpoint_every": 10_000,
                },
                "local": {"batch_size": 10, "lr": 0.01},
                "client": [{"waiting": {"seconds": self.waits}}] if self.waits else [],
                "evaluate": {"global": False},
                "engine": {
                    "ray": {
                        "clients_per_actor": -(-self.cohort // self.hosts), "fan_in": self.fan_in, "gpu_per_client": 0
                    }
                },
            }
        )  # fmt: skip


S, M, L = 64, 4_000, 200_000  # widths: 1,348, 84 thousand and 4.2 million floats
STRONG = [Point(hosts, 64, held_out=hosts in (4, 16)) for hosts in (1, 2, 4, 8, 16)]
WEAK = [Point(hosts, 8 * hosts, width=M, held_out=hosts in (2, 8)) for hosts in (1, 2, 4, 8, 16)]
POINTS = [
    *STRONG,
    *WEAK,
    # Clients in a round, of as many or more.
    *(Point(2, cohort, waits=0.002, held_out=cohort == 512) for cohort in (256, 512, 1024)),
    *(Point(16, cohort, held_out=cohort == 512) for cohort in (256, 512, 1024)),
    Point(16, 256, 1_000),
    Point(16, 256, 100_000, held_out=True),
    # The model's size, and the fan-in of the tree.
    *(Point(4, 8, width=width, waits=0.1, held_out=width == L // 4) for width in (S, L // 10, L // 4, L // 2, L)),
    *(Point(16, 16, width=L // 4, waits=0.1, fan_in=fan_in, held_out=fan_in == 4) for fan_in in (2, 4, 16)),
    Point(2, 32, width=L // 2),
    # Clients that train; on more hosts than cores they only show what that costs.
    *(Point(hosts, 16, width=M, waits=0) for hosts in (1, 2)),
    *(Point(hosts, 24, width=M, waits=0, held_out=True) for hosts in (1, 2, 4)),
]
SPREAD = [  # over machines
    *(Point(nodes, 8, width=L // 2, nodes=nodes, held_out=nodes == 3) for nodes in (1, 2, 3, 4)),
    Point(4, 8, width=L // 4, nodes=4, held_out=True),
    Point(4, 8, width=L // 4, nodes=4, fan_in=2),
    Point(8, 16, width=L // 4, nodes=4, held_out=True),
]


def simulate(points: Sequence[Point], rounds: int) -> list[dict[str, Any]]:
    """Measure points on the cluster that this process is connected to."""
    import ray

    from raysim.engine.ray.cluster import free_resources

    torch.set_num_threads(1)
    here, pool, results = ray.get_runtime_context().get_node_id(), Pool(), []
    for point in points:
        free = sorted(pool.free(free_resources()).nodes, key=lambda node: node.id != here)
        engine = partial(ray_engine, resources=Resources(tuple(free[: point.nodes])), pool=pool)
        with tempfile.TemporaryDirectory() as folder:
            federation = Federation(point.configuration(), Path(folder), make_engine=engine)
            for _ in range(WARM_UP):
                federation.step()
            sent = -_sent()
            turns = undisturbed(federation.step, rounds)
            sent += _sent()
            floats, nodes = federation.server.layers.S, federation.engine.nodes
            federation.close()
            spent = {phase: seconds[turns.kept] for phase, seconds in clock(Path(folder)).items()}
        setting = Setting(
            len(nodes), point.cohort, floats, point.waits, point.samples, point.fan_in, point.nodes, CORES, LINK,
            hop=nodes[0] != here,
        )  # fmt: skip
        phases = {phase: float(np.median(spent[phase])) for phase in PHASES}
        quartiles = np.percentile(spent["whole"], [25, 50, 75]).tolist()
        results.append(
            {
                "point": asdict(point), "setting": asdict(setting), "quartiles": quartiles, "seconds": phases,
                "models_sent_by_the_driver": sent / len(turns.stolen) / (FLOAT * floats) if point.nodes > 1 else 0,
                **turns.recorded(),
            }
        )  # fmt: skip
        shown = ", ".join(f"{phase} {1e3 * spent:.1f}" for phase, spent in phases.items())
        print(f"{point}: {shown} ms", file=sys.stderr, flush=True)
    pool.clear()
    return results


def clock(folder: Path) -> dict[str, np.ndarray]:
    """Seconds of every round of a run after the first ones, by phase of the cost model."""
    rounds, spans = tables.read(folder, "rounds"), tables.read(folder, "timeline").to_pylist()
    longest = np.zeros(len(rounds))
    for span in spans:
        if span["phase"] == "train":
            longest[span["round"]] = max(longest[span["round"]], span["stop"] - span["start"])
    whole, train, reduce = (rounds[name].to_numpy() for name in ("seconds", "seconds_train", "seconds_reduce"))
    found = {
        "whole": whole, "hosts": longest, "train": train - longest, "reduce": reduce, "rest": whole - train - reduce
    }  # fmt: skip
    return {name: values[WARM_UP:] for name, values in found.items()}


def serialised_plan() -> float:
    """Seconds to serialise a request that tells a host of the whole plan, for each of its clients. Rounds as small as those that
    can be measured here hardly show it."""
    clients = 100_000
    plan = SumRequest({3 * i: i for i in range(clients)}, [(0, 1, np.ones(clients))], [1.0], [1.0], planned_early=True)
    request = TrainRequest(RoundInfo(0, 0, 1, clients, 0.1, clients), (0,), early_plan=plan)
    spent = []
    for _ in range(9):
        began = time.perf_counter()
        cloudpickle.dumps(request)
        spent.append(time.perf_counter() - began)
    return min(spent) / clients


def _sent() -> int:
    """Bytes that this machine has sent to others."""
    return sum(card.bytes_sent for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo")


def on_this_machine(rounds: int) -> list[dict[str, Any]]:
    import ray

    ray.init(
        address="local", num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=2 << 30,
    )  # fmt: skip
    results = simulate(POINTS, rounds)
    ray.shutdown()
    return results


def play_at(address: str, rounds: int, out: Path) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    out.write_text(json.dumps(simulate(SPREAD, rounds)))
    ray.shutdown()


def on_machines(rounds: int) -> list[dict[str, Any]]:
    """The points over machines, ran on the first one."""
    rates = dict.fromkeys(range(MACHINES), f"{8 * LINK:.0f}bit")
    with Machines(MACHINES, cpus=2, rates=rates) as machines, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        ran = ["--address", machines.address, "--rounds", str(rounds), "--out", str(out)]
        machines.run(0, "python", __file__, *ran)
        return json.loads(out.read_text())


# ---- what follows from the measurements ------------------------------------------------------------------------------


def setting_of(result: Mapping[str, Any]) -> Setting:
    return Setting(**result["setting"])


def measured(result: Mapping[str, Any]) -> float:
    """Seconds a round."""
    return float(result["quartiles"][1])


def explain(results: Sequence[dict[str, Any]], known: Prices) -> dict[str, Any]:
    """Fit the prices, hold them against the other points, and look ahead."""
    fitted = [r for r in results if not r["point"]["held_out"]]
    prices = fit([setting_of(r) for r in fitted], [r["seconds"] for r in fitted], known)
    for r in results:
        r["predicted"] = parts(setting_of(r), prices)
        r["predicted_phases"] = {phase: sum(paid.values()) for phase, paid in paid_for(setting_of(r), prices).items()}
        r["error"] = sum(r["predicted"].values()) / measured(r) - 1
    errors = [abs(r["error"]) for r in results if r["point"]["held_out"]]
    told = {"prices": prices, "held_out": {"worst": max(errors), "median": float(np.median(errors)), "goal": GOAL}}
    return told | {"outlook": outlook.limits(prices)}


def show(results: Sequence[dict[str, Any]], told: Mapping[str, Any]) -> None:
    print(f"{'hosts':>5}{'nodes':>6}{'cohort':>8}{'clients':>8}{'floats':>11}{'fan-in':>7}"
          f"{'ms':>9}{'told':>9}{'of these waiting':>18}{'error':>8}")  # fmt: skip
    for r in results:
        s, point, told_ms = r["setting"], r["point"], {name: 1e3 * spent for name, spent in r["predicted"].items()}
        print(f"{s['hosts']:5}{s['nodes']:6}{s['cohort']:8}{point['clients'] or s['cohort']:8}{s['floats']:11,}{s['fan_in']:7}"
              f"{1e3 * measured(r):9.1f}{sum(told_ms.values()):9.1f}{told_ms['waiting']:18.1f}{r['error']:8.0%}"
              f"{'   held out' if point['held_out'] else ''}")  # fmt: skip
    print("\nseconds")
    for name, about in [*PRICES.items()][1:]:
        print(f"{told['prices'][name]:12.3g}  {about}")
    held = told["held_out"]
    print(f"\nheld-out rounds: worst error {held['worst']:.0%}, median {held['median']:.0%} (goal: {GOAL:.0%})")
    for name, points in (("strong", STRONG), ("weak", WEAK)):
        spent = [measured(r) for p in points for r in results if r["point"] == asdict(p)]
        if len(spent) == len(points):
            work = [1 if name == "weak" else p.hosts for p in points]
            shares = (f"{p.hosts}: {spent[0] / (n * s):.0%}" for p, n, s in zip(points, work, spent, strict=True))
            print(f"{name} scaling, hosts and efficiency: {', '.join(shares)}")
    sent = {r["point"]["nodes"]: r["models_sent_by_the_driver"] for r in results if r["point"]["nodes"] > 1}
    print("models that the driver's machine sends a round, by machines:", {n: round(x, 2) for n, x in sent.items()})
    outlook.show(told["outlook"])


def draw(results: Sequence[dict[str, Any]], prices: Prices, path: Path) -> None:
    with styled():
        figure = Canvas(PAGE, 5.2)
        (fits, scales), (cluster, gpus) = figure.subplots(2, 2)
        _fits(fits, results)
        _scales(scales, results, prices)
        outlook.draw_machines(cluster, prices)
        outlook.draw_gpus(gpus, prices)
    figure.save(path)


def _fits(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    for held, label in ((False, "fitted"), (True, "held out")):
        chosen = [r for r in results if r["point"]["held_out"] == held]
        x, y = [measured(r) for r in chosen], [sum(r["predicted"].values()) for r in chosen]
        axes.plot(x, y, "o", color=colour(held), markerfacecolor=colour(held) if held else "none", label=label)
    ends = np.array([0.8 * min(map(measured, results)), 1.25 * max(map(measured, results))])
    axes.fill_between(ends, ends * (1 - GOAL), ends * (1 + GOAL), color=SHADED, label=f"±{GOAL:.0%}", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="measured (s a round)", ylabel="cost model (s a round)")
    decades(axes.xaxis)
    decades(axes.yaxis)
    axes.legend()
    axes.set_title("Measured on one machine", loc="left")


def _scales(axes: Any, results: Sequence[dict[str, Any]], prices: Prices) -> None:
    by_point = {json.dumps(r["point"]): r for r in results}
    for i, (name, points) in enumerate((("64 clients", STRONG), ("8 clients a host", WEAK))):
        found = [by_point.get(json.dumps(asdict(p))) for p in points]
        rows = [r for r in found if r]
        hosts = [r["setting"]["hosts"] for r in rows]
        ideal = [r["setting"]["waits"] * r["setting"]["cohort"] / n for r, n in zip(rows, hosts, strict=True)]
        axes.plot(hosts, [100 * t / measured(r) for t, r in zip(ideal, rows, strict=True)], "o", color=colour(i))
        told = [100 * efficiency(setting_of(r), prices) for r in rows]
        axes.plot(hosts, told, color=colour(i), linestyle=(0, dash(i)), label=name)
    axes.set(xscale="log", xlabel="actors", ylabel="actors' time in clients (%)", ylim=(0, 105))
    decades(axes.xaxis)
    axes.legend()
    axes.set_title("Measured (dots) and cost model (lines)", loc="left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--without-machines", action="store_true")
    parser.add_argument("--from", dest="earlier", type=Path, help="a result to fit and draw again")
    parser.add_argument("--address", help=argparse.SUPPRESS)  # run the points over machines of this cluster
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.address:
        play_at(args.address, args.rounds, args.out)
        return
    if args.earlier:
        stem, found = args.earlier.with_suffix(""), json.loads(args.earlier.read_text())
    else:
        stem = Path(__file__).parent / "results" / f"scaling-{time.strftime('%Y-%m-%dT%H%M')}"
        found = {
            **manifest("", 0, {}),
            "command": " ".join(sys.argv),
            "known": {"waiting": 1.0, "plan": serialised_plan()},
        }
        found["results"] = on_this_machine(args.rounds)
        stem.with_suffix(".json").write_text(json.dumps(found))  # should machines fail
        if why := "--without-machines" if args.without_machines else missing():
            print(f"no points over machines, so that a link is taken to give its full rate: {why}")
            found["known"]["wire"] = 1.0
        else:
            found["results"] += on_machines(args.rounds)
    told = explain(found["results"], found["known"])
    show(found["results"], told)
    stem.with_suffix(".json").write_text(json.dumps(found | told, indent=1) + "\n")
    draw(found["results"], told["prices"], stem.with_suffix(".png"))
    print(f"written to {stem}.json and .png")


if __name__ == "__main__":
    main()
