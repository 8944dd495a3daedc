"""FedBABU: Toward Enhanced Representation for Federated Image Classification (Oh et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.client import ClientMethod, LocalRun


@dataclass(frozen=True)
class FedBABU(ClientMethod):
    """Only the body is trained and sent; the head stays as all drew it together (FedBABU, Oh et al., 2022).

    For a personal model `ft_part` of the global one is fine-tuned for `ft_epochs` (the original code: 5, FedALA's
    authors: 10); by default it is the global model. The mean is by size, the original's is uniform.
    """

    ft_epochs: int = 0
    """Passes that fine-tune a personal model; 0: the global model is tested."""
    ft_part: Literal["all", "head"] = "all"
    """What these passes train."""
    personal_layers: ClassVar[str | None] = "head"

    def train(self, run: LocalRun) -> None:
        run.fit(only="body")

    def personal(self, run: LocalRun) -> None:
        super().personal(run)
        run.fit(self.ft_epochs, only=self.ft_part, purpose="personal")
