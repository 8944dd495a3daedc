"""Poisson sampling (McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.core.selection import Asked, Durations, Selection
from raysim.core.server import Server
from raysim.lazy import torch


@dataclass(frozen=True)
class Poisson(Selection):
    """Each client takes part with the probability `rounds.participation` (McMahan et al., 2018, algorithm 1).

    How many do differs from round to round. Where none does, all are drawn again.

    Wrong choice where memory is tight: of N clients at the probability q, √(N q (1 − q)) more or fewer are usual.
    """

    def select(self, server: Server, participation: float, seconds: Durations) -> Asked:
        stream, clients = server.generator("poisson cohort"), list[int]()
        while not clients:
            draws = torch.rand(len(server.population.sizes), generator=stream)
            clients = (draws < participation).nonzero().flatten().tolist()
        return Asked(tuple(clients))
