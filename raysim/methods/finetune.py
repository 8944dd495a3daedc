"""FedAvg-C and FedProx-C: the global model fine-tuned at each client, the comparison of FedALA (Zhang et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raysim.core.bounds import NonNegativeInt
from raysim.core.client import ClientMethod, LocalRun, Passes, overrides
from raysim.core.facts import RunFacts
from raysim.methods.fedamp import FedAMP
from raysim.methods.sgdm import SGDM


@dataclass(frozen=True)
class FineTune(ClientMethod):
    """FedAvg-C, and beside `fedprox` FedProx-C (FedALA, 2023): fine-tune the download, test it, then train on.

    `ft_epochs` use the stack's own objective and optimiser, and its momentum continues into the training. The paper
    does not give their number; its times suggest about 14.

    Wrong choice where the time of a round counts: each client takes `ft_epochs` more passes over its samples.
    """

    ft_epochs: NonNegativeInt = 10
    """Passes that fine-tune the download before it is tested."""

    def check(self, facts: RunFacts) -> str | None:
        for method in facts.client:  # what `begin` of others would replace
            if isinstance(method, SGDM) and method.averages_more:
                return "trains before sgdm's mfl sets the momentum to the global one, which discards its own. Set reading: local."
            if isinstance(method, FedAMP) and method.init == "own":
                return "trains before fedamp loads the client's own model, which discards what it trained. Set init: cloud."
        other = next((method for method in facts.client if overrides(method, "train")), None)
        return f"trains all of the model in the usual way, and {other.name} in its own." if other else None

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray:
        return self.ft_epochs * passes.epoch(samples)

    def start(self, run: LocalRun) -> None:
        run.receive()
        run.fit(self.ft_epochs, purpose="finetune")
