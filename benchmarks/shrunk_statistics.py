"""Which BatchNorm statistics suit a model that FedLWS has shrunk: accuracy after each round with several.

    python benchmarks/shrunk_statistics.py [--betas 0.01 0.1 1] [--rounds 10] [--seed 8]

A ResNet8 on the CIFAR-10 subset, Dirichlet(0.1), 20 clients of 250 images on average, `bn_stats: average`. Each round's global
model w = γ ŵ is tested on 2,000 images with

    average      the clients' averaged statistics, as raysim keeps them
    unshrunk     the same statistics, and ŵ in place of w: what shrinking costs is the difference
    scaled       each mean times γ, and each variance times γ², of the layer that it follows
    recalibrated statistics of w on 1,000 training images
    recalibrated unshrunk

A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raysim.config import load
from raysim.config.shipped import find
from raysim.federation import Federation
from raysim.federation.saved import SavedRun
from raysim.store.manifest import manifest
from raysim.store.tables import read


def ran(beta: float, rounds: int, seed: int, folder: Path) -> None:
    """FedLWS's table 1, scaled down."""
    changes = {
        "data.name": "{parquet: cifar10_subset}", "data.client_val_frac": 0.75, "model.name": "resnet8",
        "rounds.total": rounds, "rounds.evaluate_every": rounds, "local.batch_size": 32, "local.epochs": 1,
        "server.0.fedlws.beta": beta, "engine": "local", "record.traces": "rounds", "seed": seed,
    }  # fmt: skip
    federation = Federation(load(find("fedlws/table1"), [f"{path}={value}" for path, value in changes.items()]), folder)
    while federation.step():
        pass
    federation.finish()
    federation.close()


def accuracies(folder: Path) -> list[dict[str, float]]:
    """In %, round by round."""
    run, draw = SavedRun(folder), np.random.RandomState(0)
    own = np.concatenate([run.train_rows(client) for client in range(run.partition.clients)])
    own, test = draw.choice(own, 1000, replace=False), draw.choice(run.partition.server_test, 2000, replace=False)
    norms = [module for module in run.network.modules() if isinstance(module, nn.BatchNorm2d)]
    notes = read(folder, "notes").to_pandas()
    applied = notes[(notes["method"] == "fedlws") & (notes["name"] == "applied")]
    layers, found = run.layers, []

    def images(rows: np.ndarray) -> Tensor:
        return run.data.transform(torch.from_numpy(run.data.x[rows]))

    def accuracy() -> float:
        run.network.eval()
        with torch.inference_mode():
            right = [
                (run.network(images(part)).argmax(1) == torch.from_numpy(run.data.y[part])).sum()
                for part in np.array_split(test, 4)
            ]
        return 100 * float(sum(right)) / len(test)

    def recalibrated() -> float:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        run.network.train()
        with torch.inference_mode():
            for part in np.array_split(own, 4):
                run.network(images(part))
        return accuracy()

    for t, shrunk in run.models(run.of_rounds(())):
        of = applied[applied["round"] == t].set_index("layer")["value"]
        gamma = torch.tensor([of[name] for name in layers.names], dtype=torch.float64)
        unshrunk = shrunk.clone()
        unshrunk[: layers.P] /= layers.per_parameter(gamma).to(shrunk.dtype)
        row = {"round": int(t) + 1, "least gamma": float(gamma.min())}
        for name, value in (("average", shrunk), ("unshrunk", unshrunk)):
            run.flat.value.copy_(value)
            row[name] = accuracy()
        run.flat.value.copy_(shrunk)
        factors = iter(gamma[torch.tensor(layers.groups)[[s.name.endswith("running_mean") for s in layers.tensors]]])
        for norm, factor in zip(norms, factors, strict=True):
            norm.running_mean *= factor
            norm.running_var *= factor**2
        row["scaled"] = accuracy()
        for name, value in (("recalibrated", shrunk), ("recalibrated unshrunk", unshrunk)):
            run.flat.value.copy_(value)
            row[name] = recalibrated()
        found.append(row)
        print(row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--betas", type=float, nargs="+", default=[0.01, 0.1, 1.0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, Any] = {"command": shlex.join(sys.argv), "machine": manifest("", 0, {}), "accuracy": {}}
    for beta in args.betas:
        with tempfile.TemporaryDirectory() as folder:
            ran(beta, args.rounds, args.seed, Path(folder))
            told["accuracy"][f"beta {beta:g}"] = accuracies(Path(folder))
    name = f"shrunk_statistics-{time.strftime('%Y-%m-%dT%H%M')}.json"
    path = Path(__file__).parent / "results" / name
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
