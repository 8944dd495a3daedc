"""NumPy arrays as tensors, and back."""

from __future__ import annotations

import warnings

import numpy as np

from raysim.lazy import Tensor, torch


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of `array` on the device. On a CPU it shares the array's memory and must not be written to."""
    return tensor_of(array).to(device)


def tensor_of(array: np.ndarray) -> Tensor:
    """A tensor over the memory of `array`."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # torch warns of read-only memory, but received arrays are never written to
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy that owns its memory."""
    return tensor.detach().to("cpu", copy=True).numpy()
