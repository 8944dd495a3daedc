"""The modes of PyTorch in which a run computes, whatever those of its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raysim.lazy import torch


@contextmanager
def modes_of_a_run(threads: int) -> Iterator[None]:
    """PyTorch uses so many threads, makes gradients where it is asked for, and numbers of 32 bits; afterwards it does as before.
    A caller may be under `torch.no_grad()`, and has use for more threads than a run."""
    before, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        try:
            torch.set_num_threads(threads)
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_num_threads(before)
            torch.set_default_dtype(dtype)
