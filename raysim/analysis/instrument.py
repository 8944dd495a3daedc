"""What an instrument is: a pure observer of finished rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from raysim.core.note import Note
from raysim.core.probe import Probe
from raysim.core.server import Population

if TYPE_CHECKING:
    from raysim.config import Config
    from raysim.federation import Round


@dataclass(frozen=True)
class Instrument:
    """Looks at a round when its new model is known and returns numbers for the table `notes`.

    It changes nothing: a run has the same bits with and without it. Rounds from which no client came back are not
    shown to it.
    """

    probes: ClassVar[tuple[Probe, ...]] = ()  # what clients are to measure for it as they train
    reads_models: ClassVar[bool] = False  # then the clients' models are kept until the round is over

    def check(self, config: Config) -> str | None:
        """Why it cannot observe this run, or None."""

    def observe(self, done: Round, population: Population) -> Iterator[Note]:
        raise NotImplementedError

    def note(self, name: str, value: Tensor, *axes: str, clients: Sequence[int] | None = None) -> Note:
        """`value` under the instrument's name; `axes` as in `Server.note`."""
        value = value.detach().cpu().double()
        return Note(type(self).__name__.lower(), name, value, axes, None if clients is None else tuple(clients))
