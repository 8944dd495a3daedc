"""What an instrument is: a pure observer of finished rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.core.facts import RunFacts
from raysim.core.note import Note
from raysim.core.probe import Probe
from raysim.core.server import Population
from raysim.lazy import Tensor
from raysim.registry import Named

if TYPE_CHECKING:
    from raysim.federation.round import Round


@dataclass(frozen=True)
class Instrument(Named):
    """Looks at a round when its new model is known and returns numbers for the table `notes`.

    It changes nothing: a run has the same bits with and without it. Rounds from which no client came back are not
    shown to it.
    """

    role: ClassVar[str] = "instrument"
    probes: ClassVar[tuple[Probe, ...]] = ()  # what clients are to measure for it as they train
    reads_models: ClassVar[bool] = False  # then the clients' models stay until the round is over
    needs_classes: ClassVar[bool] = False  # every sample has one class; other data are refused before the run starts

    def check(self, facts: RunFacts) -> str | None:
        """Why it cannot observe this run, as a sentence; None where it can."""
        return None

    def observe(self, done: Round, population: Population) -> Iterator[Note]:
        """What it sees of a round. `done.mixture` is not None: some client came back."""
        raise NotImplementedError

    def note(self, name: str, value: Tensor, *axes: str, clients: Sequence[int] | None = None) -> Note:
        """`value` under the instrument's name; `axes` as in `Server.note`."""
        value = value.detach().cpu().double()
        return Note(self.name, name, value, axes, None if clients is None else tuple(clients))
