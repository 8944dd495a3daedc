"""A module whose parameters, gradients and buffers are views of contiguous vectors."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from raysim.core.layers import LayerMap
from raysim.late import Tensor, nn, torch


class FlatModel:
    """`model` laid out over `value` [S] (parameters, then buffers) and `grad` [P].

    An optimiser step, a proximal term or an aggregation is then one call on a vector, and loading a model is one copy.
    Integer counters are kept as floats beside the other buffers (exact up to 2^24 steps).
    """

    def __init__(
        self, model: nn.Module, layers: LayerMap, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ):  # fmt: skip
        """`dtype` of the vectors; default: fp32."""
        dtype = dtype or torch.float32
        self.model, self.layers = model, layers
        state = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        self.value = layers.flatten(state, dtype).to(device=device)
        self.grad = torch.zeros(layers.P, device=device, dtype=dtype)
        self.params, self.buffers = self.value[: layers.P], self.value[layers.P :]
        modules = dict(model.named_modules())
        for spec in layers.tensors:
            owner, leaf = modules[spec.module], spec.name.rpartition(".")[2]
            if (parameter := owner._parameters.get(leaf)) is not None:
                parameter.data = spec.view(self.value)
                parameter.grad = spec.view(self.grad) if spec.kind == "parameter" else None
            else:
                # .data: a version counter of its own, or autograd takes one layer's statistics for another's weights
                owner._buffers[leaf] = spec.view(self.value).data
        # Whatever is neither a parameter nor in the state_dict (non-persistent buffers) follows to the device.
        model.to(device=device)
        self.stages: Sequence[nn.Module] = list(model.children())
        named = dict(model.named_parameters())
        self._parameters = [named[spec.name] for spec in layers.tensors[: layers.T]]
        self._zeros = torch.zeros_like(self.grad) if self.grad.is_cuda else self.grad
        self._body = nn.Sequential(OrderedDict(list(model.named_children())[:-1]))
        self._body_names = set(self._body.state_dict())
        self._head = [*dict(model.named_children())][-1]

    def forward_from(self, stage: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Latent [B, D] and logits [B, C]; stages before `stage` run without a graph."""
        if stage:
            with torch.no_grad():
                for module in self.stages[:stage]:
                    x = module(x)
        for module in self.stages[stage:-1]:
            x = module(x)
        return x, self.stages[-1](x)

    def backward(self, objective: Tensor, again: bool = False) -> None:
        """Fill `grad` with the gradient of `objective` (0-d); 0 for parameters that it does not depend on. `again`: its graph
        is kept for another time."""
        if not objective.is_cuda:
            self.grad.zero_()
            objective.backward(retain_graph=again)
            return
        # Added into the views of `grad`, each tensor would cost a launch: one copies them all.
        specs = self.layers.tensors[: self.layers.T]
        grads = torch.autograd.grad(objective, self._parameters, allow_unused=True, retain_graph=again)
        parts = [
            self._zeros[spec.start : spec.stop] if grad is None else spec.flat(grad)
            for spec, grad in zip(specs, grads, strict=True)
        ]
        torch.cat(parts, out=self.grad)

    def functional(self, value: Tensor, x: Tensor) -> Tensor:
        """Logits [B, C] of another model value, differentiable in its parameters. In train mode its buffers are updated
        in place."""
        P, T = self.layers.P, self.layers.T
        buffers = {spec.name: spec.view(value.data) for spec in self.layers.tensors[T:]}
        logits: Tensor = torch.func.functional_call(self.model, self.layers.unflatten(value[:P]) | buffers, (x,))
        return logits

    def features_of(self, value: Tensor, x: Tensor) -> Tensor:
        """Latents [B, D] of another model value; its buffers are left as they are."""
        buffers = value[self.layers.P :].clone()  # in train mode normalisation layers write their statistics
        tensors = self.layers.unflatten(torch.cat([value[: self.layers.P], buffers]))
        body = {name: tensor for name, tensor in tensors.items() if name in self._body_names}
        latents: Tensor = torch.func.functional_call(self._body, body, (x,))
        return latents

    def forward_of(self, tensors: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Latent [B, D] and logits [B, C] of the model with other `tensors`, by their names; running statistics among
        them are updated in place."""
        head = {name.removeprefix(f"{self._head}."): t for name, t in tensors.items() if name not in self._body_names}
        body = {name: tensor for name, tensor in tensors.items() if name in self._body_names}
        z: Tensor = torch.func.functional_call(self._body, body, (x,))
        return z, torch.func.functional_call(self.stages[-1], head, (z,))


def finite(vector: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    # The sum is one fast pass; only where it overflows is every element looked at.
    return math.isfinite(vector.sum()) or bool(vector.isfinite().all())
