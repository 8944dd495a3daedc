"""Which slice of the flat vector is which tensor of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from raysim.errors import Explained
from raysim.lazy import Tensor, nn, torch


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor of a model and its place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    kind: str  # "parameter", "buffer" (floating) or "counter" (integer, stored as its float value)
    stage: int  # see `stages_of`; the last stage is the head
    order: int  # position in the state_dict
    module: str  # path of the module to whose layer it belongs
    bare: bool = False  # owned directly by a module that only holds others (class token, positional embedding)
    norm: bool = False  # owned by a normalisation layer
    channels_last: bool = False  # stored as [O, H, W, I], the layout in which CPU convolutions are fastest
    own_type: torch.dtype | None = None  # of a counter in its module

    @property
    def owner(self) -> str:
        """Path of the module whose attribute it is: a part of `module` where that is parametrized, as by weight_norm."""
        return self.name.rpartition(".")[0]

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


class StageError(Explained, ValueError):
    """A tensor that belongs to none of the stages that a model declares."""


def stages_of(model: nn.Module, names: Iterable[str], head: str | None = None) -> dict[str, int]:
    """The stage of each tensor in `names`, which are in the order of the state_dict; the tensors of the module `head` are
    the last stage.

    A model may declare its stages: an attribute `stages`, a tuple of the first parts of names. Otherwise there is one for
    each of its children and own tensors. Raises `StageError`.
    """
    said: Any = getattr(model, "stages", None)  # or else a ModuleList of that name
    declared = [part for part in said if isinstance(part, str)] if isinstance(said, tuple | list) else []

    def stage(name: str) -> str:
        if not declared:
            return name.partition(".")[0]
        found = next((part for part in declared if f"{name}.".startswith(f"{part}.")), None)
        if found is None:
            raise StageError(f"its stages are {', '.join(declared)}, and its tensor {name} is in none of them")
        return found

    of_head = {name for name in names if head is not None and name.startswith(f"{head}.")}
    stages = {name: stage(name) for name in names if name not in of_head}
    present = dict.fromkeys(stages.values())
    order = [part for part in declared if part in present] if declared else list(present)
    index = {part: i for i, part in enumerate(order)}
    return {name: len(index) if name in of_head else index[stages[name]] for name in names}


def tensors_of(
    model: nn.Module, channels_last: bool = False, head: str | None = None, counted: Set[str] = frozenset()
) -> tuple[TensorSpec, ...]:
    """The tensors of `model` that a round may change, one after the other: parameters, then buffers, then counters, each
    kind stage by stage. See `constants_of` for what is frozen, for tables of integers, and for `counted`."""
    modules = dict(model.named_modules())
    constants, tied = constants_of(model, counted), tied_in(model)
    state = {
        name: (order, tensor)
        for order, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items())
        if name not in constants and name not in tied
    }
    stages = stages_of(model, state, head)

    def kind(name: str, tensor: Tensor) -> str:
        if isinstance(tensor, nn.Parameter):
            return "parameter"
        return "buffer" if tensor.is_floating_point() else "counter"

    kinds = {name: kind(name, tensor) for name, (_, tensor) in state.items()}
    layers = {path for path, module in modules.items() if is_layer(module)}
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
    specs: list[TensorSpec] = []
    start = 0
    for name in sorted(state, key=lambda name: (("parameter", "buffer", "counter").index(kinds[name]), stages[name])):
        (order, tensor), path = state[name], name.rpartition(".")[0].partition(".parametrizations.")[0]
        spec = TensorSpec(
            name=name, shape=tuple(tensor.shape), start=start, stop=start + tensor.numel(), kind=kinds[name],
            stage=stages[name], order=order, module=path,
            bare=path not in layers, norm=isinstance(modules[path], norms),
            channels_last=channels_last and kinds[name] == "parameter" and tensor.dim() == 4,
            own_type=tensor.dtype if kinds[name] == "counter" else None,
        )  # fmt: skip
        specs.append(spec)
        start = spec.stop
    return tuple(specs)


def is_layer(module: nn.Module) -> bool:
    """Whether a module's own tensors are a layer: where it has no children, or these are but parts of it."""
    parts = isinstance(module, nn.MultiheadAttention) or nn.utils.parametrize.is_parametrized(module)
    return parts or not any(True for _ in module.children())


def tied_in(model: nn.Module) -> dict[str, tuple[int, str]]:
    """Further names of tensors that have several in the state_dict: their order there, and the first name."""
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    found = {name: (order, first.setdefault(id(tensor), name)) for order, (name, tensor) in enumerate(state.items())}
    return {name: (order, known) for name, (order, known) in found.items() if known != name}


