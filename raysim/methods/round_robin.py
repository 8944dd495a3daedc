"""Round robin (Yang et al., Scheduling Policies for Federated Learning in Wireless Networks, IEEE TCOM 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.core.facts import cohort_size
from raysim.core.rng import SERVER, draw, stream_seed
from raysim.core.selection import Asked, Clients, Selection
from raysim.core.server import Server


@dataclass(frozen=True)
class RoundRobin(Selection):
    """All clients in turn (Yang et al., 2020), in a new random order each time.

    The last round of a pass has those that are left. In the place of clients that are not available come the next that are.

    Wrong choice with privacy by sampling: every client takes part once in a pass, so no chance hides it.
    """

    def select(self, server: Server, participation: float, clients: Clients) -> Asked:
        population = len(server.population.sizes)
        count = cohort_size(participation, population)
        turn, place = divmod(server.t, -(-population // count))
        order = draw(population, population, stream_seed(server.seed, turn, SERVER, "round robin"))
        wanted, here = len(order[place * count : (place + 1) * count]), {*clients.here.tolist()}
        waiting = order[place * count :] + order[: place * count]
        return Asked(tuple(sorted([client for client in waiting if client in here][:wanted])))
