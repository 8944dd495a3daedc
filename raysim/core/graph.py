"""A recorded pass whose kernels a GPU starts together: its CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raysim.core.failures import out_of_memory
from raysim.errors import Explained
from raysim.lazy import Tensor, torch


class CaptureError(Explained, RuntimeError):
    """PyTorch cannot capture a step."""

    @classmethod
    def because(cls, why: str) -> CaptureError:
        return cls(f"engine.cuda_graphs: a step cannot be captured: {why}. Leave it out")


class Graph:
    """`tape`, which reads tensors like `inputs` and storage that stays where it is. One launch runs all its kernels."""

    def __init__(self, tape: Callable[..., Any], inputs: Sequence[Tensor], pool: Any):
        """`pool` holds the memory of graphs that run one after the other. Raises `CaptureError`."""
        self._inputs = [tensor.clone() for tensor in inputs]
        if any(own.stride() != tensor.stride() for own, tensor in zip(self._inputs, inputs, strict=True)):
            raise CaptureError.because("it reads a view with gaps")
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):  # no kernel runs yet
                self._made = tape(*self._inputs)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise CaptureError.because(str(error).partition("\n")[0]) from error  # the generator may be of no more use

    def __call__(self, *inputs: Tensor) -> Any:
        """What `tape(*inputs)` returns."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return tuple(None if part is None else part.clone() for part in self._made)  # the next run writes over it
