"""One round of federated learning, as straight-line code."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raysim.config import STACKS, name_in
from raysim.core.flat import finite
from raysim.core.local_run import RoundInfo
from raysim.core.mixture import Mixture
from raysim.core.note import Note
from raysim.core.rng import SERVER, generator
from raysim.core.score import Score

if TYPE_CHECKING:
    from raysim.core.server import Downlink
    from raysim.engine.engine import HostedCohort
    from raysim.federation.federation import Federation


class RoundFailed(RuntimeError):
    """A round that cannot be played: no client could be trained, or the new model is not finite."""


@dataclass(frozen=True)
class Round:
    """A finished round, as instruments and records see it."""

    t: int
    drawn: tuple[int, ...]  # clients asked to take part
    cohort: HostedCohort
    downlink: Downlink
    mixture: Mixture | None  # None where nobody came back
    before: Tensor  # [S] the global model that was sent
    target: Tensor  # [S] the aggregate, before server steps
    after: Tensor  # [S]
    notes: list[Note]
    seconds: dict[str, float]  # by phase
    accuracy: float | None = None
    loss: float | None = None
    personal: dict[int, Score] = field(default_factory=dict)  # by client


def sample(seed: int, t: int, clients: int, cohort: int) -> tuple[int, ...]:
    """The sorted cohort of round t: drawn without replacement from (seed, round) alone, so that methods share it."""
    order = torch.randperm(clients, generator=generator(seed, t, SERVER, "cohort"))
    return tuple(sorted(order[:cohort].tolist()))


def run_round(fed: Federation, t: int) -> Round:
    """Sample, broadcast, train, plan, reduce, transform, evaluate."""
    clock = Clock()
    server, engine, aggregator = fed.server, fed.engine, fed.aggregator
    server.t, server.lr, server.notes = t, fed.config.local.lr * fed.config.local.lr_decay**t, []
    server.once, server.batches, server.statistics = {}, [], None
    samples = int(server.population.sizes.sum())
    round_info = RoundInfo(server.seed, t, server.rounds, len(server.population.sizes), server.lr, samples)
    drawn = sample(server.seed, t, round_info.clients, fed.cohort_size)
    clients = tuple(c for c, n in zip(drawn, server.population.sizes[list(drawn)].tolist(), strict=True) if n)

    downlink = aggregator.rule.downlink(clients, engine.models, server)
    cohort = engine.cohort(round_info, clients, downlink, test=fed.tests_after_training(t), trace=fed.trace.wants(t))
    # Where the whole plan needs nothing that training tells, models are summed as they are trained and never kept.
    told, remembered = len(server.notes), dict(server.memory)
    watched = any(instrument.reads_models for instrument in fed.config.record.instruments)
    foreseen = aggregator.plan_early(cohort, server) if clients else None
    told_by_plan = slice(told, len(server.notes))
    cohort.train(foreseen if aggregator.plans_early and not watched else None, while_training=fed.write_down)
    if engine.spec.stack.starts_everyone:
        others = tuple(c for c in range(round_info.clients) if server.population.sizes[c] > 0 and c not in drawn)
        cohort.new_kept |= engine.initialize(
            round_info, others, aggregator.rule.downlink(others, engine.models, server)
        )
    clock.lap("train")

    before, mixture, target = server.value, None, server.value
    server.notes.extend(note for c in cohort.clients for note in cohort.outcomes[c].notes)
    if cohort.clients:
        if cohort.clients != clients:  # what was foreseen is of some that did not come back
            del server.notes[told_by_plan]
            server.memory, server.once, foreseen = remembered, {}, None
        mixture = aggregator.plan(cohort, server, foreseen)
        clock.lap("plan")
        target = aggregator.reduce(mixture, cohort)
        clock.lap("reduce")
        server.value = aggregator.transform(target, mixture, cohort, server)
        if not finite(server.value):
            by = find_nonfinite_step(fed, target, mixture, cohort)
            raise RoundFailed(f"round {t + 1}: {by} made a model that is not finite (NaN or Inf)")
        clock.lap("server")
    done = Round(t, drawn, cohort, downlink, mixture, before, target, server.value, server.notes, clock.seconds)
    if mixture is not None:
        # Before anything is committed: a host that is lost meanwhile trains its clients again from what they were sent.
        for instrument in fed.config.record.instruments:
            done.notes.extend(instrument.observe(done, server.population))
        clock.lap("observe")

    engine.commit(cohort)
    engine.publish(server.value, server.shared)
    accuracy = loss = None
    personal = {c: outcome.test for c, outcome in cohort.outcomes.items() if outcome.test}
    if fed.evaluates(t):
        if fed.config.evaluate.global_ and len(fed.partition.server_test):
            accuracy, loss = engine.evaluate(fed.partition.server_test)
        if fed.config.evaluate.personal == "after_init":
            personal = fed.evaluate_personal(t + 1)
        clock.lap("evaluate")
    return replace(done, accuracy=accuracy, loss=loss, personal=personal)


def find_nonfinite_step(fed: Federation, target: Tensor, mixture: Mixture, cohort: HostedCohort) -> str:
    """What made a model that is not finite of finite ones. Steps are taken again: of the run nothing is lost by it."""
    config, aggregator = fed.config, fed.aggregator
    if not finite(target):
        names = [name_in(STACKS["weighting"].entries, method) for method in config.weighting]
        return f"weighting: {' or '.join(names)}" if names else "the mean of the clients' models"
    server = replace(fed.server, value=cohort.server_value)
    for step in aggregator.steps:
        target = step.apply(target, mixture, cohort, server)
        if not finite(target):
            owners = (("client", m) for m in config.client if type(step) in map(type, m.server_steps()))
            stack, method = next(owners, ("server", step))
            return f"{stack}: {name_in(STACKS[stack].entries, method)}"
    return f"model.bn_stats: {config.model.bn_stats}"


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def summary(fed: Federation, done: Round) -> dict[str, Any]:
    """What is shown of a round."""
    cohort = done.cohort
    losses = [cohort.outcomes[c].last_loss for c in cohort.clients]
    sizes = cohort.sizes.tolist()
    train_loss = sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes) if sizes else None
    failures = [
        f"client {c}, round {done.t + 1}, node {fed.engine.nodes[cohort.trained_by[c]]}: {outcome.status}"
        for c, outcome in sorted(cohort.outcomes.items())
        if outcome.status != "ok"
    ]
    return {
        "round": done.t,
        "rounds": fed.server.rounds,
        "accuracy": done.accuracy,
        "loss": done.loss,
        "train_loss": train_loss,
        "clients_ok": len(cohort.clients),
        "clients_failed": len(done.drawn) - len(cohort.clients),
        "failures": failures,
    }
