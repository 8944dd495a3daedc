"""What a method or an instrument may know of the whole run before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.core.optim import OptimizerSpec

if TYPE_CHECKING:
    from raysim.core.attack import Attack
    from raysim.core.client import ClientMethod
    from raysim.core.message import Transform
    from raysim.core.selection import Selection
    from raysim.core.server import ServerStep, Weighting


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that `check` judges. They are known before any data are read."""

    rounds: int
    """Rounds in total."""
    participation: float
    """Fraction of the clients drawn each round."""
    clients: int | None
    """Clients in the federation; None where the data decide."""
    client_val_frac: float
    """Share of each client's samples that is held out for validation."""
    proxy_samples: int
    """Samples that the server owns."""
    lr: float
    """Local learning rate of round 0."""
    optimizer: OptimizerSpec
    """Local optimiser, as configured."""
    persist: bool
    """Whether a client's optimiser keeps its momentum between rounds."""
    client: tuple[ClientMethod, ...]
    """Client methods, in the order of the configuration."""
    weighting: tuple[Weighting, ...]
    """Weightings, in the order of the configuration."""
    server: tuple[ServerStep, ...]
    """Server steps, in the order of the configuration, without those that client methods bring."""
    upload: tuple[Transform, ...] = ()
    """What changes the clients' messages, in the order of the configuration."""
    download: tuple[Transform, ...] = ()
    """What changes the server's, likewise."""
    attack: tuple[Attack, ...] = ()
    """What malicious clients send."""
    selection: Selection | None = None
    """Who takes part; None: as many as `participation` says."""

    @property
    def cohort_size(self) -> int | None:
        """Clients that take part in a round; None where the data decide."""
        if not self.clients or self.clients < 0:
            return None
        asked = self.selection.asked if self.selection else cohort_size
        return asked(self.participation, self.clients)

    @property
    def every_weighting(self) -> tuple[Weighting, ...]:
        """Weightings of the configuration, and those that the selection brings."""
        return (*self.weighting, *(self.selection.weightings() if self.selection else ()))

    @property
    def senders(self) -> int | None:
        """Clients that send each layer: those of a round, or so many as a weighting lets send; None where the data decide."""
        return min((n for n in (self.cohort_size, *(w.senders for w in self.weighting)) if n is not None), default=None)


def cohort_size(participation: float, clients: int) -> int:
    """Clients that take part in a round of a federation of `clients`: at least one."""
    return max(1, int(participation * clients + 1e-9))  # 0.29 * 100 is 28.999...
