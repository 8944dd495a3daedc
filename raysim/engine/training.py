"""A round's training, in the order in which clients must send."""

from __future__ import annotations

from collections.abc import Callable

from raysim.core.mixture import Mixture
from raysim.core.rng import stream_of
from raysim.core.server import Server
from raysim.engine.collectives import HostedCohort
from raysim.engine.dispatcher import Dispatcher, TrainedCohort


def train(
    dispatcher: Dispatcher, server: Server, early: Mixture | None, while_training: Callable[[], None]
) -> TrainedCohort:  # fmt: skip
    """Train the round's clients; those whose attack sees what others send come last."""
    attackers = dispatcher.attackers
    last = tuple(client for client in dispatcher.asked if attackers.waits(client))
    first = tuple(client for client in dispatcher.asked if not attackers.waits(client))
    if not last or not first:
        return dispatcher.train(early, while_training)
    trained = dispatcher.train(None, while_training, first)
    others = HostedCohort(dispatcher.engine, dispatcher, trained)
    for i, attack in enumerate(attackers.attacks):
        malicious = [client for client in last if client in attackers.clients[i]]
        if attack.sees_others and malicious and others.clients:
            with server.seeded_for(attack, f"attack {stream_of(attack)}"):
                known = attack.known(others, len(malicious), server)
            if known is not None:
                dispatcher.inform(i, known.numpy())
    return dispatcher.train(clients=last)
