"""Whether a paper's claim shows in the runs of one of its tables: differences between rows, seed by seed, with 95 % intervals.

    raysim reproduce fedlws/table1 --scale medium --parallel 2 --out runs/fedlws
    python benchmarks/claims.py fedlws/table1 --out runs/fedlws --pair "FedProx + LWS" FedProx
    python benchmarks/claims.py --out runs/sweep --pair fedlaw no-weighting     # of a sweep, by its folders' names
    python benchmarks/claims.py --out runs/sweep --with benchmarks/results/EARLIER.json --pair fedlaw fedavg

A row named by --pair is held against another, or several, and all else against the first that is not so named. The
interval is that of a paired t test (docs/papers/protocol.md). Writes the table, the differences, every seed's number and
the settings to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import ttest_rel

from raysim.config import ConfigError
from raysim.report.runs import Run
from raysim.report.summary import OverSeeds
from raysim.store.manifest import manifest
from raysim.sweep.grid import Point
from raysim.sweep.items import Cell, Item, find
from raysim.sweep.scores import SCORES
from raysim.sweep.text import paper_tables, table_text

Scores = dict[str, dict[str, dict[int, float]]]  # by heading, row and seed


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> dict[str, Any]:
    """Of the seeds that both have: each difference, their mean, and the 95 % interval of that."""
    seeds = sorted(a.keys() & b.keys())
    found = [a[seed] - b[seed] for seed in seeds]
    interval = None  # of one seed's difference nothing is known
    if len(seeds) > 1:
        test = ttest_rel([a[seed] for seed in seeds], [b[seed] for seed in seeds])
        interval = [float(end) for end in test.confidence_interval(0.95)]
    return {"differences": found, "mean": statistics.mean(found), "interval": interval}


def of_table(item: Item, points: Mapping[Cell, Point], scale: str) -> Scores:
    """What a reproduced table says."""
    return {
        " ".join(filter(None, (paper_table.title, column.heading))): {
            row: {seed: score for seed, score in entry.by_seed.items() if math.isfinite(score)}
            for row, entry in zip(paper_table.rows, column.entries, strict=True)
        }
        for paper_table in paper_tables(item, points, scale)
        for column in paper_table.columns
    }


def of_results(results: Mapping[str, Mapping[str, Any]]) -> tuple[str, Scores]:
    """What runs came to, by the names of their folders, ROW-seedN: as a table, and as numbers. Personal models count where every
    run has tested them, as in `raysim report`."""
    personal, scores = all(result.get("personal") for result in results.values()), Scores()
    for folder, result in results.items():
        row, _, seed = folder.rpartition("-seed")
        for name in ("last10", "final", "best"):
            if (score := (result["personal"] if personal else result)[name]) is not None:
                scores.setdefault(SCORES[name][1], {}).setdefault(row, {})[int(seed)] = 100 * score
    lines = ["What all runs share stands beside this file, in the .json, as “settings of all runs”.", ""]
    lines += ["| | " + " | ".join(scores) + " |", "|-" * (len(scores) + 1) + "|"]
    for row in dict.fromkeys(row for of_row in scores.values() for row in of_row):
        said = [OverSeeds.of([*of_row.get(row, {}).values()]).show(2) for of_row in scores.values()]
        lines.append(f"| {row} | {' | '.join(said)} |")
    return "\n".join(lines), scores


def compared(by_row: Mapping[str, Mapping[int, float]], against: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Each row with those that it is held against, where both have a seed in common: others have not run yet, or lack this
    score."""
    first = [row for row in by_row if row not in against][:1]
    pairs = [(row, other) for row in by_row for other in against.get(row, first) if row != other]
    return [(row, other) for row, other in pairs if by_row[row].keys() & by_row.get(other, {}).keys()]


def shared_settings(folders: Sequence[Path]) -> dict[str, Any]:
    """Those that have the same value in all runs, by their paths."""
    first, *others = (Run(folder).settings for folder in folders)
    return {path: value for path, value in first.items() if all((path, value) in other.items() for other in others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", nargs="?", help="a table; without, --out is a sweep")
    parser.add_argument("--out", type=Path, required=True, help="where the runs are")
    parser.add_argument("--scale", default="medium")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("ROW", "AGAINST"))
    parser.add_argument("--set", action="append", default=[], help="with which the runs were run")
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument(
        "--with", dest="earlier", type=Path, nargs="*", default=[], help="result files whose runs join a sweep's"
    )
    args = parser.parse_args()
    if args.item and args.earlier:
        parser.error("--with joins runs to those of a sweep; leave the table out, and give the sweep's folder as --out")
    earlier = {name: one for file in args.earlier for name, one in json.loads(file.read_text())["results"].items()}
    if args.item:
        try:
            item = find(args.item)
            points = item.runs(args.scale, args.seeds, args.set, args.out)
        except ConfigError as error:
            parser.error(str(error))
        table, scores = table_text(item, points, args.scale, args.set), of_table(item, points, args.scale)
        folders, planned = [point.folder for point in points.values() if point.finished], len(points)
    else:
        folders = sorted(path.parent for path in args.out.glob("*-seed*/result.json"))
        planned = len({*args.out.glob("*-seed*/config.yaml")})
    if not folders:
        parser.error(f"no run has ended in {args.out}")
    results = {folder.name: json.loads((folder / "result.json").read_text()) for folder in folders}
    if not args.item:
        table, scores = of_results(earlier | results)
    against: dict[str, list[str]] = {}
    for row, other in args.pair:
        against.setdefault(row, []).append(other)
    found, rows = [], {row for of_row in scores.values() for row in of_row}
    for row in {*itertools.chain(*args.pair)} - rows:
        parser.error(f"--pair: there is no row {row!r}. There are {', '.join(sorted(rows))}.")
    lines = [table, "", "| | against | score | difference | 95 % interval |", "|-|-|-|-|-|"]
    for heading, by_row in scores.items():
        for row, other in compared(by_row, against):
            of = difference(by_row[row], by_row[other])
            found.append({"row": row, "against": other, "score": heading, **of})
            interval = " to ".join(f"{end:+.2f}" for end in of["interval"] or ()) or "one seed"
            lines.append(f"| {row} | {other} | {heading} | {of['mean']:+.2f} | {interval} |")
    text = "\n".join(lines)
    print(text)
    name = f"claims-{(args.item or args.out.name).replace('/', '-')}-{time.strftime('%Y-%m-%dT%H%M')}"
    stem = Path(__file__).parent / "results" / name
    told = {
        "command": shlex.join(sys.argv), "runs": f"{len(folders)} of {planned}", "pairs": found,
        "settings of all runs": shared_settings(folders),
        "results": results,
        "machine": manifest("", 0, {}),
    }  # fmt: skip
    stem.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    print(f"written to {stem}.json and .md")


if __name__ == "__main__":
    main()
