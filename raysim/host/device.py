"""What a process computes on: its device, tensors on it and arrays beside it, and the memory that it keeps."""

from __future__ import annotations

import ctypes
import sys
import warnings

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 26  # bytes of a model, so that training it takes longer than to get memory for it


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
