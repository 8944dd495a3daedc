"""Why a client could not be trained: for a reason of its own, for an error in the code, or for the machine's."""

from __future__ import annotations

from typing import Literal

from raysim.lazy import torch

Cause = Literal["client", "code", "machine"]


class ClientFailure(Exception):
    """Raise it where one client cannot be trained for a reason of its own, such as data that make no sense. What becomes
    of the client is then up to `rounds.on_client_failure`; any other error in a method ends the run."""


_NO_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")  # in the RuntimeErrors of torch and CUDA


def cause_of(error: BaseException) -> Cause:
    """Numbers that cannot be computed with are the client's; memory, files and devices are the machine's."""
    if isinstance(error, ClientFailure | FloatingPointError | torch._C._LinAlgError):  # type: ignore[attr-defined]
        return "client"
    machine = isinstance(error, torch.AcceleratorError | OSError) or out_of_memory(error)
    return "machine" if machine else "code"


def out_of_memory(error: BaseException) -> bool:
    """Whether host or device had too little memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def breaks_device(error: BaseException) -> bool:
    """Whether a device failed in such a way that its process can use it no more."""
    return isinstance(error, torch.AcceleratorError) and not out_of_memory(error)
