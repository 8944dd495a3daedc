"""How much memory it takes to train a client, found out from a model and two samples, before anything is started."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from raysim.core.arrays import tensor_of
from raysim.core.rng import preserved
from raysim.host.messages import HostSpec
from raysim.lazy import Tensor, nn, torch

VECTORS = 5  # of the model's size: received, trained, its gradient, the optimiser's, a sum of updates


def training_bytes(spec: HostSpec, model: nn.Module, samples: int) -> int:
    """Bytes that the training of a client with so many `samples` takes, beside PyTorch and the clients' updates: vectors of the
    model's size, and what a batch leaves in memory between forward and backward pass."""
    vector: int = sum(tensor.nbytes for tensor in model.state_dict().values())
    batch = min(spec.settings.pass_size or spec.settings.batch_size, samples) * spec.batch_clients
    return VECTORS * vector * spec.batch_clients + batch * _kept(spec, model) // len(spec.samples)


def _kept(spec: HostSpec, model: nn.Module) -> int:
    """Bytes that autograd keeps of the samples; without parameters, which all samples share."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    # A model that fails says so where clients train, with all that is known there.
    with suppress(Exception), preserved(), hooks:
        model(tensor_of(spec.samples))
    return sum(storage.nbytes() for storage in kept.values())
