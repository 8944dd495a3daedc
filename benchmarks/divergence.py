"""Whom FedLDF chooses, and how far the models go that come of it, in the runs of one of its tables.

    raysim reproduce fedldf/figure3 --scale medium --out runs/fedldf
    python benchmarks/divergence.py fedldf/figure3 --out runs/fedldf

By layer: how much more the chosen clients' have changed than the round's mean client's; how often the client is chosen that is
chosen most, against an equal share, and in which share of its rounds; how many clients never are; how often a client is chosen,
correlated with its images and with the share of its largest class; how many of the round's choices are those of the round before,
of clients that took part in both. And each method's step of the model, ‖w_g(t+1) − w_g(t)‖, root mean square over the rounds, and
by how many points its accuracy changes from one evaluation to the next. Means over the seeds, and each seed. Writes to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from raysim.config import ConfigError
from raysim.report.runs import Run
from raysim.store.manifest import manifest
from raysim.sweep.items import find


def steps(run: Run) -> dict[str, float]:
    """By layer, and of the whole model; and how much the accuracy jumps, in points."""
    layers = run.columns("layers")
    by_layer = {name: layers["update_norm"][layers["name"] == name] for name in dict.fromkeys(layers["name"])}
    by_layer["model"] = np.sqrt(sum(norms**2 for norms in by_layer.values()))
    accuracy = run.columns("rounds")["accuracy"]
    jumps = np.abs(np.diff(100 * accuracy[~np.isnan(accuracy)])).mean()
    return {name: float(np.sqrt(np.mean(norms**2))) for name, norms in by_layer.items()} | {"jumps": float(jumps)}


def holdings(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Each client's training samples [N], and the share of its largest class [N]."""
    held = run.columns("partition")
    train = held["split"] == "train"
    counts = np.zeros((held["client"].max() + 1, held["label"].max() + 1))
    np.add.at(counts, (held["client"][train], held["label"][train]), 1)
    return counts.sum(1), counts.max(1) / counts.sum(1)


def choices(run: Run) -> dict[str, dict[str, float]]:
    """By layer, from what FedLDF notes: each client's divergence, and whether it was chosen."""
    notes, found = run.columns("notes"), {}
    images, largest = holdings(run)
    of = {name: notes["name"] == name for name in ("divergence", "uploads")}
    for layer in dict.fromkeys(notes["layer"][of["uploads"]]):
        here = notes["layer"] == layer
        t, client = (notes[key][of["uploads"] & here] for key in ("round", "client"))
        chosen = notes["value"][of["uploads"] & here] > 0
        size, K = notes["value"][of["divergence"] & here], np.bincount(t)[0]
        size, chosen, client = size.reshape(-1, K), chosen.reshape(-1, K), client.reshape(-1, K)
        drawn = np.bincount(client.ravel(), minlength=len(images))
        there = drawn > 0
        times = np.bincount(client[chosen], minlength=len(images))[there] / drawn[there]  # of its rounds
        again = [
            np.isin(now[is_now], then[was_then]).sum() / np.isin(now[is_now], then).sum()
            for now, is_now, then, was_then in zip(client[1:], chosen[1:], client, chosen, strict=False)
            if np.isin(now[is_now], then).any()
        ]
        found[layer] = {
            "chosen / mean": float(np.mean([s[c].mean() / s.mean() for s, c in zip(size, chosen, strict=True)])),
            "most chosen": float(times.max() / chosen.mean()),
            "of its rounds": float(times.max()),
            "never chosen": float((times == 0).sum()),
            "chosen again": float(np.mean(again)),
        }
        for name, held in (("images", images[there]), ("largest class", largest[there])):
            if np.ptp(held):  # with clients that all have as many images nothing correlates
                found[layer][f"with {name}"] = float(np.corrcoef(times, held)[0, 1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item")
    parser.add_argument("--out", type=Path, required=True, help="where the runs are")
    parser.add_argument("--scale", default="medium")
    parser.add_argument("--set", action="append", default=[], help="with which the runs were run")
    args = parser.parse_args()
    went, chose = defaultdict[str, list[dict[str, float]]](list), list[dict[str, dict[str, float]]]()
    try:
        points = find(args.item).runs(args.scale, (), args.set, args.out)
    except ConfigError as error:
        parser.error(str(error))
    for cell, point in points.items():
        if point.finished:
            row, run = " ".join(cell.row), Run(point.folder)
            went[row].append(steps(run))
            chose += [choices(run)] if row == "FedLDF" else []
    if not chose:
        parser.error(f"no run of FedLDF has ended in {args.out}")
    told = {
        "steps": {row: {name: float(np.mean([s[name] for s in seeds])) for name in seeds[0]} for row, seeds in went.items()},
        "choices": {
            layer: {what: float(np.mean([c[layer][what] for c in chose])) for what in values}
            for layer, values in chose[0].items()
        },
    }  # fmt: skip
    for part in told.values():
        first = next(iter(part.values()))
        print(f"| | {' | '.join(first)} |\n|{'-|' * (1 + len(first))}")
        for name, values in part.items():
            print(f"| {name} | {' | '.join(f'{value:.3f}' for value in values.values())} |")
        print()
    told |= {
        "command": " ".join(sys.argv), "steps of each seed": went, "choices of each seed": chose, "machine": manifest("", 0, {}),
    }  # fmt: skip
    name = f"divergence-{args.item.replace('/', '-')}-{time.strftime('%Y-%m-%dT%H%M')}.json"
    path = Path(__file__).parent / "results" / name
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
