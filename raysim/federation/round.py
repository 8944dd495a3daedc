"""One round of federated learning, as straight-line code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from raysim.analysis.instrument import Instrument
from raysim.clock import Clock
from raysim.core.cohort import AskedCohort
from raysim.core.event import Event
from raysim.core.flat import difference, finite
from raysim.core.hooks import check_type
from raysim.core.local_run import RoundInfo
from raysim.core.mixture import Mixture
from raysim.core.note import Note
from raysim.core.rates import scheduled
from raysim.core.rng import SERVER, draw, stream_of, stream_seed
from raysim.core.score import Score
from raysim.core.server import Downlink, RoundScratch, Server
from raysim.engine.base import Handle
from raysim.engine.collectives import HostedCohort
from raysim.engine.dispatcher import Dispatcher, initialize, nothing
from raysim.engine.evaluation import evaluate, evaluate_clients
from raysim.engine.model_store import HostedModels
from raysim.engine.training import train
from raysim.federation.builder import RunParts
from raysim.federation.failures import RoundFailed, check_results, check_trained
from raysim.lazy import Tensor
from raysim.store.tables import PHASES


@dataclass(frozen=True)
class Started:
    """The clients that were not drawn and initialise all the same, what they were sent, and their new states."""

    clients: tuple[int, ...] = ()
    downlink: Downlink = field(default_factory=Downlink)
    states: Mapping[int, Handle] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """A finished round; instruments see it as a `raysim.core.round_view.RoundView`, before it is evaluated."""

    t: int
    drawn: tuple[int, ...]  # clients asked to take part
    cohort: HostedCohort
    dispatcher: Dispatcher  # which still holds the cohort's models
    downlink: Downlink
    mixture: Mixture | None  # None where no client came back
    before: Tensor  # [S] the global model that was sent
    target: Tensor  # [S] the aggregate, before server steps
    after: Tensor  # [S]
    notes: list[Note]
    seconds: dict[str, float]  # by phase
    events: list[Event]  # the clients that were left out
    started: Started
    changed: frozenset[int] = frozenset()  # clients that have another state or model than before
    score: Score | None = None  # of the new global model, where it was tested
    personal: dict[int, Score] = field(default_factory=dict)  # by client
    delivered: np.ndarray | None = None  # bytes of an encoded download, see `Broadcast.deliver`
    columns: Mapping[str, Any] = field(default_factory=dict)  # further columns of the round's row in the table `rounds`


class RunRound(Protocol):
    """What a federation calls for every round; another kind of round has the same form."""

    def __call__(
        self, run: RunParts, t: int, *, trace: bool, while_training: Callable[[], None]
    ) -> Round:  # fmt: skip
        """Run round t and commit it. `while_training` is called once the clients are busy; with `trace` they hand out
        what a reader needs to compute the round by hand."""
        ...


def run_round(
    run: RunParts, t: int, *, trace: bool = False, while_training: Callable[[], None] = nothing
) -> Round:  # fmt: skip
    """Sample, broadcast, train, plan, reduce, transform, evaluate. One round is one thing, so this is one function."""
    phases = Phases(run.spec.clock)
    server, engine, aggregator = run.server, run.engine, run.aggregator
    engine.grow()
    server.scratch = RoundScratch(t, learning_rate(run, t))
    info, sizes = round_info(server), server.population.sizes
    drawn = sample(server.seed, t, info.clients, run.cohort_size)
    clients = tuple(c for c, n in zip(drawn, sizes[list(drawn)].tolist(), strict=True) if n)

    downlink = aggregator.downlink(clients, HostedModels(engine), server)
    test = run.config.evaluate.personal == "after_train" and run.evaluates(t)
    retry = run.config.rounds.on_client_failure == "retry"
    dispatcher = Dispatcher(
        engine, info, clients, downlink, attackers=run.attackers, test=test, trace=trace, retry=retry
    )
    asked = AskedCohort(clients, sizes[list(clients)], server.layers)
    early = aggregator.plan_early(asked, server) if clients else None
    # Where the whole plan needs no result of training, models are summed as they are trained, and never stored.
    watched = any(instrument.reads_models for instrument in run.config.record.instruments)
    spied_on = any(map(run.attackers.waits, clients))
    sums_early = early is not None and aggregator.plans_early and not watched and not spied_on
    trained = train(dispatcher, server, early.mixture if early and sums_early else None, while_training)
    events = check_trained(trained, engine.nodes, run.config.rounds)
    cohort = HostedCohort(engine, dispatcher, trained)
    if early and cohort.clients == clients:
        early.adopt(server)
    else:
        early = None  # it is a plan of some that did not come back
    started = Started()
    if engine.spec.stack.starts_everyone:
        others = tuple(sorted({*sizes.nonzero().flatten().tolist()} - {*drawn}))
        sent = aggregator.downlink(others, HostedModels(engine), server)
        initial, new_states = initialize(engine, info, others, sent)
        events += check_results(initial, engine.nodes, f"round {t + 1}, its initialisation", run.config.rounds)
        started = Started(others, sent, new_states)
    delivered = run.broadcast.deliver(server, (*clients, *started.clients))
    phases.end("train")

    before, mixture, target = server.value, None, server.value
    server.scratch.notes.extend(note for c in cohort.clients for note in trained.results[c].notes)
    if cohort.clients:
        mixture = aggregator.plan(cohort, server, early)
        phases.end("plan")
        target = aggregator.reduce(mixture, cohort, server)
        phases.end("reduce")
        server.value = aggregator.transform(target, mixture, cohort, server)
        if not stays_finite(server.value, before):
            by = find_nonfinite_step(run, target, mixture, cohort)
            raise RoundFailed(f"round {t + 1}: {by} made a model that is not finite (NaN or Inf)")
        phases.end("server")
    done = Round(
        t, drawn, cohort, dispatcher, downlink, mixture, before, target, server.value, server.scratch.notes, phases.seconds, events,
        started, delivered=delivered,
    )  # fmt: skip
    if mixture is not None:
        # Before anything is committed: a host that is lost meanwhile trains its clients again from what they were sent.
        for instrument in run.config.record.instruments:
            done.notes.extend(observed(instrument, done, server))
        phases.end("observe")

    states = {**dispatcher.states, **started.states}
    engine.commit(states, dispatcher.models)
    run.broadcast.encode(server, t + 1)
    publish(run)
    done = replace(done, changed=frozenset(cohort.clients) | states.keys())
    return _evaluated(done, run, phases)


def publish(run: RunParts) -> None:
    """Give the hosts what the next round begins with."""
    run.engine.publish(run.server.value, run.server.shared, run.broadcast.public(run.server))


def _evaluated(done: Round, run: RunParts, phases: Phases) -> Round:
    """The round with the scores of the models that it has made."""
    score, left_out = None, list[Event]()
    personal = {c: result.test for c, result in done.cohort.trained.results.items() if result.test}
    if run.evaluates(done.t):
        if run.config.evaluate.global_ and len(run.partition.server_test):
            score = evaluate(run.engine, run.partition.server_test, done.t)
        if run.config.evaluate.personal == "after_init":
            personal, left_out = evaluate_personal(run, done.t + 1)
        phases.end("evaluate")
    return replace(done, score=score, personal=personal, events=done.events + left_out)


def observed(instrument: Instrument, done: Round, server: Server) -> list[Note]:
    """What one instrument sees of the round. Raises `HookError` where that is no notes."""
    with server.seeded_for(instrument, f"observe {stream_of(instrument)}"):
        made = instrument.observe(done, server.population)
        way = "Yield notes, as in yield self.note(name, value)"
        notes = [*check_type(instrument.observe, made, Iterable, way, server.t)]
    return [check_type(instrument.observe, note, Note, way, server.t) for note in notes]


def sample(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """The sorted cohort of round t: drawn without replacement from (seed, round) alone, so that methods share it."""
    return tuple(sorted(draw(clients, cohort, stream_seed(seed, t, SERVER, "cohort"))))


def learning_rate(run: RunParts, t: int) -> float:
    """The clients' learning rate in round t."""
    local = run.config.local
    return scheduled(local.lr * local.lr_decay**t, local.lr_schedule, t, run.config.rounds.total)


