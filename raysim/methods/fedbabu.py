"""FedBABU: Toward Enhanced Representation for Federated Image Classification (Oh et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.bounds import NonNegativeInt
from raysim.core.client import ClientMethod, LocalRun
from raysim.core.method import Needs


@dataclass(frozen=True)
class FedBABU(ClientMethod):
    """Only the body is trained and sent; the head stays as it was initialised (FedBABU, Oh et al., 2022).

    For a personal model, `ft_part` of the global model is fine-tuned for `ft_epochs` (5 in the original code, 10 in
    that of FedALA's authors); by default it is the global model. Clients are weighted by size, in the original they
    count alike.

    Wrong choice where the global model is used as it is: its head was never trained.
    """

    ft_epochs: NonNegativeInt = 0
    """Passes that fine-tune a personal model; 0: the global model is tested."""
    ft_part: Literal["all", "head"] = "all"
    """What these passes train."""
    personal_layers: ClassVar[str | None] = "head"
    needs: ClassVar[Needs] = Needs(head="its parameters")

    @property
    def trains_plainly(self) -> bool:
        return True

    def train(self, run: LocalRun) -> None:
        run.fit(only="body")

    def personal(self, run: LocalRun) -> None:
        super().personal(run)
        run.fit(self.ft_epochs, only=self.ft_part, purpose="personal")
