"""Poisson sampling (McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.core.selection import Asked, Clients, Selection
from raysim.core.server import Server
from raysim.lazy import torch


@dataclass(frozen=True)
class Poisson(Selection):
    """Each client takes part with the probability `rounds.participation` (McMahan et al., 2018, algorithm 1).

    How many do differs from round to round. Where none does, all are drawn again.

    Wrong choice where memory is tight: of N clients at the probability q, √(N q (1 − q)) more or fewer are usual.
    """

    def select(self, server: Server, participation: float, clients: Clients) -> Asked:
        stream, drawn = server.generator("poisson cohort"), list[int]()
        while not drawn:
            draws = torch.rand(len(server.population.sizes), generator=stream)
            drawn = clients.here[(draws < participation).numpy()[clients.here]].tolist()
        return Asked(tuple(drawn))