def round_info(server: Server) -> RoundInfo:
    """What the server and every client know of the server's round."""
    population = server.population
    mean_samples = int(population.sizes.sum()) / population.holders
    return RoundInfo(server.seed, server.t, server.rounds, len(population.sizes), server.lr, mean_samples)


def evaluate_personal(run: RunParts, t: int) -> tuple[dict[int, Score], list[Event]]:
    """Test, on each honest client's own test samples, the model it would receive in round t; and say who could not be tested.
    `evaluate.clients` limits them."""
    partition = run.partition
    holders = np.flatnonzero((partition.test.sizes > 0) & (partition.train.sizes > 0)).tolist()
    clients = [client for client in holders if client not in run.attackers]
    tested = len(clients) if run.config.evaluate.clients is None else min(run.config.evaluate.clients, len(clients))
    order = draw(len(clients), tested, stream_seed(run.server.seed, t, SERVER, "evaluate"))
    clients = sorted(clients[i] for i in order)
    server = replace(run.server, scratch=RoundScratch(t, learning_rate(run, t)))  # what is noted is not part of a round
    downlink = run.aggregator.downlink(clients, HostedModels(run.engine), server)
    results = evaluate_clients(run.engine, round_info(server), clients, downlink)
    left_out = check_results(results, run.engine.nodes, f"round {t}, test of its own model", run.config.rounds)
    return {client: result.test for client, result in results.results.items() if result.test}, left_out


def find_nonfinite_step(run: RunParts, target: Tensor, mixture: Mixture, cohort: HostedCohort) -> str:
    """Name the step that made the model non-finite. It runs the steps again; the run itself has failed already."""
    config, aggregator = run.config, run.aggregator
    if not stays_finite(target, cohort.server_value):
        names = [method.name for method in config.weighting]
        return f"weighting: {' or '.join(names)}" if names else "the mean of the clients' models"
    server = replace(run.server, value=cohort.server_value)
    for i, step in enumerate(aggregator.steps):
        target = aggregator.applied(i, target, mixture, cohort, server)
        if not stays_finite(target, cohort.server_value):
            owners = (("client", m) for m in config.client if type(step) in map(type, m.server_steps()))
            stack, method = next(owners, ("server", step))
            return f"{stack}: {method.name}"
    return f"model.bn_stats: {config.model.bn_stats}"


def stays_finite(value: Tensor, before: Tensor) -> bool:
    """Whether a model `value` [S] has no infinity or NaN that the one `before` did not have."""
    return finite(value) or finite(difference(value, before))


class Phases:
    """Seconds by phase; the phases are `raysim.store.tables.PHASES`, each with a column of its own."""

    def __init__(self, clock: Clock):
        self.seconds: dict[str, float] = {}
        self._clock, self._last = clock, clock.now()

    def end(self, phase: str) -> None:
        """The time since the last phase ended was spent in `phase`."""
        if phase not in PHASES:
            raise ValueError(f"{phase} is no phase of a round; raysim.store.tables.PHASES has {', '.join(PHASES)}")
        now = self._clock.now()
        self.seconds[phase] = now - self._last
        self._last = now
