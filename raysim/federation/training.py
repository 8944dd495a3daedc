"""A round's training: what clients are sent, in which order they must send, and what is known of the plan before."""

from __future__ import annotations

from collections.abc import Callable

from raysim.core.aggregator import EarlyPlan
from raysim.core.cohort import AskedCohort
from raysim.core.mixture import Mixture
from raysim.core.rng import stream_of
from raysim.core.selection import Asked
from raysim.engine.collectives import HostedCohort
from raysim.engine.dispatcher import Dispatcher, TrainedCohort
from raysim.engine.model_store import HostedModels
from raysim.federation.builder import RunParts
from raysim.federation.versions import round_info


def send(run: RunParts, asked: Asked, *, trace: bool) -> Dispatcher:
    """Who is to train, and what each of them is sent; those without samples and those that the round loses are left out."""
    server, sizes = run.server, run.server.population.sizes[list(asked.clients)].tolist()
    clients = tuple(client for client, n in zip(asked.clients, sizes, strict=True) if n and client not in asked.lost)
    return Dispatcher(
        run.engine, round_info(server), clients, run.aggregator.downlink(clients, HostedModels(run.engine), server),
        starts=run.versions.starts(asked, server), attackers=run.attackers, trace=trace,
        test=run.config.evaluate.personal == "after_train" and run.evaluates(server.t),
        retry=run.config.rounds.on_client_failure == "retry",
    )  # fmt: skip


def train(
    run: RunParts, dispatcher: Dispatcher, while_training: Callable[[], None]
) -> tuple[HostedCohort, EarlyPlan | None]:  # fmt: skip
    """Train the clients: those that came back, and what was planned of them before they trained."""
    server, aggregator, clients = run.server, run.aggregator, dispatcher.asked
    asked = AskedCohort(clients, server.population.sizes[list(clients)], server.layers)
    early = aggregator.plan_early(asked, server) if clients else None
    # Where the whole plan needs no result of training, models are summed as they are trained, and never stored.
    watched = any(instrument.reads_models for instrument in run.config.record.instruments)
    sums = early is not None and aggregator.plans_early and not watched and not any(map(run.attackers.waits, clients))
    trained = _in_order(run, dispatcher, early.mixture if early and sums else None, while_training)
    cohort = HostedCohort(run.engine, dispatcher, trained, run.versions.buffers(trained.clients, server))
    if early is None or trained.clients != clients:
        return cohort, None  # it is a plan of some that did not come back
    early.adopt(server)
    return cohort, early


def _in_order(
    run: RunParts, dispatcher: Dispatcher, early: Mixture | None, while_training: Callable[[], None]
) -> TrainedCohort:  # fmt: skip
    """Those whose attack sees what others send come last."""
    attackers, server = run.attackers, run.server
    last = tuple(client for client in dispatcher.asked if attackers.waits(client))
    first = tuple(client for client in dispatcher.asked if not attackers.waits(client))
    if not last or not first:
        return dispatcher.train(early, while_training)
    trained = dispatcher.train(None, while_training, first)
    others = HostedCohort(run.engine, dispatcher, trained, run.versions.buffers(trained.clients, server))
    for i, attack in enumerate(attackers.attacks):
        malicious = [client for client in last if client in attackers.clients[i]]
        if attack.sees_others and malicious and others.clients:
            with server.seeded_for(attack, f"attack {stream_of(attack)}"):
                known = attack.known(others, len(malicious), server)
            if known is not None:
                dispatcher.inform(i, known.numpy())
    return dispatcher.train(clients=last)
