"""What one GPU gives, in one command: whether methods agree with the CPU and repeat their bits, and seconds a round.

    python benchmarks/gpu.py [--workloads W1 W2 W3 R20 R18] [--together 1 8 64] [--actors 1 2 4 8] [--rounds 5]

First every method of the catalogue runs two rounds on the CPU, and twice on the GPU: the bits must be the same twice. Then
each workload is timed; one by one (`together 1`), raysim's bits must be the same with any number of actors:
    plain      load_state_dict, torch.optim.SGD, a state_dict summed client by client; data and model on the GPU
    together   raysim in one process, with so many clients that take each step together (`engine.batch_clients`)
    graphs     the same, client by client, with `engine.local.cuda_graphs`; its bits must be those of `together 1`
    bf16       the same, client by client, with `local.precision: bf16`
    actors     raysim on Ray, with so many actors that share the GPU; left out where Ray is not installed
Start NVIDIA's MPS before, and actors use it; the result says whether it ran. It is written to benchmarks/results/ after
every workload, so that what is there is kept when the time is up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from catalogue import SETTINGS
from rounds import LR, SEED, WARM_UP, WORKLOADS, Plain, Workload, configuration

from raysim.config import from_dict
from raysim.federation import Federation, sample
from raysim.federation.builder import MakeEngine
from raysim.store.manifest import manifest

IMAGES = WORKLOADS | {
    "R20": Workload("CIFAR-10 shapes, ResNet20", 100, 20, 500, (3, 32, 32), 64, "resnet20", {}),
    "R18": Workload("CIFAR-10 shapes, ResNet18", 100, 10, 500, (3, 32, 32), 64, "resnet18", {}),
}
CPUS = len(os.sched_getaffinity(0))


# ---- whether it is right ---------------------------------------------------------------------------------------------


def two_rounds(sections: dict[str, Any], device: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Hash and tensors of the model that a method has after two rounds on tiny images."""
    raw: dict[str, Any] = {
        "name": "agree",
        "seed": SEED,
        "data": {
            "name": {"synthetic": {"samples": 320, "test_samples": 120, "shape": [1, 8, 8]}},
            "partition": {"iid_equal": {"clients": 8}},
        },
        "model": {"name": "tiny_bn_cnn"},
        "rounds": {"total": 2, "checkpoint_every": 100},
        "local": {"batch_size": 10, "lr": LR},
        "evaluate": {"global": False},
        "engine": {"local": {"device": device}},
    }
    for name, section in sections.items():
        raw[name] = raw[name] | section if isinstance(section, dict) else section
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(from_dict(raw), Path(folder))
        while federation.step():
            pass
        tensors = federation.server.layers.unflatten(federation.server.value)
        found = federation.sha256(), {name: tensor.clone() for name, tensor in tensors.items()}
        federation.close()
    return found


def agreement(method: str) -> dict[str, Any]:
    """How far the GPU's model is from the CPU's, in parts of each tensor's largest number, and whether it repeats itself."""
    sections = SETTINGS[method].sections(method) if method in SETTINGS else {}
    _, there = two_rounds(sections, "cpu")
    (first, here), (second, _) = (two_rounds(sections, "cuda") for _ in range(2))
    apart = {n: float((here[n] - there[n]).abs().max() / there[n].abs().max().clamp_min(1e-12)) for n in there}
    worst = max(apart, key=apart.__getitem__)
    return {"method": method, "apart": apart[worst], "tensor": worst, "same_bits": first == second}


# ---- how fast --------------------------------------------------------------------------------------------------------


def timed(step: Callable[[], object], rounds: int) -> dict[str, Any]:
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    spent = []
    for _ in range(rounds):
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - begun)
    low, median, high = np.percentile(spent, [25, 50, 75])
    return {"seconds": median, "quartiles": [low, high]}


