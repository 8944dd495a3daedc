"""One round of federated learning, as straight-line code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from raysim.analysis.instrument import Instrument
from raysim.clock import Clock
from raysim.core.event import Event
from raysim.core.flat import difference, finite
from raysim.core.hooks import check_type, misused
from raysim.core.mixture import Mixture
from raysim.core.note import Note
from raysim.core.rng import SERVER, draw, stream_of, stream_seed
from raysim.core.score import Score
from raysim.core.selection import ABANDONED, Asked
from raysim.core.server import Downlink, RoundScratch, Server
from raysim.engine.base import Handle
from raysim.engine.collectives import HostedCohort
from raysim.engine.dispatcher import Dispatcher, initialize, nothing
from raysim.engine.evaluation import evaluate, evaluate_clients
from raysim.engine.model_store import HostedModels
from raysim.engine.requests import Start
from raysim.federation import expected
from raysim.federation.builder import RunParts, learning_rate
from raysim.federation.candidates import NOW, RunClients
from raysim.federation.failures import RoundFailed, check_results, check_trained
from raysim.federation.simulated_time import expected_asking, expected_seconds
from raysim.federation.training import send, train
from raysim.federation.versions import round_info
from raysim.lazy import Tensor, torch
from raysim.store.tables import PHASES

RETRIES = 10  # of a round in which too few clients return


@dataclass(frozen=True)
class Started:
    """The clients that were not drawn and initialise all the same, what they were sent, and their new states."""

    clients: tuple[int, ...] = ()
    downlink: Downlink = field(default_factory=Downlink)
    states: Mapping[int, Handle] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """A finished round; instruments see it before it is evaluated."""

    t: int
    asked: Asked  # to take part
    cohort: HostedCohort
    dispatcher: Dispatcher  # which still holds the cohort's models
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

    @property
    def drawn(self) -> tuple[int, ...]:
        """The clients that were asked to take part; among them those without training samples."""
        return self.asked.clients

    @property
    def others(self) -> tuple[int, ...]:
        """The clients that were sent the model and did not train: who started, was not chosen, or was lost, in this order."""
        return others(self.asked, self.started)

    @property
    def downlink(self) -> Downlink:
        """What they were sent."""
        return self.dispatcher.downlink


def others(asked: Asked, started: Started) -> tuple[int, ...]:
    """See `Round.others`."""
    not_chosen = (client for client in asked.not_chosen if client not in started.clients)
    return *started.clients, *not_chosen, *asked.lost


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
    """Run round t."""
    phases, server, aggregator = Phases(run.spec.clock), run.server, run.aggregator
    run.engine.grow()
    server.scratch = RoundScratch(t, learning_rate(run.config, t))

    # Select.
    pool = RunClients(run, run.engine)
    asked = server.scratch.asked = select(run, pool)

    # Send.
    dispatcher = send(run, asked, trace=trace)

    # Test those who take part.
    personal, left_out = dict[int, Score](), list[Event]()
    if run.config.evaluate.personal == "before_train" and run.evaluates(t):
        phases.end("train")
        personal, left_out = evaluate_personal(run, t, dispatcher.asked, run.versions.starts(asked, server))
        phases.end("evaluate")

    # Train; the malicious attack.
    cohort, early = train(run, dispatcher, while_training)

    # Arrive.
    events = (
        pool.events + left_out + check_trained(cohort.trained, run.engine.nodes, run.config.rounds, needed(run, asked))
    )
    started = start_others(run, asked, events)
    delivered = run.broadcast.deliver(server, (*dispatcher.asked, *others(asked, started)))
    server.scratch.notes.extend(note for c in cohort.clients for note in cohort.trained.results[c].notes)
    phases.end("train")

    before, mixture, target = server.value, None, server.value
    if cohort.clients:
        learn(run, cohort)

        # Plan.
        mixture = aggregator.plan(cohort, server, early)
        phases.end("plan")

        # Combine or reduce.
        target = aggregator.reduce(mixture, cohort, server)
        phases.end("reduce")

        # Server steps.
        server.value = aggregator.transform(target, mixture, cohort, server)
        if not stays_finite(server.value, before):
            by = find_nonfinite_step(run, target, mixture, cohort)
            raise RoundFailed(f"round {t + 1}: {by} made a model that is not finite (NaN or Inf)")
        phases.end("server")
    if NOW in server.memory:
        ends_at(server, float(server.memory[NOW]) + run.config.clock.of_server(server.trained))
    done = Round(
        t, asked, cohort, dispatcher, mixture, before, target, server.value, server.scratch.notes, phases.seconds,
        events + server.scratch.warnings, started, delivered=delivered,
    )  # fmt: skip

    # Observe, before anything counts: a host that is lost meanwhile trains its clients again from what they were sent.
    if mixture is not None:
        for instrument in run.config.record.instruments:
            done.notes.extend(observed(instrument, done, server))
        phases.end("observe")

    # Commit.
    states = {**dispatcher.states, **started.states}
    run.engine.commit(states, dispatcher.models)
    run.broadcast.encode(server, t + 1)
    publish(run)

    # Evaluate.
    changed = frozenset(cohort.clients) | states.keys()
    return _evaluated(replace(done, changed=changed, personal=personal), run, phases)


def select(run: RunParts, pool: RunClients) -> Asked:
    """The round's clients, and which of them it loses. Where too few return, others are asked; in the end it may lose all."""
    on_few, least, passed = run.config.clock.on_few, run.config.rounds.min_clients, 0.0
    asked = tried = closed(run, pool, choose(run, pool))
    for _ in range(RETRIES):
        if not too_few(run, tried) or on_few != "retry":
            break
        if (later := pool.retry(tried.clients, tried.lasts or 0.0)) is None:
            break
        passed += later
        tried = closed(run, pool, choose(run, pool))
        asked = asked.again(tried, passed)
        asked = replace(asked, lost={c: why for c, why in asked.lost.items() if run.server.population.sizes[c]})
    if not too_few(run, tried):
        return asked
    few = f"of {len(asked.clients)} clients fewer than {least}, which is rounds.min_clients, return in simulated time"
    if on_few == "stop":
        raise RoundFailed(f"round {run.server.t + 1}: {few}. Start another run with clock.on_few: retry or proceed.")
    pool.events.append(Event("run", f"{few}; the model stays as it is"))
    return replace(
        asked, lost={c: asked.lost.get(c, ABANDONED) for c in asked.clients if run.server.population.sizes[c]}
    )


