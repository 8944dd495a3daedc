"""FedBABU: Toward Enhanced Representation for Federated Image Classification (Oh et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.client import ClientMethod, LocalRun


@dataclass(frozen=True)
class FedBABU(ClientMethod):
    """Only the body is trained and sent; the head stays as all drew it together (FedBABU, Oh et al., 2022).

    A personal model is the global one after `ft_epochs` of fine-tuning `ft_part` of it (the original code: 5, the code
    of FedALA's authors: 10); with 0, the default, it is the global model. The mean is by size; the original's is uniform.
    """

    ft_epochs: int = 0
    ft_part: Literal["all", "head"] = "all"
    personal_layers: ClassVar[str | None] = "head"

    def train(self, run: LocalRun) -> None:
        run.fit(only="body")

    def personal(self, run: LocalRun) -> None:
        run.stack.start(run)
        run.fit(self.ft_epochs, only=self.ft_part, purpose="personal")
