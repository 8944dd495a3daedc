"""Values that methods want recorded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FELL_BACK = "fell_back"
"""The note, 1 or 0, of a method with a way out where its rule gives nothing; the end of a run counts those rounds."""


@dataclass(frozen=True)
class Note:
    """A value that a method wants recorded; `axes` name its dimensions: "client", "layer", or anything for an index."""

    method: str
    name: str
    value: Tensor
    axes: tuple[str, ...]
    clients: tuple[int, ...] | None = None  # of the axis "client"; None: those that came back


def method_name(method: object) -> str:
    """The name under which notes and states of a method are kept: that of its class, in lower case."""
    return type(method).__name__.lower()
