"""Layers of a model: which tensors each has, sums over its elements, and values that it hands to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from raysim.core.grouping import GROUPINGS, GroupingError
from raysim.core.layout import Layout, TensorSpec, constants_of, tensors_of, tied_in
from raysim.core.segments import Segments, indices, segments_of
from raysim.lazy import Tensor, nn, torch

__all__ = ["GROUPINGS", "GroupingError", "LayerMap", "TensorSpec"]


@dataclass(frozen=True)
class LayerMap(Layout):
    """A `Layout` whose tensors are collected into `L` layers.

    A mixture has one column a tensor; a method computes on layers and expands its result over their tensors.
    """

    names: tuple[str, ...]  # L layer names
    groups: tuple[int, ...]  # layer of every tensor

    @classmethod
    def of(
        cls, model: nn.Module, by: str = "unit", blocks: Sequence[str] = (), channels_last: bool = False,
        head: str | None = None, counted: Set[str] = frozenset(),
    ) -> LayerMap:  # fmt: skip
        """Lay out `model`; `by` is a key of `GROUPINGS`, for `head` and `counted` see `Layout`. Raises `GroupingError` where
        `blocks` leave a tensor out, and `StageError`."""
        specs = tensors_of(model, channels_last, head, counted)
        constants, tied = constants_of(model, counted, channels_last), tied_in(model)
        tied = {name: known for name, known in tied.items() if name not in constants}
        if not any(spec.kind == "parameter" for spec in specs):
            raise GroupingError("the model has nothing to train: it has no parameters, or all are frozen")
        return cls(specs, *_grouped(specs, by, blocks), head=head, constants=constants, tied=tied)

    def regroup(self, by: str, blocks: tuple[str, ...] = ()) -> LayerMap:
        """The same vector under another grouping."""
        key = by, tuple(blocks)
        if key not in self._regrouped:
            names, groups = _grouped(self.tensors, *key)
            self._regrouped[key] = replace(self, names=names, groups=groups)
        return self._regrouped[key]

    @cached_property
    def _regrouped(self) -> dict[tuple[str, tuple[str, ...]], LayerMap]:
        return {}

    @property
    def L(self) -> int:
        """Layers."""
        return len(self.names)

    @cached_property
    def counts(self) -> Tensor:
        """Parameters of every layer, int64 [L]."""
        return torch.zeros(self.L, dtype=torch.long).index_add_(
            0, torch.tensor(self.groups[: self.T]), self.sizes[: self.T]
        )

    # Sums over the elements of each layer.

    @cached_property
    def segments(self) -> Segments:
        """Where the elements of each layer lie."""
        return Segments(segments_of(self.tensors, self.groups, self.P), self.P, self.L)

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Inner products per layer, float64: [..., P] (or whole values [..., S]) -> [..., L]."""
        return self.segments.dots(a, b)

    def norms(self, flat: Tensor) -> Tensor:
        """L2 norm of every layer, float64: [..., P] (or [..., S]) -> [..., L]; see `Segments.squares`."""
        return self.segments.per_layer(self.segments.squares(flat)).sqrt()

    # Values of layers, tensors and elements.

    def expand(self, per_layer: Tensor) -> Tensor:
        """A value for each layer, given to all its tensors, buffers included: [..., L] -> [..., T + Tb]."""
        return per_layer[..., indices(self.groups, per_layer.device)]

    def collect(self, per_tensor: Tensor) -> Tensor:
        """What `expand` was given: the value of each layer's first tensor, [..., T + Tb] -> [..., L]."""
        return per_tensor[..., indices(self._first, per_tensor.device)]

    @cached_property
    def _first(self) -> tuple[int, ...]:
        return tuple(self.groups.index(layer) for layer in range(self.L))

    def per_parameter(self, per_layer: Tensor) -> Tensor:
        """A value for each layer, given to all its parameters: [..., L] -> [..., P]."""
        return self.per_element(self.expand(per_layer)[..., : self.T])

    def per_element(self, per_tensor: Tensor) -> Tensor:
        """A value for each tensor, given to all its elements: [..., T] -> [..., P], or [..., T + Tb] -> [..., S]."""
        size = self.P if per_tensor.shape[-1] == self.T else self.S
        whole = per_tensor.new_empty(*per_tensor.shape[:-1], size)
        # A loop over tensors has fifty times the speed of repeat_interleave.
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


def _grouped(specs: tuple[TensorSpec, ...], by: str, blocks: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of the layers, and the layer of every tensor."""
    names, group = GROUPINGS[by](sorted(specs, key=lambda s: s.order), blocks)
    return tuple(names), tuple(group[s.name] for s in specs)
