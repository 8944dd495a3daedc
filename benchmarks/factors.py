"""How far CCN's factors are from equal, in the runs of one of its tables.

    raysim reproduce ccn/table1 --scale medium --out runs/ccn
    python benchmarks/factors.py ccn/table1 --out runs/ccn

A factor is given as a multiple of its mean, (K − 1)/K: with equal factors all are 1, and none can be more than K/(K − 1). By row,
means over rounds and seeds: the least factor; how many clients have less than 0.9; the share of all weight that CCN moves from
client to client, ½ Σ |λ_k − n_k/n|; the images of the client that loses most, against the mean client's; and for how many rounds on
end that is the same client. Writes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from itertools import groupby
from pathlib import Path

import numpy as np

from raysim.config import ConfigError
from raysim.report.runs import Run
from raysim.store.manifest import manifest
from raysim.sweep.items import find


def factors(run: Run, notes: dict[str, np.ndarray]) -> dict[str, float]:
    """Of a run in which all K clients take part in every round."""
    clients = run.columns("clients")
    K = len(np.unique(clients["client"]))

    def noted(name: str) -> np.ndarray:
        return notes["value"][notes["name"] == name].reshape(-1, K)  # of each round, by client

    samples = clients["samples"][clients["round"] == 0]
    relative, rows = noted("factor") * K / (K - 1), noted("similarity")
    loser = relative.argmin(axis=1)
    return {
        "least": float(relative.min(axis=1).mean()),
        "below 0.9": float((relative < 0.9).sum(axis=1).mean()),
        "moved": float(np.abs(noted("lambda") - samples / samples.sum()).sum(axis=1).mean() / 2),
        "similarity, mean": float(rows.mean() / K),
        "similarity, greatest": float(rows.max(axis=1).mean() / K),
        "loser's images": float(samples[loser].mean() / samples.mean()),
        "rounds on end": float(np.mean([len(list(same)) for _, same in groupby(loser)])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item")
    parser.add_argument("--out", type=Path, required=True, help="where the runs are")
    parser.add_argument("--scale", default="medium")
    args = parser.parse_args()
    found = defaultdict[str, list[dict[str, float]]](list)
    try:
        points = find(args.item).runs(args.scale, (), (), args.out)
    except ConfigError as error:
        parser.error(str(error))
    for cell, point in points.items():
        if point.finished:
            run = Run(point.folder)
            notes = run.columns("notes")
            if "factor" in notes["name"]:
                found[" ".join(cell.row)].append(factors(run, notes))
    if not found:
        parser.error(f"no run with CCN has ended in {args.out}")
    told = {row: {what: float(np.mean([s[what] for s in seeds])) for what in seeds[0]} for row, seeds in found.items()}
    print(f"| | {' | '.join(next(iter(told.values())))} |")
    for row, values in told.items():
        print(f"| {row} | {' | '.join(f'{value:.3f}' for value in values.values())} |")
    result = {
        "command": " ".join(sys.argv), "seeds": {row: len(of) for row, of in found.items()}, "factors": told,
        "machine": manifest("", 0, {}),
    }  # fmt: skip
    name = f"factors-{args.item.replace('/', '-')}-{time.strftime('%Y-%m-%dT%H%M')}.json"
    path = Path(__file__).parent / "results" / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
