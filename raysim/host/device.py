"""What a process computes on: its device, tensors on it and arrays beside it, and the memory that it keeps."""

from __future__ import annotations

import ctypes
import sys
import warnings

import numpy as np
import torch
from torch import Tensor


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU if this process has one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of `array` on the device. On a CPU it shares the array's memory and must not be written to."""
    return tensor_of(array).to(device)


def tensor_of(array: np.ndarray) -> Tensor:
    """A tensor over the memory of `array`."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # torch warns of read-only memory, but nobody writes to what was received
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy that owns its memory."""
    return tensor.detach().to("cpu", copy=True).numpy()


def keep_freed_memory() -> None:
    """Let glibc keep freed buffers in the process: returning them costs page faults, up to 1.9 x the training time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # which other C libraries than glibc do not have
            M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
