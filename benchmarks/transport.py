"""Two ways for a sum to get from one actor to another: Ray's object store, which raysim uses, and Ray's direct transport of
tensors (gloo, for tensors on CPUs).

    python benchmarks/transport.py [--parameters 11000000 90000000] [--repeats 9]

An actor asks for another's tensor and adds it to its own: on one machine, and on two (`machines.py`, needs root). In turns;
seconds and their medians go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from machines import Machines, missing
from ray.experimental.collective import create_collective_group

from raysim.engine.ray.cluster import own_cluster
from raysim.store.manifest import manifest

WAYS = ("store", "gloo")


@ray.remote(num_cpus=1)
class Holder:
    """Holds a sum."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def hold(self, parameters: int) -> str:
        self.sum = torch.ones(parameters)
        return ray.get_runtime_context().get_node_id()

    def store(self) -> np.ndarray:
        return self.sum.numpy()  # which the receiver maps

    @ray.method(tensor_transport="gloo")
    def gloo(self) -> torch.Tensor:
        return self.sum

    def add(self, other: Any) -> float:
        return float((self.sum + torch.as_tensor(other))[-1])


def measure(parameters: list[int], repeats: int, nodes: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by parameters and way, on the cluster that this process is connected to."""
    one, other = holders = [Holder.remote() for _ in range(2)]
    assert len(set(ray.get([holder.hold.remote(1) for holder in holders]))) == nodes
    create_collective_group(holders, backend="gloo")
    found = {}
    for size in parameters:
        ray.get([holder.hold.remote(size) for holder in holders])
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(1 + repeats):
            for way in WAYS:
                began = time.perf_counter()
                assert ray.get(one.add.remote(getattr(other, way).remote())) == 2
                seconds[way].append(time.perf_counter() - began)
        found[str(size)] = {way: times[1:] for way, times in seconds.items()}  # the first makes the connections
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[11_000_000, 90_000_000])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--here", action="store_true", help="on the two nodes of the cluster there is; prints JSON")
    args = parser.parse_args()
    if args.here:
        ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        print(json.dumps(measure(args.parameters, args.repeats, nodes=2)))
        return
    with own_cluster(object_store=3 << 30):
        results = {"one machine": measure(args.parameters, args.repeats, nodes=1)}
    if reason := missing():
        print(f"not between machines: {reason}")
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # of a machine; its host name means the loopback interface
        with Machines(2) as machines:
            sizes = [str(size) for size in args.parameters]
            command = ["python", Path(__file__), "--here", "--repeats", str(args.repeats), "--parameters", *sizes]
            results["two machines"] = json.loads(machines.run(0, *command, timeout=600).splitlines()[-1])
    for where, by_size in results.items():
        for size, seconds in by_size.items():
            print(f"{where}, {size} parameters:", {way: round(statistics.median(s), 3) for way, s in seconds.items()})
    path = Path(__file__).parent / "results" / f"transport-{time.strftime('%Y-%m-%dT%H%M')}.json"
    told = {"command": f"benchmarks/transport.py {' '.join(sys.argv[1:])}".strip(), "seconds": results}
    path.write_text(json.dumps(told | {"machine": manifest("", 0, {})}, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
