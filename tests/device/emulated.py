"""A CUDA device for tests on machines without one, see emulated.cpp. Install it before anything asks for a GPU, in a process
of its own: it stays."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SOURCE = Path(__file__).with_name("emulated.cpp")
MEMORY = 16 << 30  # bytes that the device seems to have
KERNELS = torch.library.Library("aten", "IMPL")  # goes when it is collected


class Counts(NamedTuple):
    """What the device was asked for."""

    launches: int
    uploads: int
    downloads: int
    syncs: int

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def missing() -> str | None:
    """Why the device cannot be built here, or None."""
    if shutil.which("g++") is None:
        return "there is no compiler (g++) to build the emulated CUDA device"
    return None


def built() -> Path:
    """The device's library, built once for each version of PyTorch and of the source, in the user's cache folder. Who finds
    it being built waits for it."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raysim"
    library = cache / f"emulated-{torch.__version__}-{key}.so"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "emulated.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        root = Path(torch.__file__).parent
        abi = int(torch.compiled_with_cxx11_abi())
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / library.name
            subprocess.run(
                ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
                 f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}",
                 f"-I{sysconfig.get_path('include')}", str(SOURCE), "-o", str(made),
                 f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"],
                check=True,
            )  # fmt: skip
            made.replace(library)  # whole or not at all: it may be stopped
    return library


@functools.cache
def install() -> None:
    """Make `torch.device("cuda")` the emulated device, in this process and for good."""
    torch.ops.load_library(built())
    stream = torch.Generator()  # the device's random numbers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ops.emulated.install(stream, MEMORY)
        KERNELS.impl("_thnn_fused_gru_cell", gru_cell, "CUDA")
        KERNELS.impl("_thnn_fused_gru_cell_backward", gru_cell_backward, "CUDA")
    cuda = torch.cuda
    cuda._initialized, cuda._lazy_init = True, lambda: None
    cuda.is_available, cuda.is_initialized = lambda: True, lambda: True
    cuda.device_count, cuda.current_device = lambda: 1, lambda: 0
    cuda._exchange_device, cuda._maybe_exchange_device = lambda index: 0, lambda index: 0
    cuda.set_device, cuda.synchronize = lambda device: None, lambda device=None: None
    cuda.get_device_name = lambda device=None: "emulated"
    cuda.mem_get_info = lambda device=None: ((b := torch.ops.emulated.bytes())[1] - b[0], b[1])
    cuda.max_memory_reserved = lambda device=None: torch.ops.emulated.bytes()[2]
    cuda.manual_seed = cuda.manual_seed_all = stream.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": stream.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device="cuda": stream.set_state(state)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.CUDAGraph, cuda.graph, cuda.graph_pool_handle = Graph, capture, lambda: (0, 1)
    torch.backends.cudnn.enabled, torch.backends.cudnn.version = False, lambda: None  # it has none
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)


class Graph:
    """A CUDA graph: operators that run again, as one launch, in the memory that they had when they were captured."""

    launches = 0  # those of all replays, of which each counts as one

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []  # operator, arguments, and what it made

    def replay(self) -> None:
        before = counts().launches
        for operator, args, kwargs, made in self.calls:
            for held, new in zip(made, _tensors(operator(*args, **kwargs)), strict=True):
                if new is not held:
                    held.copy_(new)
        Graph.launches += counts().launches - before - 1


@contextmanager
def capture(graph: Graph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
    """What `torch.cuda.graph` does."""
    state = torch.cuda.get_rng_state()
    with _Capture(graph):
        yield
    torch.cuda.set_rng_state(state)


class _Capture(TorchDispatchMode):
    """Lets no operator take effect: what it changes is as before, and what it makes is zero in the end."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
        self._made: list[Tensor] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.is_view:
            return operator(*args, **(kwargs or {}))
        given = [tensor for tensor in _tensors((args, kwargs)) if _writable(tensor)]
        before, asked = [tensor.clone() for tensor in given], counts()
        made = operator(*args, **(kwargs or {}))
        if (since := counts().since(asked)).syncs or since.uploads or since.downloads:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nIt would wait.")
        for tensor, was in zip(given, before, strict=True):
            tensor.copy_(was)
        self.graph.calls.append((operator, args, kwargs or {}, _tensors(made)))
        self._made += [
            tensor for tensor in filter(_writable, _tensors(made)) if not any(tensor is one for one in given)
        ]
        return made

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor in self._made:
            tensor.zero_()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _writable(tensor: Tensor) -> bool:
    return not any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True))


def gru_cell(
    inputs: Tensor, hidden: Tensor, h: Tensor, b_inputs: Tensor | None = None, b_hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A kernel that only GPUs have: one step of a GRU from its gates' inputs [B, 3H], with what the gradient needs."""
    if b_inputs is not None and b_hidden is not None:
        inputs, hidden = inputs + b_inputs, hidden + b_hidden
    i_r, i_z, i_n = inputs.chunk(3, 1)
    h_r, h_z, h_n = hidden.chunk(3, 1)
    r, z = (i_r + h_r).sigmoid(), (i_z + h_z).sigmoid()
    n = (i_n + r * h_n).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, h_n], 1)


def gru_cell_backward(
    slope: Tensor, saved: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Its gradient: of both gates' inputs, the state before, and both biases."""
    r, z, n, h, h_n = saved.chunk(5, 1)
    d_n = slope * (1 - z) * (1 - n * n)
    d_z, d_r = slope * (h - n) * z * (1 - z), d_n * h_n * r * (1 - r)
    inputs, hidden = torch.cat([d_r, d_z, d_n], 1), torch.cat([d_r, d_z, d_n * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, slope * z, *biases


def counts() -> Counts:
    """What the device has been asked for so far."""
    launches, *others = torch.ops.emulated.counts()
    return Counts(launches - Graph.launches, *others)


def break_after(launches: int) -> None:
    """Let the device break after so many more launches: every later call fails, too. -1 mends it."""
    torch.ops.emulated.break_after(launches)


def used() -> int:
    """Bytes of the device that hold something."""
    return int(torch.ops.emulated.bytes()[0])


def set_memory(size: int) -> None:
    """Let the device have `size` bytes."""
    torch.ops.emulated.set_room(size)
