"""Seconds a round, beside the plainest PyTorch loop and the best one, in turns, in the same run.

    python benchmarks/rounds.py [--workloads W1 W2 W3] [--rounds 9] [--engine ray] [--gpu-per-client 0]

Every contestant trains the same clients from the same arrays with as many processes as there are CPUs, one thread each:
    plain   load_state_dict, torch.optim.SGD, a state_dict summed client by client
    best    flat parameters, one fused update, channels-last, freed memory kept: the fastest loop we could write by hand
    raysim  `raysim run`'s federation on a local Ray cluster, records and all, evaluation off
    kernels raysim without channels-last and with the default allocator, so that kernels are not mistaken for orchestration
    fast    raysim with `fast_math: true`
    bf16    raysim with `local.precision: bf16`, where the CPU has it
Rounds in which a virtual machine's host took the cores away are left out. A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from quiet import undisturbed
from torch import nn

os.environ.setdefault("RAY_worker_niceness", "0")  # actors are to compete as the loops do; Ray would make them yield

from raysim.config import Config, from_dict
from raysim.federation import Federation, sample
from raysim.host.device import keep_freed_memory
from raysim.machine import computes_bf16
from raysim.models import Inputs, build
from raysim.store.manifest import manifest

SEED, LR = 0, 0.01
WARM_UP = 2  # turns


@dataclass(frozen=True)
class Workload:
    """One local epoch of SGD a round on data already in memory."""

    about: str
    clients: int
    cohort: int
    samples: int  # a client
    shape: tuple[int, ...]
    batch: int
    model: str
    options: dict[str, Any]


WORKLOADS = {
    "W1": Workload("MNIST shapes, FedAvgCNN", 100, 10, 600, (1, 28, 28), 32, "fedavg_cnn", {}),
    "W2": Workload("CIFAR-10 shapes, SimpleCNN", 100, 20, 500, (3, 32, 32), 64, "simple_cnn", {}),
    "W3": Workload("engine overhead: MLP 784-200-10", 1000, 100, 20, (1, 28, 28), 10, "mlp", {"hidden": [200]}),
}


def configuration(
    work: Workload, engine: Any, memory_format: str = "auto", precision: str = "fp32", seed: int = SEED
) -> Config:
    return from_dict(
        {
            "name": "benchmark",
            "seed": seed,
            "data": {
                "name": {
                    "synthetic": {"samples": work.clients * work.samples, "test_samples": 10, "shape": work.shape}
                },
                "partition": {"iid_equal": {"clients": work.clients}},
            },
            "model": {"name": work.model, "options": work.options, "memory_format": memory_format},
            "rounds": {
                "total": 100_000,
                "participation": work.cohort / work.clients,
                "evaluate_every": 100_000,
                "checkpoint_every": 100_000,
            },
            "local": {"batch_size": work.batch, "lr": LR, "precision": precision},
            "evaluate": {"global": False},
            "engine": engine,
        }
    )


# ---- loops by hand ---------------------------------------------------------------------------------------------------


def written(work: Workload) -> nn.Module:
    """The model as people write it: max-pooling after the ReLU."""
    model = build(work.model, Inputs(work.shape, 10), **work.options)
    for stage in model.children():
        modules = dict(stage.named_children())
        if "pool" in modules:
            for name in ("relu", "pool", "flatten"):
                if name in modules:
                    delattr(stage, name)
                    stage.add_module(name, modules[name])
    return model


class Plain:
    """What a researcher writes in half an hour."""

    def __init__(self, work: Workload, x: torch.Tensor, y: torch.Tensor):
        self.work, self.x, self.y = work, x, y
        self.model = written(work)

    def train(self, state: dict[str, torch.Tensor], clients: list[int]) -> dict[str, torch.Tensor]:
        total: dict[str, torch.Tensor] = {}
        for client in clients:
            self.model.load_state_dict(state)
            optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
            for rows in torch.randperm(self.work.samples).split(self.work.batch):
                rows = rows + client * self.work.samples
                optimizer.zero_grad()
                F.cross_entropy(self.model(self.x[rows]), self.y[rows]).backward()
                optimizer.step()
            for name, tensor in self.model.state_dict().items():
                scaled = tensor / self.work.cohort
                total[name] = total[name] + scaled if name in total else scaled
        return total


class Best:
    """The same work with every trick that pays on this kind of machine."""

    def __init__(self, work: Workload, x: torch.Tensor, y: torch.Tensor):
        keep_freed_memory(0)
        self.work, self.y = work, y
        self.x = x.contiguous(memory_format=torch.channels_last)
        self.model = written(work)
        size = sum(p.numel() for p in self.model.parameters())
        self.flat, self.grad, start = torch.empty(size), torch.zeros(size), 0
        for p in self.model.parameters():
            p.data, p.grad = self._view(self.flat, p, start), self._view(self.grad, p, start)
            start += p.numel()

    @staticmethod
    def _view(flat: torch.Tensor, p: nn.Parameter, start: int) -> torch.Tensor:
        part = flat[start : start + p.numel()]
        if p.dim() != 4:
            return part.view(p.shape)
        o, i, h, w = p.shape
        return part.view(o, h, w, i).permute(0, 3, 1, 2)

    def train(self, state: torch.Tensor, clients: list[int]) -> torch.Tensor:
        total = torch.zeros_like(self.flat)
        for client in clients:
            self.flat.copy_(state)
            order = torch.randperm(self.work.samples) + client * self.work.samples
            x, y = self.x[order], self.y[order]
            for i in range(0, len(order), self.work.batch):
                self.grad.zero_()
                F.cross_entropy(self.model(x[i : i + self.work.batch]), y[i : i + self.work.batch]).backward()
                self.flat.add_(self.grad, alpha=-LR)
            total.add_(self.flat, alpha=1 / self.work.cohort)
        return total


def work_loop(kind: type, work: Workload, x: torch.Tensor, y: torch.Tensor, pipe: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    trainer = kind(work, x, y)
    while (job := pipe.recv()) is not None:
        pipe.send(trainer.train(*job))


class Loop:
    """A federation by hand: as many processes as CPUs, each with an equal share of the cohort."""

    def __init__(self, kind: type, work: Workload, x: torch.Tensor, y: torch.Tensor, processes: int):
        self.work, self.t = work, 0
        context = mp.get_context("spawn")
        self.pipes = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            context.Process(target=work_loop, args=(kind, work, x, y, theirs), daemon=True).start()
            self.pipes.append(ours)
        model = build(work.model, Inputs(work.shape, 10), **work.options)
        if kind is Best:
            self.state: Any = torch.cat([p.detach().flatten() for p in model.parameters()])
        else:
            self.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def step(self) -> None:
        clients = sample(SEED, self.t, self.work.clients, self.work.cohort)
        for i, pipe in enumerate(self.pipes):
            pipe.send((self.state, list(clients[i :: len(self.pipes)])))
        parts = [pipe.recv() for pipe in self.pipes]
        if isinstance(parts[0], dict):
            self.state = {name: sum(part[name] for part in parts).clone() for name in parts[0]}
        else:
            self.state = torch.stack(parts).sum(0)
        self.t += 1

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


# ---- measuring -------------------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def pss(pids: list[int]) -> int:
    """Proportional set size in bytes: shared pages are counted once over all processes."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def contest(name: str, work: Workload, rounds: int, processes: int, gpu: float) -> dict[str, Any]:
    import ray

    from raysim.engine.ray.engine import ray_engine

    data = configuration(work, "local").data.name.load(None)
    x = data.transform(torch.from_numpy(data.x[: work.clients * work.samples])).share_memory_()
    y = torch.from_numpy(data.y[: work.clients * work.samples]).share_memory_()
    result: dict[str, Any] = {"workload": name, "about": work.about, "processes": processes, "rounds": rounds}
    runners: dict[str, Any] = {
        "plain": Loop(Plain, work, x, y, processes),
        "best": Loop(Best, work, x, y, processes),
    }
    before = set(descendants(os.getpid()))
    started = time.perf_counter()
    ray.init(
        address="local", num_cpus=4 * processes, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    engine = {"ray": {"clients_per_actor": -(-work.cohort // processes), "gpu_per_client": gpu}}
    with tempfile.TemporaryDirectory() as folder:
        runners["raysim"] = Federation(configuration(work, engine), Path(folder) / "a", make_engine=ray_engine)
        result["raysim_start_seconds"] = time.perf_counter() - started
        runners["raysim"].step()
        result["raysim_first_round_ends_seconds"] = time.perf_counter() - started
        for _ in range(3):
            runners["raysim"].step()
        processes_now = set(descendants(os.getpid())) - before
        result["raysim_processes"] = len(processes_now) + 1
        result["raysim_pss_bytes"] = pss([os.getpid(), *processes_now])

        def plain_engine(config: Config, spec: Any, *rest: Any) -> Any:
            return ray_engine(config, replace(spec, keep_freed_memory=False), *rest)

        runners["kernels"] = Federation(
            configuration(work, engine, "contiguous"), Path(folder) / "b", make_engine=plain_engine
        )
        fast = {"ray": engine["ray"] | {"fast_math": True}}
        runners["fast"] = Federation(configuration(work, fast), Path(folder) / "d", make_engine=ray_engine)
        if computes_bf16():
            low = configuration(work, engine, precision="bf16")
            runners["bf16"] = Federation(low, Path(folder) / "c", make_engine=ray_engine)
        spent: dict[str, list[float]] = {runner: [] for runner in runners}

        def turn() -> None:
            for runner, federation in runners.items():  # what disturbs one disturbs all
                begun = time.perf_counter()
                federation.step()
                spent[runner].append(time.perf_counter() - begun)

        for _ in range(WARM_UP):
            turn()
        turns = undisturbed(turn, rounds)
        seconds = {runner: [values[WARM_UP + t] for t in turns.kept] for runner, values in spent.items()}
        result |= turns.recorded()
        for runner in runners.values():
            runner.close()
    ray.shutdown()
    for runner, values in seconds.items():
        quartiles = np.percentile(values, [25, 50, 75])
        result[runner] = {"median": quartiles[1], "quartiles": [quartiles[0], quartiles[2]], "min": min(values)}
    for runner, other in (("raysim", "plain"), ("raysim", "best"), ("fast", "best"), ("bf16", "raysim")):
        if runner in seconds:
            ratios = [a / b for a, b in zip(seconds[runner], seconds[other], strict=True)]
            result[f"{runner}/{other}"] = statistics.median(ratios)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gpu-per-client", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print(
        f"{'':4}{'plain':>9}{'best':>9}{'raysim':>9}{'kernels':>9}{'fast':>9}   raysim/best  fast/best  raysim/plain   "
        "(medians, seconds a round)"
    )
    for name in args.workloads:
        rounds = args.rounds * 10 if name == "W3" else args.rounds
        r = contest(name, WORKLOADS[name], rounds, args.processes, args.gpu_per_client)
        results.append(r)
        medians = "".join(f"{r[k]['median']:9.4f}" for k in ("plain", "best", "raysim", "kernels", "fast"))
        print(f"{name:4}{medians}   {r['raysim/best']:11.2f}  {r['fast/best']:9.2f}  {r['raysim/plain']:12.2f}   "
              f"bf16/raysim {r.get('bf16/raysim', math.nan):.2f}, start {r['raysim_start_seconds']:.1f} s, "
              f"round 1 ends {r['raysim_first_round_ends_seconds']:.1f} s, {r['raysim_processes']} processes, "
              f"{r['raysim_pss_bytes'] / 2**20:.0f} MiB PSS", flush=True)  # fmt: skip
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    out = folder / f"rounds-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps({**manifest("", SEED, {}), "results": results}, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
