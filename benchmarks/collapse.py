"""Whether FedLAW's γ drives the model to zero: of each run, γ by round, their product, and the first round whose proxy loss after
learning is below ln C, that of a model of zeros.

    raysim reproduce fedlaw/table3 --scale medium --only "alpha 0.1" --only FedLAW --seeds 11,12,13,14,15 \\
        --set rounds.total=6 --set local.epochs=5 --out runs/five
    python benchmarks/collapse.py runs/one runs/five

Writes benchmarks/results/collapse-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np

from raysim.report.runs import Run
from raysim.store.manifest import manifest

LN_C = math.log(10)  # CIFAR-10


def look(run: Run) -> dict[str, object]:
    notes = run.columns("notes")
    gamma = notes["name"] == "gamma"  # of every epoch, in order; the last one is what the round takes
    chosen = [float(notes["value"][gamma & (notes["round"] == t)][-1]) for t in np.unique(notes["round"][gamma])]
    losses = notes["value"][notes["name"] == "proxy_loss_after"]
    better = np.flatnonzero(losses < LN_C)
    return {
        "epochs": run.settings["local.epochs"], "seed": run.settings["seed"], "gamma": chosen,
        "product": math.prod(chosen), "first_round_below": int(better[0]) + 1 if len(better) else None,
        "proxy_loss_after": losses.tolist(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    found = [look(Run(path.parent)) for out in args.folders for path in sorted(out.glob("*/result.json"))]
    for one in found:
        print(
            one["epochs"],
            "epochs, seed",
            one["seed"],
            "γ",
            np.round(one["gamma"], 2),
            one["product"],
            one["first_round_below"],
        )
    target = Path(__file__).parent / "results" / f"collapse-{time.strftime('%Y-%m-%dT%H%M')}.json"
    target.write_text(json.dumps({"runs": found, "machine": manifest("", 0, {})}, indent=1) + "\n")
    print(f"written to {target}")


if __name__ == "__main__":
    main()