def plain(work: Workload, rounds: int) -> dict[str, Any]:
    data = configuration(work, "local").data.name.load(None)
    x = data.transform(torch.from_numpy(data.x[: work.clients * work.samples])).cuda()
    loop = Plain(work, x, torch.from_numpy(data.y[: work.clients * work.samples]).cuda())
    loop.model.cuda()
    state, drawn = {n: t.clone() for n, t in loop.model.state_dict().items()}, iter(range(WARM_UP + rounds))

    def step() -> None:
        state.update(loop.train(state, list(sample(SEED, next(drawn), work.clients, work.cohort))))

    return timed(step, rounds)


def ran(
    work: Workload, rounds: int, engine: dict[str, Any], precision: str = "fp32", **make_engine: MakeEngine
) -> dict[str, Any]:
    messages: list[str] = []
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(configuration(work, engine, precision=precision), Path(folder), **make_engine)
        found = timed(lambda: messages.extend((federation.step() or {})["messages"]), rounds)
        found["sha256"] = federation.sha256()
        federation.close()
    memory = {} if make_engine else {"gpu_bytes": torch.cuda.max_memory_reserved()}  # of this process
    return found | memory | {"messages": messages}


def measurements(work: Workload, rounds: int, together: list[int], actors: list[int]) -> Iterator[dict[str, Any]]:
    yield {"what": "plain", **plain(work, rounds)}
    for k in sorted({min(k, work.cohort) for k in together}):
        yield {"what": f"together {k}", **ran(work, rounds, {"local": {"device": "cuda", "batch_clients": k}})}
    yield {"what": "graphs", **ran(work, rounds, {"local": {"device": "cuda", "cuda_graphs": True}})}
    yield {"what": "bf16", **ran(work, rounds, {"local": {"device": "cuda"}}, "bf16")}
    if find_spec("ray") is None:
        return
    import ray

    from raysim.engine.ray.engine import ray_engine

    ray.init(
        address="local", num_cpus=CPUS, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    for n in actors:
        share = {"clients_per_actor": -(-work.cohort // n), "gpu_per_client": 1 / n}
        yield {"what": f"actors {n}", **ran(work, rounds, {"ray": share}, make_engine=ray_engine)}
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=["fedavg", *SETTINGS], metavar="METHOD")
    parser.add_argument("--workloads", nargs="*", choices=IMAGES, default=list(IMAGES))
    parser.add_argument("--together", nargs="+", type=int, default=[1, 8, 64], metavar="K")
    parser.add_argument("--actors", nargs="*", type=int, default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU here.")
    mps = any(process.name() == "nvidia-cuda-mps-control" for process in psutil.process_iter())
    out = Path(__file__).parent / "results" / f"gpu-{time.strftime('%Y-%m-%dT%H%M')}.json"
    told: dict[str, Any] = {
        "command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name(), "mps": mps, "agreement": [], "rounds": [],
        "machine": manifest("", SEED, {}),
    }  # fmt: skip
    for method in args.methods:
        found = agreement(method)
        told["agreement"].append(found)
        repeats = "same bits twice" if found["same_bits"] else "OTHER BITS the second time"
        print(f"{method:14} {found['apart']:.1e} from the CPU in {found['tensor']}; {repeats}", flush=True)
    for name in args.workloads:
        for measured in measurements(IMAGES[name], args.rounds, args.together, args.actors):
            told["rounds"].append({"workload": name, **measured})
            bits = measured.get("sha256", "")[:8]
            print(f"{name:4}{measured['what']:14}{measured['seconds']:9.4f} s a round  {bits}", flush=True)
        out.write_text(json.dumps(told, indent=1) + "\n")
    out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written to {out}")
    one_by_one = [r for r in told["rounds"] if r["what"] in ("together 1", "graphs") or r["what"].startswith("actors")]
    bits = {(r["workload"], r["sha256"]) for r in one_by_one}
    if len(bits) > len(args.workloads) or not all(found["same_bits"] for found in told["agreement"]):
        sys.exit("Bits differ that are to be the same.")


if __name__ == "__main__":
    main()
