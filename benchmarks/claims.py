"""Whether a paper's claim shows in the runs of one of its tables: differences between rows, seed by seed, with 95 % intervals.

    raysim reproduce fedlws/table1 --scale medium --parallel 2 --out runs/fedlws
    python benchmarks/claims.py fedlws/table1 --out runs/fedlws --pair "FedProx + LWS" FedProx

Each row is held against the first one, those named by --pair against another, or several. The interval is that of a paired t test
(docs/papers/protocol.md). Writes the table, the differences and every seed's number to benchmarks/results/.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scipy.stats import ttest_rel

from raysim.config import ConfigError
from raysim.store.manifest import manifest
from raysim.sweep.items import find
from raysim.sweep.text import sheets, table_text


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> dict[str, Any]:
    """Of the seeds that both have: each difference, their mean, and the 95 % interval of that."""
    seeds = sorted(a.keys() & b.keys())
    found = [a[seed] - b[seed] for seed in seeds]
    interval = None  # of one seed's difference nothing is known
    if len(seeds) > 1:
        test = ttest_rel([a[seed] for seed in seeds], [b[seed] for seed in seeds])
        interval = [float(end) for end in test.confidence_interval(0.95)]
    return {"differences": found, "mean": statistics.mean(found), "interval": interval}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item")
    parser.add_argument("--out", type=Path, required=True, help="where the runs are")
    parser.add_argument("--scale", default="medium")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("ROW", "AGAINST"))
    parser.add_argument("--set", action="append", default=[], help="with which the runs were played")
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    args = parser.parse_args()
    try:
        item = find(args.item)
        points = item.runs(args.scale, args.seeds, args.set, args.out)
    except ConfigError as error:
        parser.error(str(error))
    finished = [point for point in points.values() if point.finished]
    if not finished:
        parser.error(f"no run of {args.item} has ended in {args.out}")
    against: dict[str, list[str]] = {}
    for row, other in args.pair:
        against.setdefault(row, []).append(other)
    found, rows = [], {" ".join(cell.row) for cell in points}
    for row in {*itertools.chain(*args.pair)} - rows:
        parser.error(f"--pair: there is no row {row!r}. There are {', '.join(sorted(rows))}.")
    lines = [
        table_text(item, points, args.scale, args.set),
        "",
        "| | against | score | difference | 95 % interval |",
        "|-|-|-|-|-|",
    ]
    for sheet in sheets(item, points, args.scale):
        for column in sheet.columns:
            scores = {
                row: {seed: score for seed, score in entry.by_seed.items() if math.isfinite(score)}
                for row, entry in zip(sheet.rows, column.entries, strict=True)
            }
            pairs = [(row, other) for row in sheet.rows[1:] for other in against.get(row, sheet.rows[:1])]
            for row, other in pairs:
                if not scores[row].keys() & scores[other].keys():  # not played yet, or a method without this score
                    continue
                of = difference(scores[row], scores[other])
                score = " ".join(filter(None, (sheet.title, column.heading)))
                found.append({"row": row, "against": other, "score": score, **of})
                interval = " to ".join(f"{end:+.2f}" for end in of["interval"] or ()) or "one seed"
                lines.append(f"| {row} | {other} | {score} | {of['mean']:+.2f} | {interval} |")
    text = "\n".join(lines)
    print(text)
    name = f"claims-{args.item.replace('/', '-')}-{time.strftime('%Y-%m-%dT%H%M')}"
    stem = Path(__file__).parent / "results" / name
    told = {
        "command": shlex.join(sys.argv), "runs": f"{len(finished)} of {len(points)}", "pairs": found,
        "results": {point.name: json.loads((point.folder / "result.json").read_text()) for point in finished},
        "machine": manifest("", 0, {}),
    }  # fmt: skip
    stem.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    print(f"written to {stem}.json and .md")


if __name__ == "__main__":
    main()