def too_few(run: RunParts, asked: Asked) -> bool:
    """Whether the round loses so many on the simulated clock that it cannot do with the others."""
    used = [client for client in asked.clients if run.server.population.sizes[client] and client not in asked.lost]
    return bool(asked.lost) and len(used) < needed(run, asked)


def needed(run: RunParts, asked: Asked) -> int:
    """How many clients must come back: where the clock has lost some, any number may do."""
    return 0 if asked.lost and run.config.clock.on_few == "proceed" else run.config.rounds.min_clients


def choose(run: RunParts, pool: RunClients) -> Asked:
    """The clients that the run's selection asks, from all, the `pool`."""
    selection, server, clock = run.config.rounds.selection, run.server, run.config.clock
    participation = run.config.rounds.participation
    if clock.over_select:
        population = len(server.population.sizes)
        participation = min(clock.asks(run.cohort_size), population) / population
    with server.seeded_for(selection, f"select {stream_of(selection)}"):
        made = selection.select(server, participation, pool)
    asked: Asked = check_type(selection.select, made, Asked, "Return raysim.Asked(clients)", server.t)
    clients, known = asked.clients, range(len(server.population.sizes))
    if not clients or [*clients] != sorted({*clients}) or not {*clients[:1], *clients[-1:]} <= {*known}:
        way = f"It must be some of the {len(known)} clients, which count from 0, each once and sorted"
        raise misused(selection.select, f"returned the clients {[*clients][:10]}", way, server.t)
    if clock.comes_and_goes and (away := {*clients} - {*pool.here.tolist()}):
        way = "Choose among those in clients.here"
        raise misused(selection.select, f"returned client {min(away)}, which is not available", way, server.t)
    return replace(asked, candidates={**pool.candidates}, idle=pool.idle)


