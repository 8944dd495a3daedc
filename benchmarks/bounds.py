"""What bounds a round on this CPU: its share in convolutions, in products of matrices and in everything else.

    python benchmarks/bounds.py [--workloads W1 W2 W3] [--rounds 5] [--fast-math]

The workloads are those of benchmarks/rounds.py, in one process on one thread. CPU seconds of the thread are counted, around each
of PyTorch's operators in rounds of their own; what a round takes beside them is Python, NumPy, and the calls themselves. The
roofs are measured in the same process: a product of 1024 x 1024 matrices, and a sum of vectors of 64 MiB (memory) and of
160,000 floats (cache). A result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rounds import WORKLOADS, configuration
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from raysim.federation import Federation
from raysim.host.device import keep_freed_memory
from raysim.store.manifest import manifest

WARM_UP = 3
ATEN = torch.ops.aten
CONVOLUTIONS = {ATEN.convolution, ATEN.convolution_backward, ATEN.mkldnn_convolution}
PRODUCTS = {ATEN.mm, ATEN.addmm, ATEN.addmm_}
KINDS = ("convolutions", "products", "other operators")


class Meter(TorchDispatchMode):
    """CPU seconds, floating-point operations and bytes of the operators that are called while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.work, self.bytes, self.calls = (Counter[str]() for _ in range(4))

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, operator.overloadpacket
        begun = time.thread_time_ns()
        made = operator(*args, **kwargs)
        taken = time.thread_time_ns() - begun
        kind = KINDS[0 if packet in CONVOLUTIONS else 1 if packet in PRODUCTS else 2]
        self.seconds[kind] += taken / 1e9
        self.calls[kind] += 1
        if kind != KINDS[2]:
            counted = ATEN.addmm if packet is ATEN.addmm_ else packet
            self.work[kind] += flop_registry[counted](*args, **kwargs, out_val=made)
        elif not operator.is_view:
            self.bytes[kind] += sum(tensor.nbytes for tensor in tensors((args, kwargs, made)))
        return made


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


def least(call: Callable[[], object], times: int) -> float:
    """CPU seconds of the fastest of some calls."""
    taken = []
    for _ in range(times):
        begun = time.thread_time()
        call()
        taken.append(time.thread_time() - begun)
    return min(taken)


def roofs() -> dict[str, float]:
    """GFLOP/s of a product, and GB/s of a sum of vectors in memory and in the cache."""
    a, b, out = torch.randn(3, 1024, 1024)
    found = {"GFLOP/s": 2 * 1024**3 / least(lambda: torch.mm(a, b, out=out), 30) / 1e9}
    for name, size, repeats in (("GB/s", 1 << 24, 1), ("GB/s in the cache", 160_000, 200)):
        x, y = torch.randn(2, size)

        def add(x: Tensor = x, y: Tensor = y, repeats: int = repeats) -> None:
            for _ in range(repeats):
                x.add_(y)

        found[name] = 3 * x.nbytes * repeats / least(add, 20) / 1e9
    return found


def measured(name: str, rounds: int, fast_math: bool) -> dict[str, Any]:
    """CPU seconds of a round, and of the operators in one."""
    engine = {"local": {"fast_math": fast_math}}
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(configuration(WORKLOADS[name], engine), Path(folder))
        for _ in range(WARM_UP):
            federation.step()
        whole, metered = [], []
        for _ in range(rounds):
            begun = time.process_time()
            federation.step()
            whole.append(time.process_time() - begun)
            with Meter() as meter:
                federation.step()
            metered.append(meter)
        federation.close()
    meter = min(metered, key=lambda meter: sum(meter.seconds.values()))
    return {
        "workload": name, "about": WORKLOADS[name].about, "cpu_seconds": statistics.median(whole), "least": min(whole),
        "seconds": meter.seconds, "work": meter.work, "bytes": meter.bytes, "calls": meter.calls,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fast-math", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory(1 << 26)
    roof = roofs()
    print({name: round(value, 1) for name, value in roof.items()}, flush=True)
    results = []
    for name in args.workloads:
        result = measured(name, args.rounds * (4 if name == "W3" else 1), args.fast_math)
        results.append(result)
        whole, seconds = result["least"], result["seconds"]
        print(f"{name}: {whole:.4f} CPU s a round")
        for kind in KINDS:
            if result["calls"][kind]:
                work, moved = result["work"][kind] / 1e9, result["bytes"][kind] / 1e9
                print(f"  {kind:16} {seconds[kind]:8.4f} s  {seconds[kind] / whole:5.1%}  {result['calls'][kind]:6} calls"
                      f"  {work / seconds[kind]:6.1f} GFLOP/s  {moved / seconds[kind]:6.1f} GB/s"
                      f"  bound {work / roof['GFLOP/s'] + moved / roof['GB/s']:.4f} s", flush=True)  # fmt: skip
        rest = whole - sum(seconds.values())
        print(f"  {'beside them':16} {rest:8.4f} s  {rest / whole:5.1%}", flush=True)
    folder = Path(__file__).parent / "results"
    out = folder / f"bounds-{time.strftime('%Y-%m-%dT%H%M')}.json"
    settings = {"fast_math": args.fast_math, "rounds": args.rounds}
    out.write_text(
        json.dumps({**manifest("", 0, {}), "settings": settings, "roofs": roof, "results": results}, indent=1) + "\n"
    )
    print(f"written to {out}")


if __name__ == "__main__":
    main()
