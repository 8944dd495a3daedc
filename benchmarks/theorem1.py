"""FedLDF's theorem 1, traced: how much worse than FedAvg's the next model is where n of K clients send each layer.

    python benchmarks/theorem1.py

From one start w_g and one round's updates: Θ̄ is FedAvg's next model, Θ̂ that of FedLDF or of random layers. Shows F(Θ̂) − F(Θ̄), F the
mean loss of the clients' training samples, beside ⟨∇F(Θ̄), d⟩ + L/2 ‖d‖² with d = Θ̂ − Θ̄, which bounds it if ∇F is L-Lipschitz. L
is the greatest ‖∇F(Θ̂) − ∇F(Θ̄)‖ / ‖d‖ of the steps from that start: an estimate from below, so that the bound may fail. And
beside ‖d‖ what no choice of clients exceeds, by lemma 1: 2 (1 − n/K) G, where G² is the sum over the layers of the longest
update's square. The same command continues. Writes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import raysim
from raysim.federation.saved import SavedRun
from raysim.store.manifest import manifest

SENDERS = (1, 4, 16)


def next_models(run: SavedRun, t: int) -> Iterator[tuple[str, int, Tensor]]:
    """Who chooses, n, and the difference Θ̂ − Θ̄ [P]; clients have equally many samples."""
    P = run.layers.P
    before = run.read(t, "before")[:P].double()
    updates = torch.stack([run.read(t, f"client-{k:04d}")[:P].double() - before for k in run.cohort(t)])  # [K, P]
    norms = torch.stack([run.layers.norms(update) for update in updates])  # [K, L]
    chance = torch.rand(norms.shape, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    for who, rank in (("FedLDF", norms), ("random layers", chance)):
        for n in SENDERS:
            chosen = torch.zeros_like(norms).scatter_(0, rank.topk(n, 0).indices, 1 / n)
            yield who, n, (run.layers.per_parameter(chosen) * updates).sum(0) - updates.mean(0)


def loss_of(run: SavedRun, value: Tensor) -> tuple[float, Tensor]:
    """F and its gradient [P], in eval mode, of all training samples."""
    run.load(value)
    run.network.eval()
    rows = torch.cat([torch.as_tensor(run.train_rows(k)) for k in range(len(run.sizes))]).numpy()
    parameters = [p for p in run.network.parameters() if p.requires_grad]
    total, grad = 0.0, torch.zeros(run.layers.P, dtype=torch.float64)
    for start in range(0, len(rows), 500):
        x, y = run.samples(rows[start : start + 500])
        loss = run.task.loss(run.network(x), y) * len(y) / len(rows)
        parts = torch.autograd.grad(loss, parameters)
        total += loss.item()
        grad += torch.cat([part.flatten() for part in parts]).double()
    return total, grad


def traced(run: SavedRun, t: int) -> list[dict[str, float | str]]:
    """A row for each choice of clients and n."""
    P = run.layers.P
    before = run.read(t, "before")
    updates = torch.stack([run.read(t, f"client-{k:04d}")[:P] - before[:P] for k in run.cohort(t)]).double()
    longest = torch.stack([run.layers.norms(update) for update in updates]).amax(0).norm().item()
    mean = before.clone()
    mean[:P] += updates.mean(0).float()
    base, slope = loss_of(run, mean)
    rows: list[dict[str, float | str]] = []
    for who, n, d in next_models(run, t):
        other = mean.clone()
        other[:P] += d.float()
        loss, grad = loss_of(run, other)
        length = d.norm().item()
        curvature = (grad - slope).norm().item() / length if length > 1e-9 else 0.0
        rows.append(
            {
                "who": who, "n": n, "gap": loss - base, "along": (slope @ d).item(), "length": length,
                "curvature": curvature, "longest": 2 * longest * (1 - n / len(updates)), "FedAvg": base,
            }
        )  # fmt: skip
    L = max(float(row["curvature"]) for row in rows)
    return [row | {"bound": float(row["along"]) + L / 2 * float(row["length"]) ** 2} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/theorem1"), help="where the runs of FedAvg go")
    parser.add_argument("--seeds", type=int, nargs="*", default=[8, 9, 10])
    parser.add_argument("--after", type=int, nargs="*", default=[0, 30], help="rounds of FedAvg before the traced one")
    args = parser.parse_args()
    found = []
    for seed in args.seeds:
        folder = args.out / f"seed{seed}"
        if not (folder / "result.json").exists():
            raysim.run(
                "fedldf/figure3", out=folder, weighting=[], seed=seed, data__name={"parquet": "cifar10_subset"}, engine="local",
                data__client_val_frac=0.75, model__name="simple_cnn", local__lr=0.2, rounds__total=max(args.after) + 1,
                rounds__evaluate_every=10, record__trace=args.after,
            )  # fmt: skip
        if not (ready := folder / "theorem1.json").exists():
            run = SavedRun(folder)
            rows = [{"seed": seed, "round": t, **row} for t in args.after for row in traced(run, t)]
            ready.write_text(json.dumps(rows))
        found += json.loads(ready.read_text())
    lines = ["| start | who | n | F(Θ̂) − F(Θ̄) | bound, L measured | ‖Θ̂ − Θ̄‖ | at most |", "|-|-|-|-|-|-|-|"]
    for t in args.after:
        for who, n in dict.fromkeys((row["who"], row["n"]) for row in found):
            rows = [row for row in found if (row["round"], row["who"], row["n"]) == (t, who, n)]
            gaps = ", ".join(f"{row['gap']:+.4f}" for row in rows)
            bounds = ", ".join(f"{row['bound']:.3f}" for row in rows)
            lengths, most = (sum(row[key] for row in rows) / len(rows) for key in ("length", "longest"))
            lines.append(f"| round {t} | {who} | {n} | {gaps} | {bounds} | {lengths:.3f} | {most:.3f} |")
    text = "\n".join(lines)
    print(text)
    stem = Path(__file__).parent / "results" / f"theorem1-{time.strftime('%Y-%m-%dT%H%M')}"
    told = {"command": shlex.join(sys.argv), "rows": found, "machine": manifest("", 0, {})}
    stem.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    print(f"written to {stem}.json and .md")


if __name__ == "__main__":
    main()