def closed(run: RunParts, pool: RunClients, asked: Asked) -> Asked:
    """With those that the round loses on the simulated clock, and how long it lasts."""
    server, clock = run.server, run.config.clock
    if asked.ends is not None:
        ends_at(server, asked.ends)
    if asked.dropped:
        return replace(asked, expected=expected.of_dropped(run, asked))
    holders = [client for client in asked.clients if server.population.sizes[client]]
    if not clock.loses or not holders:
        return asked
    traffic = expected.of_round(run, asked, holders)
    took = expected_seconds(run, holders, traffic, asked.candidates, server.t).total
    returns = run.cohort_size if clock.over_select else len(holders)
    asking = expected_asking(run, pool.asked_now, pool.asked_before)
    lost, lasts = clock.closed(server.seed, server.t, holders, took, returns, pool.now + asking)
    lasts += asking
    if clock.comes_and_goes:
        ends_at(server, pool.now + lasts)
    rows, asking_of = expected.by_client(traffic, holders), dict.fromkeys(asked.clients, asking)
    return replace(asked, lost=lost, lasts=lasts, asking=asking_of, expected=rows)


def ends_at(server: Server, seconds: float) -> None:
    """Remember when the round ends on the simulated clock, where the next one must know it."""
    server.memory[NOW] = torch.tensor(seconds, dtype=torch.float64)


def learn(run: RunParts, cohort: HostedCohort) -> None:
    """Let the selection remember something of the clients that came back."""
    selection = run.config.rounds.selection
    with run.server.seeded_for(selection, f"learn {stream_of(selection)}"):
        selection.learn(cohort, run.server)


def start_others(run: RunParts, asked: Asked, events: list[Event]) -> Started:
    """Let those initialise that were not asked, where a method of the clients wants that."""
    engine, server = run.engine, run.server
    if not engine.spec.stack.starts_everyone:
        return Started()
    others = tuple(sorted({*server.population.sizes.nonzero().flatten().tolist()} - {*asked.clients}))
    sent = run.aggregator.downlink(others, HostedModels(engine), server)
    initial, states = initialize(engine, round_info(server), others, sent)
    events += check_results(initial, engine.nodes, f"round {server.t + 1}, its initialisation", run.config.rounds)
    return Started(others, sent, states)


def publish(run: RunParts) -> None:
    """Give the hosts what the next round begins with."""
    run.engine.publish(run.server.value, run.server.shared, run.broadcast.public(run.server))


def _evaluated(done: Round, run: RunParts, phases: Phases) -> Round:
    """The round with the scores of the models that it has made."""
    score, left_out = None, list[Event]()
    personal = done.personal or {c: result.test for c, result in done.cohort.trained.results.items() if result.test}
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


def evaluate_personal(
    run: RunParts, t: int, among: Sequence[int] | None = None, starts: Mapping[int, Start] | None = None
) -> tuple[dict[int, Score], list[Event]]:  # fmt: skip
    """Test the model with which each honest client, or each `among` some, would start round t, on its own test samples; and say
    who could not be tested. `evaluate.clients` limits them; `starts` are those of clients that have an older model."""
    partition = run.partition
    holders = np.flatnonzero((partition.test.sizes > 0) & (partition.train.sizes > 0)).tolist()
    honest = [client for client in holders if client not in run.attackers]
    clients = honest if among is None else sorted({*honest} & {*among})
    tested = len(clients) if run.config.evaluate.clients is None else min(run.config.evaluate.clients, len(clients))
    order = draw(len(clients), tested, stream_seed(run.server.seed, t, SERVER, "evaluate"))
    clients = sorted(clients[i] for i in order)
    server = replace(
        run.server, scratch=RoundScratch(t, learning_rate(run.config, t))
    )  # what is noted is not part of a round
    downlink = run.aggregator.downlink(clients, HostedModels(run.engine), server)
    results = evaluate_clients(run.engine, round_info(server), clients, downlink, starts=starts)
    left_out = check_results(
        results, run.engine.nodes, f"round {run.server.t + 1}, test of its own model", run.config.rounds
    )
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
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
