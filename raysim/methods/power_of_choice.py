"""Power-of-choice (Cho, Wang and Joshi, Towards Understanding Biased Client Selection in Federated Learning, AISTATS 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.core.bounds import PositiveInt
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts, cohort_size
from raysim.core.method import Needs
from raysim.core.probe import Probe, TrainingLoss
from raysim.core.selection import Asked, Clients, Selection
from raysim.core.server import Server, Weighting
from raysim.lazy import torch
from raysim.methods.fedavg import FedAvg


@dataclass(frozen=True)
class PowerOfChoice(Selection):
    """Of d candidates, drawn by their samples, the K with the highest loss (Cho et al., 2022, section 4). All count the same.

    Candidates are sent the model and send a number, which takes traffic and simulated time; with `last` they do not.

    Wrong choice where some clients' labels are wrong: their losses stay the highest, and they are chosen again and again.
    """

    candidates: PositiveInt | None = None
    """d, how many are drawn without replacement; null: 2K."""
    estimate: Literal["full", "batch", "last"] = "full"
    """Whose loss: the global model's on all samples of a candidate; on one batch of them (the paper's cpow-d); or the mean of its
    last training (rpow-d), where newcomers come first."""

    needs: ClassVar[Needs] = Needs(global_model=True)

    def check(self, facts: RunFacts) -> str | None:
        least = cohort_size(facts.participation, facts.clients) if facts.clients and facts.clients > 0 else None
        if self.candidates is not None and least is not None:
            if self.candidates < least:
                return f"candidates {self.candidates} is fewer than the {least} clients of a round."
            if self.candidates > (facts.clients or 0):
                return f"candidates {self.candidates} is more than the federation's {facts.clients} clients."
        return None if self.estimate == "last" else super().check(facts)

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (TrainingLoss(),) if self.estimate == "last" else ()

    def weightings(self) -> tuple[Weighting, ...]:
        return (FedAvg("uniform"),)

    def select(self, server: Server, participation: float, clients: Clients) -> Asked:
        sizes = torch.zeros(len(server.population.sizes), dtype=torch.float64)
        sizes[clients.here] = server.population.sizes[clients.here].double()
        count = cohort_size(participation, len(sizes))
        drawn = min(max(self.candidates or 2 * count, count), int(sizes.count_nonzero()))
        stream = server.generator("candidates")
        candidates = torch.multinomial(sizes, drawn, generator=stream).sort().values.tolist()
        if self.estimate == "last":
            losses = self._reported(server)[candidates]
        else:
            losses = clients.losses(candidates, batch=self.estimate == "batch")
        chosen = highest(candidates, losses, count)
        known = {client: loss for client, loss in zip(candidates, losses.tolist(), strict=True) if np.isfinite(loss)}
        if self.estimate == "last":  # else those that are not chosen have rows of the table `clients`
            server.note(self, "loss", torch.tensor([*known.values()]), "client", clients=[*known])
        return Asked(chosen, utility=known, selected_by=dict.fromkeys(chosen, "loss"))

    def learn(self, cohort: Cohort, server: Server) -> None:
        if self.estimate == "last":
            losses = self._reported(server)
            reported = cohort.stat(TrainingLoss()).numpy()
            losses[list(cohort.clients)] = np.where(np.isnan(reported), np.inf, reported)
            server.memory[self] = {"losses": torch.from_numpy(losses)}

    def _reported(self, server: Server) -> np.ndarray:
        """[N] each client's last loss; infinite where there is none."""
        if self not in server.memory:
            return np.full(len(server.population.sizes), np.inf)
        losses: np.ndarray = server.memory[self]["losses"].numpy().copy()
        return losses


def highest(clients: Sequence[int], losses: np.ndarray, count: int) -> tuple[int, ...]:
    """The `count` of the `clients` (sorted) with the highest losses, sorted; of equals those with the lower id."""
    order = np.argsort(-losses, kind="stable")[:count]  # NaN comes last
    return tuple(sorted(clients[i] for i in order))
