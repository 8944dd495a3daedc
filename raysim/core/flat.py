"""A module whose parameters, gradients and buffers are views of contiguous vectors."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from raysim.core.layers import LayerMap
from raysim.core.layout import TensorSpec, tied_in
from raysim.core.outputs import Outputs
from raysim.lazy import Tensor, nn, torch

if TYPE_CHECKING:
    from raysim.core.tape import Tapes


class FlatModel:
    """`model` laid out over `value` [S] (parameters, then buffers) and `grad` [P].

    An optimiser step, a proximal term or an aggregation is then one call on a vector, and loading a model is one copy.
    Integers that training changes are stored as floats beside the other buffers. While the model's forward runs they have
    their own type, so that it can index with them; see `own_types`.

    The model's own forward runs. Latents z are what enters the module `layers.head`; None where the model has none. A
    model of stages (see `stages_in`) is called stage by stage: those that are not trained need no graph.
    """

    def __init__(
        self, model: nn.Module, layers: LayerMap, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ):  # fmt: skip
        """`dtype` of the vectors; default: fp32."""
        dtype = dtype or torch.float32
        self.model, self.layers = model, layers
        self.tapes: Tapes | None = None  # of its steps, where they are recorded
        state = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
        self.value = layers.flatten(state, dtype).to(device=device)
        self.has_infinities = not finite(self.value)  # from the start: constants, such as an attention mask
        self.grad = torch.zeros(layers.P, device=device, dtype=dtype)
        self.params, self.buffers = self.value[: layers.P], self.value[layers.P :]
        modules = dict(model.named_modules())
        self._lay_out(modules)
        # Whatever is neither a parameter nor in the state_dict (non-persistent buffers) follows to the device.
        model.to(device=device)
        for module in modules.values():
            if self.value.is_cuda and isinstance(module, nn.modules.batchnorm._BatchNorm):
                without_cudnn(module)
        self._constants = {}
        for name, (_, tensor) in layers.constants.items():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            tensors: dict[str, Any] = owner._buffers if leaf in owner._buffers else owner._parameters
            # In fp32 on the CPU it is the layers' own, which all models of a process share.
            tensors[leaf].data = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            self._constants[name] = tensors, leaf, version(tensors[leaf])
        self._places = [(modules[spec.owner], spec.name, spec.view(self.value).data_ptr()) for spec in layers.tensors]
        self._entered: Tensor | None = None  # what entered the head last
        self._stages = stages_in(model)
        if self._stages is not None:
            names = list(model._modules)
            owners = [(spec.stage, names.index(spec.name.partition(".")[0])) for spec in layers.tensors]
            self._first = [min(i for s, i in owners if s == stage) for stage in range(layers.stages)]
            self._body = nn.Sequential(OrderedDict(zip(names[:-1], self._stages[:-1], strict=True)))
            self._head = names[-1]
        elif layers.head is not None:
            modules[layers.head].register_forward_pre_hook(self._enters, with_kwargs=True)
        if counters := counters_of(model, layers):
            own_types(self._stages or [model], modules, counters)
        named = dict(model.named_parameters())
        self._parameters = [named[spec.name] for spec in layers.tensors[: layers.T]]
        self._zeros = torch.zeros_like(self.grad) if self.grad.is_cuda else self.grad

    def _lay_out(self, modules: Mapping[str, nn.Module]) -> None:
        """Make the tensors of the `modules` views of the vectors."""
        for spec in self.layers.tensors:
            owner, leaf = modules[spec.owner], spec.name.rpartition(".")[2]
            if (parameter := owner._parameters.get(leaf)) is not None:
                parameter.data = spec.view(self.value)
                parameter.grad = spec.view(self.grad) if spec.kind == "parameter" else None
            else:
                # .data: a version counter of its own, or autograd takes one layer's statistics for another's weights
                owner._buffers[leaf] = spec.view(self.value).data
        for name, (_, first) in self.layers.tied.items():
            (path, _, leaf), (home, _, known) = name.rpartition("."), first.rpartition(".")
            second = self.model.get_submodule(path)  # perhaps the same module
            if second._buffers.get(leaf) is not None:  # a parameter is still the same object
                second._buffers[leaf] = self.model.get_submodule(home)._buffers[known]

    def _enters(self, head: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._entered = args[0] if args else kwargs["input"]

    def _with_latents(self, outputs: Outputs) -> tuple[Any, Outputs]:
        """What the forward pass that has just ended has made; its graph is not held any longer."""
        latents, self._entered = self._entered, None
        if latents is None and self.layers.head is not None:
            raise RuntimeError(f"forward has not called the model's head, {self.layers.head!r}")
        return latents, outputs

    def forward_from(self, stage: int, x: Tensor) -> tuple[Any, Outputs]:
        """Latents [B, D] and outputs, [B, C] or what the model returns; stages before `stage` run without a graph."""
        if self._stages is None:
            return self._with_latents(self.model(x))
        first = self._first[stage] if stage else 0
        if stage:
            with torch.no_grad():
                for module in self._stages[:first]:
                    x = module(x)
        for module in self._stages[first:-1]:
            x = module(x)
        return x, self._stages[-1](x)

    def latents(self, x: Tensor) -> Tensor:
        """Latents [B, D] of the loaded model, in its present mode."""
        if self._stages is not None:
            for module in self._stages[:-1]:
                x = module(x)
            return x
        latents: Tensor | None
        latents, _ = self.forward_from(0, x)
        assert latents is not None, "methods that need latents are refused where a model has no head"
        return latents

    def backward(self, objective: Tensor, again: bool = False) -> None:
        """Fill `grad` with the gradient of `objective` (0-d); 0 for parameters that it does not depend on. `again`: its graph
        is reused."""
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

    @property
    def storage(self) -> list[Tensor]:
        """Tensors that hold the model and its gradient as long as it lives."""
        return [self.value, self.grad, *self.model.parameters(), *self.model.buffers()]

    def changed_constant(self) -> str | None:
        """A tensor that should have stayed as it was, if there is one that has not."""
        found = (name for name, (buffers, leaf, was) in self._constants.items() if version(buffers[leaf]) != was)
        return next(found, None)

    def replaced(self) -> str | None:
        """What a forward has done that put another tensor in the place of one of the model's, which lies in `value`."""
        for owner, name, place in self._places:
            leaf = name.rpartition(".")[2]
            tensor = owner._parameters.get(leaf)
            tensor = owner._buffers[leaf] if tensor is None else tensor
            if tensor is None or tensor.data_ptr() != place:
                write = f"write into it, as in self.{name}.data.copy_(...)"
                return f"puts another tensor in the place of {name}, which no step and no mean then reaches: {write}."
        return None

    def functional(self, value: Tensor, x: Tensor) -> Outputs:
        """Outputs of another model value, differentiable in its parameters. In train mode its buffers are updated in
        place."""
        P, T = self.layers.P, self.layers.T
        buffers = {spec.name: spec.view(value.data) for spec in self.layers.tensors[T:]}
        return torch.func.functional_call(self.model, self.layers.unflatten(value[:P]) | buffers, (x,))

    def features_of(self, value: Tensor, x: Tensor) -> Tensor:
        """Latents [B, D] of another model value; its buffers are left as they are."""
        buffers = value[self.layers.P :].clone()  # in train mode normalisation layers write their statistics
        tensors = self.layers.unflatten(torch.cat([value[: self.layers.P], buffers]))
        latents: Tensor | None
        if self._stages is None:
            latents, _ = self._with_latents(torch.func.functional_call(self.model, tensors, (x,)))
        else:
            latents = torch.func.functional_call(self._body, self._cut(tensors)[0], (x,))
        assert latents is not None, "methods that need latents are refused where a model has no head"
        return latents

    def forward_of(self, tensors: Mapping[str, Tensor], x: Tensor) -> tuple[Any, Outputs]:
        """Latents [B, D] and outputs of the model with other `tensors`, by their names; running statistics among them are
        updated in place."""
        if self._stages is None:
            return self._with_latents(torch.func.functional_call(self.model, dict(tensors), (x,)))
        body, head = self._cut(tensors)
        z: Tensor = torch.func.functional_call(self._body, body, (x,))
        return z, torch.func.functional_call(self._stages[-1], head, (z,))

    def _cut(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors of the stages before the head by their names, and those of the head by its own."""
        head = f"{self._head}."
        of_head = {name.removeprefix(head): tensor for name, tensor in tensors.items() if name.startswith(head)}
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}, of_head


def stages_in(model: nn.Module) -> list[nn.Module] | None:
    """The stages of a `model` that does nothing but call them one after the other, and whose last one is an nn.Linear; None
    of any other, and where two of its parts share a tensor."""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return None
    own = model._forward_hooks or model._forward_pre_hooks or model._parameters or model._buffers or tied_in(model)
    return [*model] if not own and len(model) and isinstance(model[-1], nn.Linear) else None


def without_cudnn(module: nn.Module) -> None:
    """Let PyTorch's own kernels run in the forward of `module`: cuDNN's batch normalisation of channels-last images fails on
    views of a vector that do not start at a multiple of 16 bytes."""
    before: list[bool] = []

    def switch_off(*_: Any) -> None:
        before.append(torch.backends.cudnn.enabled)
        torch.backends.cudnn.enabled = False

    def switch_back(*_: Any) -> None:
        torch.backends.cudnn.enabled = before.pop()

    module.register_forward_pre_hook(switch_off)
    module.register_forward_hook(switch_back, always_call=True)


def counters_of(model: nn.Module, layers: LayerMap) -> list[TensorSpec]:
    """The counters that the code of a user may read; BatchNorm's do as well as floats."""
    norms = {path for path, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    return [spec for spec in layers.tensors if spec.own_type and spec.module not in norms]


def own_types(callers: Sequence[nn.Module], modules: Mapping[str, nn.Module], counters: Sequence[TensorSpec]) -> None:
    """Let the `counters` among the buffers of `modules` have their own types while one of the `callers` runs; what it has
    changed of them is stored then. Raises `ValueError` for what cannot be."""
    places = [(modules[spec.owner]._buffers, spec.name.rpartition(".")[2]) for spec in counters]
    lent: list[list[tuple[Tensor, Tensor]]] = []  # of each forward that runs: what is stored, and what was lent

    def lend(*_: Any) -> None:
        stored = [cast(Tensor, buffers[leaf]) for buffers, leaf in places]
        own = [tensor.round().to(spec.own_type) for tensor, spec in zip(stored, counters, strict=True)]
        lent.append([*zip(stored, own, strict=True)])
        for (buffers, leaf), tensor in zip(places, own, strict=True):
            buffers[leaf] = tensor.clone()

    def store(*_: Any) -> None:
        for (buffers, leaf), spec, (stored, before) in zip(places, counters, lent.pop(), strict=True):
            after, buffers[leaf] = cast(Tensor, buffers[leaf]), stored
            if after.shape != before.shape or after.dtype != before.dtype:
                raise ValueError(
                    f"forward has made {spec.name} {_form(after)}; it was {_form(before)}, and must stay so"
                )
            if not torch.equal(after, before):
                stored.copy_(torch.where(after == before, stored, after))
                if not torch.equal(stored.round().to(spec.own_type), after):
                    raise ValueError(f"{spec.name}: {inexact(after)}")

    for module in callers:
        module.register_forward_pre_hook(lend, prepend=True)
        module.register_forward_hook(store, always_call=True)


def inexact(counter: Tensor) -> str:
    """What is wrong with a counter whose digits fp32 loses."""
    return f"it holds {int(counter.abs().max())}; integers that training changes are exact up to 2^24 = {1 << 24} only"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def version(tensor: Tensor | None) -> tuple[int, int]:
    """Changes with every change of the tensor in place, and with every other tensor that takes its place."""
    return id(tensor), tensor._version if tensor is not None else 0


def finite(vector: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    # The sum is one fast pass; only where it overflows is every element looked at.
    return math.isfinite(vector.sum()) or bool(vector.isfinite().all())


def difference(value: Tensor, before: Tensor, out: Tensor | None = None) -> Tensor:
    """`value` - `before` [S]. It is 0 where both are the same infinity or NaN."""
    same = (value == before) | (value.isnan() & before.isnan())
    return torch.sub(value, before, out=out).masked_fill_(same, 0)
