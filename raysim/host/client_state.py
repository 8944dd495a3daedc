"""A client's state as named arrays, in which form it travels and is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raysim.core.arrays import to_numpy
from raysim.core.client import ClientMethod
from raysim.core.hooks import misused
from raysim.core.layers import LayerMap
from raysim.core.local_run import ClientState, LocalRun
from raysim.core.message import Transform
from raysim.core.method import Method
from raysim.core.state import pack, unpack
from raysim.host.messages import Arrays, HostSpec
from raysim.lazy import Tensor, torch

RESERVED = ("previous", "personal", "buffers", "optimizer")  # the simulator's own entries


class StateFormat:
    """Names the arrays: NAME.FIELD for the state of a method, an entry of `RESERVED`, or `optimizer.FIELD`."""

    def __init__(self, spec: HostSpec, layers: LayerMap, device: torch.device):
        self.stack, self.settings, self.layers, self.device = spec.stack, spec.settings, layers, device
        self.prefixes = {prefix(method, spec.keepers): method for method in spec.keepers}
        self._types = {name: type(method.new_state(layers)) for name, method in self.prefixes.items()}

    def pack(self, run: LocalRun) -> Arrays:
        """What the client keeps after `run`, as copies."""
        state: dict[str, Tensor] = {}
        for name, method in self.prefixes.items():
            own = run.state(method)
            if own is not None:
                state |= {f"{name}.{field}": value for field, value in _packed(method, own).items()}
        if self.stack.keeps_params:
            state["previous"] = run.value
        if self.stack.personal_layers:
            state["personal"] = run.params[self.layers.span(self.stack.personal_layers)]
        if self.settings.local_buffers:
            state["buffers"] = run.buffers
        if self.settings.persist:
            state |= {f"optimizer.{name}": tensor for name, tensor in run.optimizer.state().items()}
        return {name: to_numpy(tensor) for name, tensor in state.items()}

    def unpack(self, arrays: Arrays) -> ClientState:
        """Copies: the arrays may be shared, and the new state counts only once the round is committed."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, array in arrays.items():
            owner, _, field = name.partition(".")
            parts.setdefault(owner, {})[field] = torch.tensor(array, device=self.device)
        methods = {
            method.name: unpack(self._types[name], parts[name])
            for name, method in self.prefixes.items()
            if name in parts
        }
        whole = {name: parts[name][""] for name in ("previous", "personal", "buffers") if name in parts}
        return ClientState(methods, optimizer=parts.get("optimizer"), **whole)


def _packed(method: ClientMethod | Transform, state: Any) -> Mapping[str, Tensor]:
    try:
        return pack(state)
    except (TypeError, ValueError) as error:
        way = "It must be a dataclass of tensors and numbers, whatever the hooks put into it"
        raise misused(method.new_state, f"has made a state that cannot be saved: {error}", way) from None


def prefix(method: Method, methods: Sequence[Method]) -> str:
    """The class's name in lower case, which is part of a run's hash; the method's where two of the `methods` would have the
    same. One that is reserved is followed by a sign that no name of a class has."""
    words = {type(one).__name__.lower() for one in methods}
    name = type(method).__name__.lower() if len(words) == len(methods) else method.name
    return f"{name}~" if name in RESERVED else name
