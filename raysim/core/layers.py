"""Which slice of the flat vector is which tensor, and which tensors form a layer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
RUN = 1 << 13  # elements whose squares one BLAS call adds: it may share more among threads, which changes the order
SQUARES = 1e-30, 1e38  # between these a sum of float32 squares has neither vanished nor overflowed


class GroupingError(ValueError):
    """Tensors that cannot be grouped into layers as asked."""


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
            return part.unflatten(-1, self.shape)
        o, i, h, w = self.shape
        return part.unflatten(-1, (o, h, w, i)).movedim(-1, -3)


@dataclass(frozen=True)
class LayerMap:
    """The layout of a model *value*: P parameters, then B buffers, in one vector of S = P + B floats.

    `T` counts the parameter tensors and `L` the layers into which `groups` collects all tensors.
    A mixture has one column a tensor; a method computes on layers and spreads its result over their tensors.
    """

    tensors: tuple[TensorSpec, ...]  # parameters first, then buffers
    names: tuple[str, ...]  # L layer names
    groups: tuple[int, ...]  # layer of every tensor

    @classmethod
    def of(
        cls, model: nn.Module, by: str = "unit", blocks: Sequence[str] = (), channels_last: bool = False
    ) -> LayerMap:
        """Lay out `model`; `by` is a key of `GROUPINGS`."""
        modules = dict(model.named_modules())
        stages = {name: index for index, (name, _) in enumerate(model.named_children())}
        counters: list[Any] = []
        buffers: list[Any] = []
        parameters: list[Any] = []
        trainable = {name for name, _ in model.named_parameters()}
        for order, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
            path = name.rpartition(".")[0]
            kind = "parameter" if name in trainable else "buffer" if tensor.is_floating_point() else "counter"
            spec = dict(
                name=name, shape=tuple(tensor.shape), kind=kind, order=order, module=path,
                stage=stages.get(name.partition(".")[0], 0), bare=any(True for _ in modules[path].children()),
                norm=isinstance(modules[path], NORMS),
                channels_last=channels_last and kind == "parameter" and tensor.dim() == 4,
            )  # fmt: skip
            {"parameter": parameters, "buffer": buffers, "counter": counters}[kind].append((spec, tensor.numel()))
        specs, start = [], 0
        for spec, size in parameters + buffers + counters:
            specs.append(TensorSpec(start=start, stop=start + size, **spec))
            start += size
        return cls._grouped(tuple(specs), by, tuple(blocks))

    @classmethod
    def _grouped(cls, specs: tuple[TensorSpec, ...], by: str, blocks: tuple[str, ...] = ()) -> LayerMap:
        names, group = GROUPINGS[by](sorted(specs, key=lambda s: s.order), blocks)
        return cls(specs, tuple(names), tuple(group[s.name] for s in specs))

    def regroup(self, by: str, blocks: tuple[str, ...] = ()) -> LayerMap:
        """The same vector under another grouping."""
        key = by, tuple(blocks)
        if key not in self._regrouped:
            self._regrouped[key] = self._grouped(self.tensors, *key)
        return self._regrouped[key]

    @cached_property
    def _regrouped(self) -> dict[tuple[str, tuple[str, ...]], LayerMap]:
        return {}

    @cached_property
    def T(self) -> int:
        return sum(s.kind == "parameter" for s in self.tensors)

    @property
    def L(self) -> int:
        return len(self.names)

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

    @cached_property
    def counts(self) -> Tensor:
        """Parameters of every layer, int64 [L]."""
        return torch.zeros(self.L, dtype=torch.long).index_add_(0, self._group[: self.T], self.sizes[: self.T])

    @cached_property
    def stages(self) -> int:
        return 1 + max(s.stage for s in self.tensors)

    @cached_property
    def _group(self) -> Tensor:
        return torch.tensor(self.groups)

    @cached_property
    def _segments(self) -> tuple[tuple[int, int, int], ...]:
        """(start, stop, layer) of maximal runs of one layer, so that a statistic costs one call a run."""
        runs: list[tuple[int, int, int]] = []
        for spec, layer in zip(self.tensors, self.groups, strict=True):
            if runs and runs[-1][2] == layer and spec.start not in (0, self.P):
                runs[-1] = (runs[-1][0], spec.stop, layer)
            else:
                runs.append((spec.start, spec.stop, layer))
        return tuple(runs)

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Inner products per layer, float64: [..., P] (or whole values [..., S]) -> [..., L]."""
        shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])  # torch.broadcast_shapes imports sympy: seconds
        out = torch.zeros(*shape, self.L, dtype=torch.float64, device=a.device)
        for start, stop, layer in self._segments:
            if start < a.shape[-1]:
                out[..., layer] += (a[..., start:stop].double() * b[..., start:stop].double()).sum(-1)
        return out

    def norms(self, flat: Tensor) -> Tensor:
        """L2 norm of every layer, float64: [..., P] (or [..., S]) -> [..., L]; see `squares`."""
        return self.gathered(self.squares(flat)).sqrt()

    # Squares are summed over runs: each layer's elements, at most RUN at a time. So the sums are the same ones whichever
    # part of the vector is at hand.

    @cached_property
    def _runs(self) -> tuple[tuple[int, int, int], ...]:
        """(start, stop, layer)"""
        return tuple(
            (a, min(a + RUN, stop), layer) for start, stop, layer in self._segments for a in range(start, stop, RUN)
        )

    def blocks(self, size: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of adjacent runs: up to `size` elements together, or one run."""
        first, ends = 0, [stop for _, stop, _ in self._runs]
        for stop, following in itertools.pairwise((*ends, self.S + size + 1)):
            if stop == self.P or following - first > size:
                yield first, stop
                first = stop

    def squares(self, part: Tensor, start: int = 0) -> Tensor:
        """Sums of squares [..., runs], float64, of a `part` [..., n] of the flat vector whose ends are ends of runs.

        In a run squares of float32 are summed by BLAS in float32, to about 1e-7; where that overflows or vanishes, in
        float64.
        """
        shapes = self._shapes(start, start + part.shape[-1])
        if part.is_cuda:
            return torch.cat([part[..., a:b].unflatten(-1, n).double().square().sum(-1) for a, b, n in shapes], -1)
        array, sums = part.detach().numpy(), []
        with np.errstate(over="ignore", under="ignore"):
            for a, b, n in shapes:
                runs = array[..., a:b].reshape(*part.shape[:-1], *n)
                sums.append(np.matmul(runs[..., None, :], runs[..., :, None])[..., 0, 0])
        total = np.concatenate(sums, -1, dtype=np.float64)
        sure = (total > SQUARES[0]) & (total < SQUARES[1])
        if part.dtype != torch.float64 and not sure.all():
            total = np.where(sure, total, self.squares(part.double(), start).numpy())
        return torch.from_numpy(total)

    def _shapes(self, start: int, stop: int) -> list[tuple[int, int, tuple[int, int]]]:
        """(start, stop, (runs, elements of each)) of equal runs, counted from `start`."""
        if (start, stop) not in self._cached_shapes:
            shapes = self._cached_shapes[start, stop] = []
            for a, b, _ in (
                (max(a, start), min(b, stop), layer) for a, b, layer in self._segments if a < stop and b > start
            ):
                whole = a + (b - a) // RUN * RUN
                shapes += [(a - start, whole - start, ((whole - a) // RUN, RUN))] if whole > a else []
                shapes += [(whole - start, b - start, (1, b - whole))] if b > whole else []
        return self._cached_shapes[start, stop]

    @cached_property
    def _cached_shapes(self) -> dict[tuple[int, int], list[tuple[int, int, tuple[int, int]]]]:
        return {}

    @cached_property
    def _layer_of_run(self) -> Tensor:
        return torch.tensor([layer for _, _, layer in self._runs])

    def gathered(self, per_run: Tensor) -> Tensor:
        """Sums over the runs of each layer; those of statistics may be left out: [..., runs] -> [..., L]."""
        layer = self._layer_of_run[: per_run.shape[-1]].to(per_run.device)
        return per_run.new_zeros(*per_run.shape[:-1], self.L).index_add_(-1, layer, per_run)

    def spread(self, per_layer: Tensor) -> Tensor:
        """A value for each layer, given to all its tensors, buffers included: [..., L] -> [..., T + Tb]."""
        return per_layer[..., self._group.to(per_layer.device)]

    def collect(self, per_tensor: Tensor) -> Tensor:
        """What `spread` gave back: the value of each layer's first tensor, [..., T + Tb] -> [..., L]."""
        return per_tensor[..., self._first.to(per_tensor.device)]

    @cached_property
    def _first(self) -> Tensor:
        return torch.tensor([self.groups.index(layer) for layer in range(self.L)])

    def expand(self, per_layer: Tensor) -> Tensor:
        """A value for each layer, given to all its parameters: [..., L] -> [..., P]."""
        return self.per_element(self.spread(per_layer)[..., : self.T])

    def per_element(self, per_tensor: Tensor) -> Tensor:
        """A value for each tensor, given to all its elements: [..., T] -> [..., P], or [..., T + Tb] -> [..., S]."""
        size = self.P if per_tensor.shape[-1] == self.T else self.S
        whole = per_tensor.new_empty(*per_tensor.shape[:-1], size)
        # Fifty times a repeat_interleave's speed.
        for spec, value in zip(self.tensors, per_tensor.unbind(-1), strict=False):
            whole[..., spec.start : spec.stop] = value[..., None]
        return whole

    def scaled(self, value: Tensor, per_tensor: Tensor) -> Tensor:
        """A copy of `value` [S] (or [P]) whose first tensors are multiplied by the factors `per_tensor` [T] or [T + Tb]."""
        result, first, stop = torch.empty_like(value), 0, 0
        for factor, run in itertools.groupby(per_tensor.to(value.dtype).tolist()):
            first += len(list(run))
            part = slice(stop, self.tensors[first - 1].stop)
            torch.mul(value[part], factor, out=result[part])
            stop = part.stop
        result[stop:] = value[stop:]
        return result

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

    def flatten(self, state: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """The value [S] of a state_dict. Raises `KeyError` or `ValueError` naming the tensor that does not fit."""
        value = torch.empty(self.S, dtype=dtype)
        for spec in self.tensors:
            if spec.name not in state:
                raise KeyError(f"the model's tensor {spec.name!r} is missing")
            if tuple(state[spec.name].shape) != spec.shape:
                raise ValueError(f"{spec.name} has shape {tuple(state[spec.name].shape)}, the model needs {spec.shape}")
            spec.view(value).copy_(state[spec.name])
        return value


Grouping = tuple[list[str], dict[str, int]]  # layer names; tensor name -> layer


def _group(specs: Sequence[TensorSpec], key) -> Grouping:
    """Layers in order of appearance of `key(spec)`."""
    names: dict[str, int] = {}
    group = {s.name: names.setdefault(key(s), len(names)) for s in specs}
    return list(names), group


def _unit(specs: Sequence[TensorSpec], blocks=()) -> Grouping:
    """A norm layer joins the unit before it; bare parameters join the first unit."""
    first = next((s.module for s in specs if not s.bare), specs[0].module)
    unit: dict[str, str] = {}  # module -> the unit it belongs to
    opened = first
    for spec in specs:
        if spec.bare:
            unit.setdefault(spec.module, first)
        else:
            opened = unit.setdefault(spec.module, opened if spec.norm else spec.module)
    return _group(specs, lambda s: unit[s.module])


def _module(specs: Sequence[TensorSpec], blocks=()) -> Grouping:
    return _group(specs, lambda s: s.name if s.bare else s.module)


def _tensor(specs: Sequence[TensorSpec], blocks=()) -> Grouping:
    """A layer for each parameter tensor. Statistics go with the parameter before them, as in a unit."""
    last = next((s.name for s in specs if s.kind == "parameter"), specs[0].name)
    layer: dict[str, str] = {}
    for spec in specs:
        last = layer[spec.name] = spec.name if spec.kind == "parameter" else last
    return _group(specs, lambda s: layer[s.name])


def _block(specs: Sequence[TensorSpec], blocks=()) -> Grouping:
    """One layer for each regular expression, in their order; every tensor must match one."""
    group = {}
    for spec in specs:
        match = next((i for i, pattern in enumerate(blocks) if re.search(pattern, spec.name)), None)
        if match is None:
            raise GroupingError(f"model.blocks: no pattern matches the tensor {spec.name!r}")
        group[spec.name] = match
    return list(blocks), group


def _bias_group(specs: Sequence[TensorSpec], blocks=()) -> Grouping:
    """The grouping of FedLWS's released code: a layer closes whenever a name contains "bias"."""
    names, group, closed = [], {}, True
    last_bias = max((i for i, s in enumerate(specs) if "bias" in s.name), default=len(specs))
    for index, spec in enumerate(specs):
        if closed and index <= last_bias:
            names.append(spec.name)
        group[spec.name] = len(names) - 1
        closed = "bias" in spec.name
    return names, group


GROUPINGS = {
    "unit": _unit,
    "module": _module,
    "tensor": _tensor,
    "entry": lambda specs, blocks=(): _group(specs, lambda s: s.name),  # of the state_dict, statistics included
    "block": _block,
    "model": lambda specs, blocks=(): _group(specs, lambda s: "model"),
    "bias_group": _bias_group,
}
