"""Which slice of the flat vector is which tensor of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from raysim.late import Tensor, nn, torch


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor of a model and its place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    kind: str  # "parameter", "buffer" (floating) or "counter" (integer, stored as its float value)
    stage: int  # index of the model's stage that owns it; the last stage is the head
    order: int  # position in the state_dict
    module: str  # path of the owning module
    bare: bool = False  # owned directly by a module that has children (class token, positional embedding)
    norm: bool = False  # owned by a normalisation layer
    channels_last: bool = False  # stored as [O, H, W, I], the layout in which CPU convolutions are fastest

    @property
    def size(self) -> int:
        return self.stop - self.start

    def view(self, flat: Tensor) -> Tensor:
        """This tensor inside `flat` [..., S]: a differentiable view [..., *shape]."""
        part = flat[..., self.start : self.stop]
        if not self.shape:
            return part[..., 0]
        if not self.channels_last:
            shaped: Tensor = part.unflatten(-1, self.shape)
            return shaped
        o, i, h, w = self.shape
        shaped = part.unflatten(-1, (o, h, w, i))
        return shaped.movedim(-1, -3)

    def flat(self, tensor: Tensor) -> Tensor:
        """The elements [..., size] of a tensor [..., *shape] in the order in which they are stored; a view where that can
        be."""
        before = tensor.shape[: tensor.dim() - len(self.shape)]
        return (tensor.movedim(-3, -1) if self.channels_last else tensor).reshape(*before, self.size)


def tensors_of(model: nn.Module, channels_last: bool = False) -> tuple[TensorSpec, ...]:
    """The tensors of `model`, one after the other: parameters, then buffers, then counters. A parameter that is frozen
    (`requires_grad` False) is a buffer: nobody trains or scales it."""
    modules = dict(model.named_modules())
    stages = {name: index for index, (name, _) in enumerate(model.named_children())}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = {name: (order, tensor) for order, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items())}

    def kind(name: str, tensor: Tensor) -> str:
        return "parameter" if name in trainable else "buffer" if tensor.is_floating_point() else "counter"

    kinds = {name: kind(name, tensor) for name, (_, tensor) in state.items()}
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
    specs: list[TensorSpec] = []
    start = 0
    for name in sorted(state, key=lambda name: ("parameter", "buffer", "counter").index(kinds[name])):
        (order, tensor), path = state[name], name.rpartition(".")[0]
        spec = TensorSpec(
            name=name, shape=tuple(tensor.shape), start=start, stop=start + tensor.numel(), kind=kinds[name],
            stage=stages.get(name.partition(".")[0], 0), order=order, module=path,
            bare=any(True for _ in modules[path].children()), norm=isinstance(modules[path], norms),
            channels_last=channels_last and kinds[name] == "parameter" and tensor.dim() == 4,
        )  # fmt: skip
        specs.append(spec)
        start = spec.stop
    return tuple(specs)


@dataclass(frozen=True)
class Layout:
    """The layout of a model *value*: P parameters, then B buffers, in one vector of S = P + B floats.

    `T` counts the parameter tensors and `Tb` the others.
    """

    tensors: tuple[TensorSpec, ...]  # parameters first, then buffers

    @cached_property
    def T(self) -> int:
        return sum(s.kind == "parameter" for s in self.tensors)

    @cached_property
    def P(self) -> int:
        return sum(s.size for s in self.tensors[: self.T])

    @cached_property
    def S(self) -> int:
        return self.tensors[-1].stop

    @property
    def B(self) -> int:
        return self.S - self.P

    @cached_property
    def sizes(self) -> Tensor:
        """Elements of every tensor, int64 [T + Tb]."""
        return torch.tensor([s.size for s in self.tensors])

    # Parts of the model.

    @cached_property
    def stages(self) -> int:
        """How many stages the model has."""
        return 1 + max(s.stage for s in self.tensors)

    def span(self, part: str) -> slice:
        """The parameters of the `head` (last stage), the `body` (all others) or `all`, as a slice of [P]."""
        first_of_head = self._first_of_stage(self.stages - 1)
        return {"all": slice(0, self.P), "head": slice(first_of_head, self.P), "body": slice(0, first_of_head)}[part]

    def top(self, stages: int, within: str = "all") -> slice:
        """The last `stages` stages of the model (or of its body), as a slice of [P]; more than there are means all."""
        last = self.stages - (within == "body")
        stop = self._first_of_stage(last)
        return slice(self._first_of_stage(max(0, last - stages)) if stages else stop, stop)

    def top_tensors(self, tensors: int, within: str = "all") -> slice:
        """The last `tensors` parameter tensors of the model (or of its body), as a slice of [P]; 0 means all."""
        stop = self._first_of_stage(self.stages - (within == "body"))
        return slice([s.start for s in self.tensors[: self.T] if s.stop <= stop][-tensors:][0], stop)

    def stage_at(self, start: int) -> int:
        """The stage of the parameter at `start` of [P]."""
        return next(s.stage for s in self.tensors if s.start <= start < s.stop)

    def _first_of_stage(self, stage: int) -> int:
        return next((s.start for s in self.tensors[: self.T] if s.stage >= stage), self.P)

    def where(self, part: str) -> Tensor:
        """Which tensors, buffers included, belong to the `head` or the `body`: bool [T + Tb]."""
        head = torch.tensor([s.stage == self.stages - 1 for s in self.tensors])
        return {"all": torch.ones_like(head), "head": head, "body": ~head}[part]

    # Between the vector and named tensors.

    def unflatten(self, value: Tensor) -> dict[str, Tensor]:
        """state_dict names -> views of `value` [S] (or [P]); differentiable, counters stay floating."""
        return {s.name: s.view(value) for s in self.tensors if s.stop <= value.shape[-1]}

    def state_dict(self, value: Tensor) -> dict[str, Tensor]:
        """A contiguous copy of `value` [S] (or [P]) under its state_dict names, in state_dict order, counters as int64."""
        specs = sorted((s for s in self.tensors if s.stop <= value.shape[-1]), key=lambda s: s.order)
        return {
            s.name: s.view(value).round().long() if s.kind == "counter" else s.view(value).contiguous().clone()
            for s in specs
        }

    def flatten(self, state: dict[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The value [S] of a state_dict, in `dtype`, by default fp32.

        Raises `KeyError` or `ValueError` naming the tensor that does not fit."""
        value = torch.empty(self.S, dtype=dtype or torch.float32)
        for spec in self.tensors:
            if spec.name not in state:
                raise KeyError(f"the model's tensor {spec.name!r} is missing")
            if tuple(state[spec.name].shape) != spec.shape:
                raise ValueError(f"{spec.name} has shape {tuple(state[spec.name].shape)}, the model needs {spec.shape}")
            spec.view(value).copy_(state[spec.name])
        return value
