"""The learning rate that a table's comparison takes: its baseline's best, on a seed that the comparison does not use.

    python benchmarks/tuning.py fedlws/table1 --rates 0.01 0.02 0.04 0.08 --out runs/tuning

The table's first row, or the one that --only names, runs 40 rounds of its medium scale with each rate, in every column; what
counts is the mean of the last ten evaluations, or the best one (--score best), and its mean over the columns
(docs/papers/protocol.md). A rate is out with which a run fails, as where a client's model is not finite. Writes to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from raysim.config import ConfigError
from raysim.report.runs import Run
from raysim.report.summary import judged_by
from raysim.store.manifest import manifest
from raysim.sweep.items import find
from raysim.sweep.running import run_all
from raysim.sweep.scores import scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item")
    parser.add_argument("--rates", type=float, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True, help="where the runs are, or are to be")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--score", choices=["last10", "best"], default="last10")
    parser.add_argument("--set", action="append", default=[], help="what the comparison sets as well")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="another row, or some columns")
    args = parser.parse_args()
    ran = {}
    for rate in args.rates:
        changes = [*args.set, f"rounds.total={args.rounds}", f"local.lr={rate}"]
        try:
            cells = find(args.item).runs(
                "medium", [args.seed], changes, args.out / args.item / f"lr{rate:g}", args.only
            )
        except ConfigError as error:
            parser.error(str(error))
        baseline = next(iter(cells)).row
        ran[rate] = {" ".join(cell.column): point for cell, point in cells.items() if cell.row == baseline}
    status = run_all([point for points in ran.values() for point in points.values()], at_once=args.parallel)
    if status > 1:  # stopped
        sys.exit(status)
    runs = {point.folder: Run(point.folder) for points in ran.values() for point in points.values() if point.finished}
    by = judged_by([*runs.values()])
    ended = {folder: scored(run, by, args.score) for folder, run in runs.items()}
    scores = {
        rate: {column: ended.get(point.folder) for column, point in points.items()} for rate, points in ran.items()
    }
    means = {}
    for rate, by_column in scores.items():
        known = [value for value in by_column.values() if value is not None]
        if len(known) == len(by_column):
            means[rate] = statistics.mean(known)
        print(f"lr {rate:g}: {by_column}, mean {means.get(rate)}")
    if not means:
        sys.exit("with no rate all runs have ended")
    best = max(means, key=means.__getitem__)
    print(f"best: {best:g}")
    result = {
        "command": " ".join(sys.argv), "item": args.item, "seed": args.seed, "rounds": args.rounds, "best": best,
        args.score: [{"lr": rate, **by_column} for rate, by_column in scores.items()], "machine": manifest("", 0, {}),
    }  # fmt: skip
    name = f"tuning-{args.item.replace('/', '-')}-{time.strftime('%Y-%m-%dT%H%M')}.json"
    target = Path(__file__).parent / "results" / name
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {target}")


if __name__ == "__main__":
    main()
