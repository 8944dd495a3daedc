"""What every method asks of a GPU: kernel launches, copies and waits of a local step, a client and a round, without a GPU.

    python benchmarks/launches.py [--methods fedala ditto] [--model tiny_bn_cnn] [--batch-clients 1 8]

Every method is counted with each of `--batch-clients` and with `engine.local.cuda_graphs`.

An emulated device (tests/device/) counts them. Small models are bound by launches, at some 5 µs each, and a wait (`syncs`: the
host needs a number that the device has yet to compute) stops the launches that could have been made meanwhile. Three runs of
a method, with more epochs and with more clients, tell its steps, clients and rounds apart; the first round is not counted. Where
clients train together, a step of all of them counts as one of each: divided by their number. A result is written to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from catalogue import SETTINGS

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from device import emulated

from raysim.config import Config, from_dict
from raysim.federation import Federation
from raysim.registry import REGISTRY
from raysim.store.manifest import manifest

SEED, CLIENTS, SAMPLES, BATCH = 0, 8, 40, 10
STEPS = SAMPLES // BATCH  # a client and epoch
KINDS = emulated.Counts._fields


def configuration(
    model: str, sections: dict[str, Any], clients: int, epochs: int, tests: int, engine: dict[str, Any]
) -> Config:  # fmt: skip
    """Equal clients, who all take part."""
    images = {"samples": clients * SAMPLES, "test_samples": max(tests, 120), "shape": [1, 8, 8]}
    raw: dict[str, Any] = {
        "name": "launches",
        "seed": SEED,
        "data": {"name": {"synthetic": images}, "partition": {"iid_equal": {"clients": clients}}},
        "model": {"name": model},
        "rounds": {"total": 2, "evaluate_every": 1, "checkpoint_every": 100},
        "local": {"batch_size": BATCH, "lr": 0.01, "epochs": epochs},
        "evaluate": {"global": bool(tests)},
        "engine": {"local": {"device": "cuda", **engine}},
    }
    for name, section in sections.items():
        raw[name] = raw[name] | section if isinstance(section, dict) else section
    return from_dict(raw)


def second_round(
    model: str, sections: dict[str, Any], clients: int = CLIENTS, epochs: int = 1, tests: int = 0, **engine: Any
) -> list[int]:
    """What the second round of a run asks for."""
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(configuration(model, sections, clients, epochs, tests, engine), Path(folder))
        federation.step()
        before = emulated.counts()
        federation.step()
        counted = emulated.counts().since(before)
        federation.close()
    return list(counted)


def costs(name: str, model: str, **engine: Any) -> dict[str, Any]:
    """Of a local step, a client beside its steps, and a round beside its clients: the counts, in the order of `KINDS`. `engine`
    is what its settings say beside the device."""
    sections = SETTINGS[name].sections(name)
    short, long, more = (
        second_round(model, sections, **engine, **changes) for changes in ({}, {"epochs": 2}, {"clients": 2 * CLIENTS})
    )
    step = [(b - a) / (CLIENTS * STEPS) for a, b in zip(short, long, strict=True)]
    client = [(b - a) / CLIENTS for a, b in zip(short, more, strict=True)]
    return {
        "method": name,
        "engine": engine,
        "step": step,
        "client": [c - STEPS * s for c, s in zip(client, step, strict=True)],
        "round": [a - CLIENTS * c for a, c in zip(short, client, strict=True)],
    }


def trains_together(name: str) -> bool:
    """Whether a method changes what clients do, if anything, in a way that allows it."""
    return name == "fedavg" or (SETTINGS[name].role == "client" and REGISTRY.table("client")[name].batched)


def batch_of_a_test(model: str) -> list[float]:
    """The counts of one batch of a test of the global model."""
    few, many = (second_round(model, {}, tests=512 * batches) for batches in (2, 4))
    return [(b - a) / 2 for a, b in zip(few, many, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="METHOD")
    parser.add_argument("--model", default="tiny_bn_cnn")
    parser.add_argument("--batch-clients", nargs="+", type=int, default=[1, 8], metavar="K")
    args = parser.parse_args()
    emulated.install()
    results = [
        costs(name, args.model, **engine)
        for name in args.methods
        for engine in [*({"batch_clients": k} for k in args.batch_clients), {"cuda_graphs": True}]
        if engine.get("batch_clients", 1) == 1 or trains_together(name)
    ]
    tests = batch_of_a_test(args.model)
    print(f"{args.model}; {', '.join(KINDS)}")
    for result in results:
        columns = ("/".join(f"{count:g}" for count in result[part]) for part in ("step", "client", "round"))
        engine = ", ".join(f"{key} {value}" for key, value in result["engine"].items())
        print(f"{result['method']:14}{engine:18}" + "".join(f"{column:>24}" for column in columns))
    print(f"a test batch: {'/'.join(f'{count:g}' for count in tests)}")
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    out = folder / f"launches-{time.strftime('%Y-%m-%dT%H%M')}.json"
    found = {"settings": vars(args), "kinds": KINDS, "test_batch": tests, "results": results}
    out.write_text(json.dumps({**manifest("", SEED, {}), **found}, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
