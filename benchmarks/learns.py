"""Accuracy that every method reaches on the quickstart data, beside FedAvg's.

    python benchmarks/learns.py [--methods fedlaw moon] [--rounds 50] [--seed 8]

Each run is the configuration quickstart, 100 clients at 10 % participation, with the method added and in this process. Where a
method needs all clients in every round there are 20, and all take part. Personalized methods are judged by the clients'
own models on a quarter of their samples, and so is the FedAvg run beside them. The score is the mean of the last three
evaluations. A method that ends below 80 % of FedAvg's score has a note saying why; where other values cure that, a further
row has it with those.
Results are written to benchmarks/results/ as JSON and as a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from catalogue import SETTINGS, Setting

from raysim.config import from_dict
from raysim.config.shipped import find
from raysim.federation import Federation
from raysim.store.manifest import manifest
from raysim.store.tables import read

CASES: dict[str, Setting] = SETTINGS
FEDAVG = "FedAvg"
QUICKSTART = find("quickstart")
ENOUGH = 0.8  # of FedAvg's score


def sections(setting: Setting, name: str | None, rounds: int, seed: int) -> dict[str, Any]:
    """The configuration of the method `name` in its setting, or of FedAvg on the same data and judged alike."""
    raw = yaml.safe_load(QUICKSTART.read_text())
    raw["seed"], raw["engine"] = seed, "local"
    raw["rounds"] |= {"total": rounds, "evaluate_every": max(1, rounds // 10), "checkpoint_every": rounds}
    for section, changes in setting.changes.items():
        if name is not None or section == "data":
            raw[section] = raw[section] | changes
    if setting.everyone:
        raw["data"]["partition"]["dirichlet_counts"]["clients"] = 20
        raw["rounds"]["participation"] = 1.0
    if setting.personal:
        raw["data"]["client_test_frac"] = 0.25
        raw["evaluate"] = {"global": False, "personal": "after_init"}
    if name is not None:
        raw[setting.role] = [{name: setting.fields}]
    return raw


def score(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run it; its scores and how long it took."""
    config = from_dict(raw)
    federation, begun = Federation(config, folder), time.perf_counter()
    try:
        while federation.step() is not None:
            pass
        federation.finish()
    finally:
        federation.close()
    column = "accuracy" if config.evaluate.global_ else "personal_accuracy_micro"
    scores = [value for value in read(folder, "rounds")[column].to_pylist() if value is not None]
    return {"score": statistics.mean(scores[-3:]), "curve": scores, "seconds": time.perf_counter() - begun}


def contest(methods: list[str], rounds: int, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    plain: dict[str, dict[str, Any]] = {}  # FedAvg's scores by its configuration
    for name in methods:
        setting = CASES[name]
        raw = sections(setting, None, rounds, seed)
        key = json.dumps(raw, sort_keys=True)
        if key not in plain:
            plain[key] = score(raw, folder / f"{FEDAVG}-{len(plain)}")
        result = row(name, setting, name, plain[key], rounds, seed, folder)
        yield result
        if setting.cured and result["ratio"] < ENOUGH:
            label = f"{name} {json.dumps(setting.cure | setting.cure_changes)}"
            yield row(name, setting.cured, label, plain[key], rounds, seed, folder)


def row(
    name: str, setting: Setting, label: str, fedavg: dict[str, Any], rounds: int, seed: int, folder: Path
) -> dict[str, Any]:
    found = score(sections(setting, name, rounds, seed), folder / label)
    ratio = found["score"] / fedavg["score"]
    return {
        "method": label, "judged_by": "personal" if setting.personal else "global",
        "clients": "20, all" if setting.everyone else "100, 10 %", **found, "fedavg": fedavg["score"],
        "fedavg_curve": fedavg["curve"], "ratio": ratio,
        "note": "" if ratio >= ENOUGH else setting.note or "NOT EXPLAINED",
    }  # fmt: skip


HEAD = "| method | models judged | clients | accuracy | FedAvg's | ratio | note |\n| --- | --- | --- | ---: | ---: | ---: | --- |"


def line(r: dict[str, Any]) -> str:
    numbers = f"{r['score']:.3f} | {r['fedavg']:.3f} | {r['ratio']:.2f}"
    return f"| {r['method']} | {r['judged_by']} | {r['clients']} | {numbers} | {r['note']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=CASES, default=list(CASES), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=8)
    args = parser.parse_args()
    results = []
    print(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        for result in contest(args.methods, args.rounds, args.seed, Path(folder)):
            results.append(result)
            print(line(result), flush=True)
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    out = folder / f"learns-{time.strftime('%Y-%m-%dT%H%M')}"
    out.with_suffix(".json").write_text(
        json.dumps({**manifest("", args.seed, {}), "rounds": args.rounds, "results": results}, indent=1) + "\n"
    )
    about = (
        f"`python benchmarks/learns.py --rounds {args.rounds} --seed {args.seed}`, mean of the last three evaluations."
    )
    out.with_suffix(".md").write_text("\n".join([about, "", HEAD, *map(line, results)]) + "\n")
    print(f"written to {out}.json and .md")


if __name__ == "__main__":
    main()
