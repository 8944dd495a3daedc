"""What the three kinds of methods have in common: a name, what they need, and what they refuse."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from difflib import get_close_matches
from types import FunctionType
from typing import Any, ClassVar, Literal

from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.lazy import nn
from raysim.registry import Named


@dataclass(frozen=True)
class Needs:
    """What a method needs of the run around it. What the run does not have is refused before it starts; what cannot go
    together is a table in `raysim/config/rules.py`."""

    classes: bool = False
    """Every sample has one class."""
    head: Literal["its parameters", "its latents"] | None = None
    """The model has a head; what the method takes of it."""
    proxy: bool = False
    """The server has proxy samples."""
    global_model: bool = False
    """What a client receives is the global model."""
    previous: Literal["trained", "initial"] | None = None
    """A client keeps the model that it trained last, as `run.previous`; "initial": a newcomer has there the model that the
    run began with, and not None."""
    peers: Literal["mixed", "whole"] | None = None
    """Every client's last upload is stored, for others and as `run.previous`. Clients receive a mixture of them, or them."""
    total_rounds: bool = False
    """The number of rounds in total, with which it computes; such a run cannot be extended."""
    gather_bytes: bool = False
    """`engine.gather_bytes`, because it asks `cohort.gathers`; a run then keeps it."""


FORMER = {
    "needs_classes": "classes=True", "needs_head": 'head="its latents"', "needs_proxy": "proxy=True",
    "needs_global": "global_model=True", "keeps_params": 'previous="trained"', "initial_previous": 'previous="initial"',
    "peer_models": 'peers="mixed"', "reads_total_rounds": "total_rounds=True", "reads_gather_bytes": "gather_bytes=True",
}  # fmt: skip
"""Former class attributes, and what to write instead."""


class Method(Named):
    """A client method, a weighting or a server step."""

    needs: ClassVar[Needs] = Needs()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if found := [f"needs = Needs({FORMER[old]}) for {old}" for old in FORMER if old in vars(cls)]:
            raise TypeError(f"{cls.__name__}: write {', '.join(found)}; Needs is raysim.Needs")
        hooks = {name for base in cls.__mro__[1:] for name in vars(base)}
        own = {name for name, value in vars(cls).items() if isinstance(value, FunctionType) and name[0] != "_"}
        if own and "role" not in vars(cls) and not own & hooks:  # helpers may stand beside hooks
            near = {match: None for name in sorted(own) for match in get_close_matches(name, hooks, 1)}
            meant = f" Did you mean {', '.join(near)}?" if near else ""
            note = f"{cls.__name__} overrides no hook: raysim does not call {', '.join(sorted(own))}.{meant}"
            warnings.warn(note, stacklevel=2)

    def check(self, facts: RunFacts) -> str | None:
        """What is wrong with the method's fields or with the run around it, as a sentence; None where nothing is."""
        return None

    def fits(self, model: nn.Module, layers: LayerMap, classes: int) -> str | None:
        """What is wrong with the run's network or data for this method; called before anything is started."""
        return None
