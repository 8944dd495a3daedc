"""What the cost model predicts of clusters that nobody has measured: where they stop to scale, and what that hangs on.

ResNet-18, FedAvg, machines with a core or a share of a GPU for each actor, a second of training for each client, links of
10 Gbit/s. The prices are those of the machine on which they were fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from costmodel import PRICES, Prices, Setting, efficiency, parts, seconds

from raysim.report.canvas import INK, colour, dash, decades

RESNET = 11_173_962  # floats of a ResNet-18 for ten classes
ACTORS, GPUS = 8, 8  # on a machine: actors on its CPUs; GPUs, with four actors each
TRAINING = 1.0  # seconds that a client trains on its actor
COHORTS = {"10⁴ of 10⁶ clients": 10**4, "all of 10⁶ clients": 10**6}
COUNTS = np.unique(np.geomspace(1, 1000, 37).round().astype(int)).tolist()  # of machines
FREE = [name for name in PRICES if name != "waiting"]  # what could cost less


def ahead(machines: int, cohort: int, actors: int = ACTORS) -> Setting:
    """A cluster as nobody has measured it here: machines with `actors` each, a core or GPU share for each of them, links of
    10 Gbit/s."""
    return Setting(
        actors * machines, cohort, RESNET, TRAINING, nodes=machines, link=10e9 / 8, hop=machines > 1
    )  # fmt: skip


def limits(prices: Prices) -> dict[str, dict[str, Any]]:
    """For each of COHORTS: up to how many machines actors train for half of their time, also if something cost nothing, and where
    rounds are fastest."""

    def half(cohort: int, prices: Prices) -> int:
        return max((n for n in COUNTS if efficiency(ahead(n, cohort), prices) >= 0.5), default=0)

    found = {}
    for name, cohort in COHORTS.items():
        spent = [seconds(ahead(n, cohort), prices) for n in COUNTS]
        found[name] = {
            "half": half(cohort, prices), "fastest": COUNTS[int(np.argmin(spent))], "seconds": min(spent),
            "half_without": {free: half(cohort, {**prices, free: 0.0}) for free in FREE},
            "seconds_of_the_most_machines": parts(ahead(COUNTS[-1], cohort), prices),
        }  # fmt: skip
    return found


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    for name, limit in found.items():
        moved = ", ".join(f"{k}: {n}" for k, n in limit["half_without"].items() if n > limit["half"])
        print(f"PREDICTION, {name}: actors train half of the time up to {limit['half']} machines of {ACTORS}; "
              f"rounds are fastest with {limit['fastest']} ({limit['seconds']:.1f} s).\n"
              f"  Half of the time, if this cost nothing: {moved}")  # fmt: skip


def draw_machines(axes: Any, prices: Prices) -> None:
    name, cohort = next(iter(COHORTS.items()))
    rows = [parts(ahead(n, cohort), prices) for n in COUNTS]
    axes.plot(COUNTS, [sum(row.values()) for row in rows], color=INK, linewidth=2, label="round")
    axes.plot(COUNTS, [row["waiting"] for row in rows], color=colour(0), linestyle=(0, dash(1)), label="training")
    others = sorted(FREE, key=lambda price: -rows[-1][price])[:4]
    for i, price in enumerate(others, 1):
        axes.plot(COUNTS, [row[price] for row in rows], color=colour(i), linestyle=(0, dash(i)), label=price)
    axes.set(xscale="log", yscale="log", xlabel=f"machines of {ACTORS} actors", ylabel="seconds", ylim=(1e-2, None))
    decades(axes.xaxis)
    decades(axes.yaxis)
    axes.legend(ncols=2)
    axes.set_title(f"PREDICTION: ResNet-18, {name}", loc="left")


def draw_gpus(axes: Any, prices: Prices) -> None:
    counts = [1, 2, 4, 8, 16, 32, 64]
    for i, cohort in enumerate((256, 1_000, 10_000, 1_000_000)):
        shares = []
        for gpus in counts:
            machines = -(-gpus // GPUS)
            setting = replace(ahead(machines, cohort, 4 * min(gpus, GPUS)), hosts=4 * gpus)
            shares.append(100 * efficiency(setting, prices))
        axes.plot(counts, shares, color=colour(i), linestyle=(0, dash(i)), label=f"{cohort:,} clients a round")
    axes.set(xscale="log", xlabel="GPUs of 4 actors", ylabel="actors' time in clients (%)", ylim=(0, 105))
    decades(axes.xaxis)
    axes.legend()
    axes.set_title("PREDICTION: ResNet-18, 1 s a client", loc="left")
