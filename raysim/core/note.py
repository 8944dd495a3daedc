"""Values that methods want recorded."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.lazy import Tensor

FELL_BACK = "fell_back"
"""The note, 1 or 0, of a method with a way out where its rule gives nothing; the end of a run counts those rounds.

L-DAWA's warm-up is no such way out: it is part of the rule. Nor is what a method does with a single layer of norm zero
(L-DAWA, FedLWS), whose other layers follow the rule.
"""


@dataclass(frozen=True)
class Note:
    """A value that a method wants recorded; `axes` name its dimensions: "client", "layer", or anything for an index.

    Of a sparse value the entries are recorded; with an axis "peer" only where `record.pairs` asks for it. Raises
    `ValueError` for more than one index, for which the table has no column.
    """

    method: str
    name: str
    value: Tensor
    axes: tuple[str, ...]
    clients: tuple[int, ...] | None = None  # of the axis "client"; None: those that came back

    def __post_init__(self) -> None:
        if len({*self.axes} - {"client", "layer"}) > 1:
            raise ValueError(
                f"note {self.name!r}: its axes are {', '.join(self.axes)}; beside client and layer there is one"
            )
