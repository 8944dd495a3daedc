"""Which tensors form a layer: the choices of `model.layer_by`. Each gets the tensors in the order of the state_dict."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from raysim.core.layout import TensorSpec

Grouping = tuple[list[str], dict[str, int]]  # layer names; tensor name -> layer
Blocks = Sequence[str]  # the regular expressions of `model.blocks`


class GroupingError(ValueError):
    """Tensors that cannot be grouped into layers as asked."""


def _by_key(specs: Sequence[TensorSpec], key: Callable[[TensorSpec], str]) -> Grouping:
    """Layers in order of appearance of `key(spec)`."""
    names: dict[str, int] = {}
    group = {s.name: names.setdefault(key(s), len(names)) for s in specs}
    return list(names), group


def _unit(specs: Sequence[TensorSpec], blocks: Blocks) -> Grouping:
    """A norm layer joins the unit before it; bare parameters join the first unit."""
    first = next((s.module for s in specs if not s.bare), specs[0].module)
    unit: dict[str, str] = {}  # module -> the unit it belongs to
    opened = first
    for spec in specs:
        if spec.bare:
            unit.setdefault(spec.module, first)
        else:
            opened = unit.setdefault(spec.module, opened if spec.norm else spec.module)
    return _by_key(specs, lambda s: unit[s.module])


def _module(specs: Sequence[TensorSpec], blocks: Blocks) -> Grouping:
    return _by_key(specs, lambda s: s.name if s.bare else s.module)


def _tensor(specs: Sequence[TensorSpec], blocks: Blocks) -> Grouping:
    """A layer for each parameter tensor. Statistics go with the parameter before them, as in a unit."""
    last = next((s.name for s in specs if s.kind == "parameter"), specs[0].name)
    layer: dict[str, str] = {}
    for spec in specs:
        last = layer[spec.name] = spec.name if spec.kind == "parameter" else last
    return _by_key(specs, lambda s: layer[s.name])


def _block(specs: Sequence[TensorSpec], blocks: Blocks) -> Grouping:
    """One layer for each regular expression, in their order; every tensor must match one."""
    group = {}
    for spec in specs:
        match = next((i for i, pattern in enumerate(blocks) if re.search(pattern, spec.name)), None)
        if match is None:
            raise GroupingError(f"model.blocks: no pattern matches the tensor {spec.name!r}")
        group[spec.name] = match
    return list(blocks), group


def _bias_group(specs: Sequence[TensorSpec], blocks: Blocks) -> Grouping:
    """The grouping of FedLWS's released code: a layer closes whenever a name contains "bias". A later one begins with the
    statistics of the norm before it, so that it is called after its first parameter."""
    layers: list[list[TensorSpec]] = []
    closed, last_bias = True, max((i for i, s in enumerate(specs) if "bias" in s.name), default=len(specs))
    for index, spec in enumerate(specs):
        if closed and index <= last_bias:
            layers.append([])
        layers[-1].append(spec)
        closed = "bias" in spec.name
    names = [next((s for s in layer if s.kind == "parameter"), layer[0]).name for layer in layers]
    return names, {spec.name: at for at, layer in enumerate(layers) for spec in layer}


GROUPINGS: dict[str, Callable[[Sequence[TensorSpec], Blocks], Grouping]] = {
    "unit": _unit,
    "module": _module,
    "tensor": _tensor,
    "entry": lambda specs, blocks: _by_key(specs, lambda s: s.name),  # of the state_dict, statistics included
    "block": _block,
    "model": lambda specs, blocks: _by_key(specs, lambda s: "model"),
    "bias_group": _bias_group,
}
