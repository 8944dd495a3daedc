"""Error feedback (Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., ICML 2019)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.message import Message, Sender, Transform
from raysim.lazy import Tensor


@dataclass
class Errors:
    """What was not received yet."""

    of: dict[str, Tensor] = field(default_factory=dict)  # by vector, [P]; not there: zero


@dataclass(frozen=True)
class ErrorFeedback(Transform):
    """Adds to each message what earlier ones have lost: sends C(v), v = Δ + e, and keeps e = v - C(v) (Karimireddy et al., 2019,
    algorithm 1).

    It comes first; C is all that follows. Every client keeps as many numbers as the model has parameters, and they change only
    once its upload counts. Wrong choice where few clients take part: what they keep grows old.
    """

    corrects: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        if self in facts.download:
            return "is for uploads: encoded changes of the server's model correct themselves."
        if type(facts.upload[0]) is not type(self):
            return "corrects what follows it in the list. List it first."
        if len(facts.upload) == 1:
            return "corrects what follows it in the list, and nothing does. Add a compressor, such as top_k."
        for weighting in facts.weighting:
            if weighting.stage == "select":
                return f"a client would have to know before it sends what {weighting.name} lets it send."
        return None

    def new_state(self, layers: LayerMap) -> Errors:
        return Errors()

    def apply(self, message: Message, sender: Sender, rest: Callable[[], None]) -> None:
        errors = sender.state(self).of
        for part in message.parts:
            if part.of not in errors:
                errors[part.of] = part.values.new_zeros(message.layers.P)
            part.values = part.values + message.within(part, errors[part.of])
        wanted = [part.values.clone() for part in message.parts]
        rest()
        for part, value in zip(message.parts, wanted, strict=True):
            message.put(part, errors[part.of], value - part.target)
