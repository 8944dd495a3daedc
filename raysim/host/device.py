"""What a process computes on: its device, tensors on it and arrays beside it, and the memory that it keeps."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from raysim.lazy import torch
from raysim.store.manifest import kernels, switches

GPU_SWITCHES = (  # environment variables by which libraries of a GPU choose kernels
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_LINALG_PREFER_CUSOLVER",
    "TORCH_CUDNN_V8_API_DISABLED", "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
)  # fmt: skip
LARGE = 1 << 26  # bytes of a model, so that training it takes longer than to get memory for it


def needs_gpu(precision: str, cuda_graphs: bool) -> str | None:
    """What is wrong with these settings where clients train on CPUs."""
    if precision == "fp16":
        slower = (
            "local.precision: fp16 is for GPUs, and clients would train on a CPU, which is slower at it than at fp32."
        )
        return f"{slower} Leave it at fp32, or take bf16 where the CPU has it"
    return "engine: cuda_graphs is for GPUs, and clients would train on a CPU. Leave it out" if cuda_graphs else None


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU if this process has one. A GPU is made to give the same bits again."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        repeat_bits()
    return torch.device(name)


def repeat_bits() -> None:
    """Let the kernels of a GPU give the same bits whenever they are given the same; call it before CUDA starts.

    An operation that has no such kernel warns, once, with its name: its bits may differ from run to run.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, as its first handle is made
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # for a model that is compiled
    torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` would load the compiler, for a second
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it would cost a launch for each new tensor
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.deterministic, cudnn.benchmark = True, False  # else cuDNN chooses an algorithm by how fast it just was
    cudnn.allow_tf32 = cublas.allow_tf32 = False  # PyTorch would let convolutions, of float32, have 10 bits


def numerics(device: torch.device) -> dict[str, Any]:
    """What decides the bits of this process and its device besides the code."""
    found = kernels() | switches()
    if device.type == "cpu":
        return found
    cudnn = torch.backends.cudnn
    return (
        found
        | switches(GPU_SWITCHES)
        | {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": cudnn.version(),
            "deterministic": torch.are_deterministic_algorithms_enabled()
            and cudnn.deterministic
            and not cudnn.benchmark,
            "tf32": cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32,
            "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
    )


def keep_freed_memory(model_bytes: int) -> None:
    """Let glibc keep freed buffers in the process: returning them costs page faults, up to 1.9 x the training time.

    Of a large model whole vectors go back all the same: between what is still in use their places do not fit the next
    ones, so that a process would keep three times what it needs.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # which other C libraries than glibc do not have
            M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30 if model_bytes < LARGE else model_bytes // 2)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