def frozen_in(model: nn.Module) -> list[nn.Module]:
    """The modules whose own parameters are all frozen (`requires_grad` False): their buffers are, too."""
    own = ((module, [*module.parameters(recurse=False)]) for module in model.modules())
    return [module for module, parameters in own if parameters and not any(p.requires_grad for p in parameters)]


def keep_frozen(model: nn.Module) -> None:
    """Let normalisation layers that are frozen use their running statistics in training, too, and leave them as they are."""
    for module in frozen_in(model):
        if module._buffers:
            module.register_forward_pre_hook(_in_eval_mode)


def _in_eval_mode(module: nn.Module, args: Any) -> None:
    module.training = False


def constants_of(
    model: nn.Module, counted: Set[str] = frozenset(), channels_last: bool = False
) -> dict[str, tuple[int, Tensor]]:  # fmt: skip
    """What no round changes: frozen parameters, buffers of frozen modules, and tables of integers, such as masks and places.
    Their order in the state_dict, and the tensors. They are not trained, averaged, sent or kept by a client. Tables that
    training changes are not among them: they are named in `counted`."""
    of_frozen = {id(buffer) for module in frozen_in(model) for buffer in module.buffers(recurse=False)}
    found = {}
    for order, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
        table = tensor.dim() and not (tensor.is_floating_point() or tensor.is_complex() or name in counted)
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if frozen and channels_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        if frozen or table or id(tensor) in of_frozen:
            found[name] = order, tensor.detach().clone()
    return found


@dataclass(frozen=True)
class Layout:
    """The layout of a model *value*: P parameters, then B buffers, in one vector of S = P + B floats.

    `T` counts the parameter tensors and `Tb` the others.
    """

    tensors: tuple[TensorSpec, ...]  # parameters first, then buffers
    head: str | None = field(default=None, kw_only=True)
    """Path of the module that is the last stage and whose inputs are the latents; None where the model has none."""
    constants: Mapping[str, tuple[int, Tensor]] = field(default_factory=dict, compare=False, repr=False, kw_only=True)
    """See `constants_of`."""
    tied: Mapping[str, tuple[int, str]] = field(default_factory=dict, compare=False, repr=False, kw_only=True)
    """See `tied_in`; such a tensor is one in the vector, and has all its names in a state_dict."""

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

    @property
    def frozen(self) -> int:
        """Numbers in the model that are not trained: see `constants_of`."""
        return sum(tensor.numel() for _, tensor in self.constants.values() if tensor.is_floating_point())

    @cached_property
    def counters(self) -> tuple[tuple[int, slice, slice], ...]:
        """Of every counter: its place among the tensors, its elements of a value [S], and of what a cohort's counters are."""
        found = [(i, spec) for i, spec in enumerate(self.tensors) if spec.kind == "counter"]
        first = found[0][1].start if found else self.S  # they are the last
        return tuple((i, slice(s.start, s.stop), slice(s.start - first, s.stop - first)) for i, s in found)

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

    def trains(self, module: str | None) -> bool:
        """Whether the module of that path has a parameter that is not frozen."""
        return any(spec.name.startswith(f"{module}.") for spec in self.tensors[: self.T])

    @property
    def head_is_shared(self) -> bool:
        """Whether the head has a tensor that another part of the model has, too."""
        within = f"{self.head}."
        return any(name.startswith(within) != first.startswith(within) for name, (_, first) in self.tied.items())

    # Between the vector and named tensors.

    def unflatten(self, value: Tensor) -> dict[str, Tensor]:
        """state_dict names -> views of `value` [S] (or [P]); differentiable, counters stay floating."""
        return {s.name: s.view(value) for s in self.tensors if s.stop <= value.shape[-1]}

    def state_dict(self, value: Tensor) -> dict[str, Tensor]:
        """A contiguous copy of `value` [S] (or [P]) under its state_dict names, in state_dict order, counters in their own
        types; with the constants, if it is whole."""
        state = {
            (s.order, s.name): s.view(value).round().to(s.own_type)
            if s.own_type
            else s.view(value).contiguous().clone()
            for s in self.tensors
            if s.stop <= value.shape[-1]
        }
        first = {name: tensor for (_, name), tensor in state.items()}
        state |= {(order, name): first[known].clone() for name, (order, known) in self.tied.items() if known in first}
        if value.shape[-1] == self.S:
            state |= {(order, name): tensor.contiguous() for name, (order, tensor) in self.constants.items()}
        return {name: state[order, name] for order, name in sorted(state)}

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
        for name, (_, first) in self.tied.items():
            if name in state and not torch.equal(state[name], state[first]):
                raise ValueError(f"{name} differs from {first}, and the model has one tensor for both")
        return value
