"""Hands clients to hosts, in work units, and tries again what was lost or failed. Who gets whom: `shares.py`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from raysim.core.attack import Attackers
from raysim.core.event import Event
from raysim.core.local_run import RoundInfo
from raysim.core.mixture import Mixture
from raysim.core.server import Downlink
from raysim.engine.base import ATTEMPTS, Call, Engine, Handle, HostLost, MachineFailure, Span
from raysim.engine.requests import Requests, Start
from raysim.engine.shares import WorkUnit, assign
from raysim.engine.sums import aggregation, destinations, merge_up
from raysim.host.messages import ClientResult, SumDestination, SumRequest, TrainReply

# States and models that a host holds back until a work unit ends; after it they may be spilled.
WORK_UNIT_BYTES = 1 << 30
Result = TypeVar("Result")


def nothing() -> None:
    """The default of `while_training`."""


@dataclass(frozen=True)
class EarlySum:
    """The aggregate of a plan that was known before training: hosts added the models while they trained them."""

    mixture: Mixture
    request: SumRequest


@dataclass(frozen=True)
class ClientResults:
    """What came back from clients, and the hosts on which they were last tried."""

    results: Mapping[int, ClientResult]  # of every client asked, without arrays
    hosts: Mapping[int, int]  # by client


@dataclass(frozen=True)
class TrainedCohort(ClientResults):
    """The result of training: who came back, with what numbers, and the sum that was made on the way.

    The arrays that clients made (models, states, traces) are not here. The round's `Dispatcher` knows where they rest.
    """

    round_info: RoundInfo
    asked: tuple[int, ...]  # sorted
    early_sum: EarlySum | None

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """Those that came back, sorted."""
        return tuple(c for c in self.asked if self.results[c].status == "ok")


class WorkQueue:
    """Units that wait for hosts, and how often clients were tried. A host is a number here: nothing is known of an engine."""

    def __init__(self, groups: Callable[[WorkUnit], list[WorkUnit]]):
        """`groups` makes of clients the groups in which they train, whole."""
        self._groups = groups
        self._waiting: dict[int, list[WorkUnit]] = {}
        self.tries: Counter[int] = Counter()  # of clients, that did not succeed

    def __bool__(self) -> bool:
        return any(self._waiting.values())

    def add(self, host: int, units: Sequence[WorkUnit], first: bool = False) -> None:
        """Let units wait for a host, behind those that do already or before them."""
        there = self._waiting.get(host, [])
        self._waiting[host] = [*units, *there] if first else [*there, *units]

    def wave(self, processes: Sequence[Any]) -> list[tuple[int, WorkUnit]]:
        """The next unit of each host. Hosts that share one of the `processes`, after losses for which there was no place
        elsewhere, take turns: no unit dies of another's client."""
        self._waiting = {host: units for host, units in self._waiting.items() if units}
        turns = {processes[host]: host for host in self._waiting}
        return [(host, self._waiting[host].pop(0)) for host in turns.values()]

    def lost(self, host: int, unit: WorkUnit) -> bool:
        """A process died under a unit, which waits again: at first whole, then group by group. False where a client was
        tried `ATTEMPTS` times."""
        self.tries.update(unit)
        if max(self.tries[c] for c in unit) >= ATTEMPTS:
            return False
        self.add(host, self._groups(unit) if self.tries[unit[0]] > 1 else [unit], first=True)
        return True

    def failed(self, clients: WorkUnit, host: int, hosts: int) -> list[WorkUnit]:
        """Clients failed on a host. Returns the groups of those that may try again: they now wait for the next of `hosts`."""
        self.tries.update(clients)
        groups = self._groups(tuple(c for c in clients if self.tries[c] < ATTEMPTS))
        self.add((host + 1) % hosts, groups)
        return groups


class Dispatcher:
    """Trains one round's clients, and knows where the arrays that they made rest.

    Models rest on the hosts that trained them. Where a host is lost, or models are needed that were only summed, the
    clients train again, to the same bits: arrays may then rest elsewhere, but the `TrainedCohort` stays as it is.
    """

    def __init__(
        self, engine: Engine, round_info: RoundInfo, asked: Sequence[int], downlink: Downlink, *,
        starts: Mapping[int, Start] | None = None, attackers: Attackers | None = None, test: bool = False,
        trace: bool = False, retry: bool = False,
    ):  # fmt: skip
        """`asked` (sorted) will train from the published model, or from their `starts`, and the `attackers` among them lie.
        `test` each on its test samples, and `trace` each; with `retry`, those that fail for reasons of their own try again.
        """
        self.engine = engine
        self.spans: list[Span] = []  # of this round
        engine.spans = self.spans
        self.held: dict[int, WorkUnit] = {}  # host -> the clients whose models, or whose part of the early sum, it has
        self.states: dict[int, Handle] = {}
        self.models: dict[int, Handle] = {}
        self.traces: dict[int, Handle] = {}
        self.early_total: tuple[int, Handle] | None = None  # host and handle of the early sum, until a host is lost
        self._holders: dict[int, Any] = {}  # host -> who was that host when it trained what it holds
        self.attackers = attackers or Attackers()
        self._requests = Requests(engine, round_info, tuple(asked), downlink, self.attackers, starts or {})
        self._early_plan: SumRequest | None = None  # by which hosts sum models instead of keeping them
        self._results: dict[int, ClientResult] = {}
        self._trained_by: dict[int, int] = {}
        self._queue = WorkQueue(self._groups)
        self._retried = ("machine", "client") if retry else ("machine",)
        self._options = {
            "return_states": engine.stateful, "return_models": engine.spec.stack.peer_models, "trace": trace,
            "test": test,
        }  # fmt: skip

    @property
    def asked(self) -> WorkUnit:
        """The round's clients, sorted."""
        return self._requests.asked

    @property
    def downlink(self) -> Downlink:
        """What they are sent."""
        return self._requests.downlink

    def inform(self, attack: int, known: np.ndarray) -> None:
        """Let the clients of an attack know of the others, before they train."""
        self._requests.known[attack] = self.engine.put({"value": known})

    def train(
        self, early: Mixture | None = None, while_training: Callable[[], None] = nothing, clients: WorkUnit | None = None
    ) -> TrainedCohort:  # fmt: skip
        """Train all clients, or those `clients`; returns what all have brought so far, once these have come back or failed.

        With an `early` plan hosts add the models as they train them and keep none. `while_training` is called once the
        hosts are busy.
        """
        engine, asked = self.engine, self.asked if clients is None else clients
        early_sum = None
        if early is not None:
            self._early_plan = replace(aggregation(early, asked), planned_early=True)
            early_sum = EarlySum(early, self._early_plan)
        of_hosts = shares(engine, self._groups(asked))
        work = {i: self._visits(share) for i, share in enumerate(of_hosts) if share}
        # Where every host makes one unit, merging is asked for at once: it needs no answer.
        at_once = early is not None and all(len(units) == 1 for units in work.values())
        self._run(work, destinations(engine, list(work)) if at_once else {}, while_training)
        ok = {c for c, result in self._results.items() if result.status == "ok"}
        took = {c: self._results[c].seconds for c in asked if c in ok}
        trained_by = {c: self._trained_by[c] for c in took}
        engine.pace.learn(took, engine.partition.sizes[[*took]].tolist(), trained_by)
        came = tuple(sorted(self._results))
        results = {c: self._results[c] for c in came}
        return TrainedCohort(results, dict(self._trained_by), self._requests.round_info, came, early_sum)

    @property
    def sums_only(self) -> bool:
        """Whether the hosts have the early sum and no models."""
        return self._early_plan is not None

    def need_models(self) -> None:
        """Train again the clients whose models were only summed: the models are needed after all."""
        if self.sums_only:
            self._early_plan = None
            self._train_again([*self.held])

    def retry(self, action: Callable[[], Result]) -> Result:
        """Run `action`, after a loss of hosts again. What hosts held that were lost, whenever that was, is restored first."""

        def run() -> Result:
            if lost := self._lost():
                self._train_again(lost)
            return action()

        return self.engine.retry_after_loss(run)

    def close(self) -> Callable[[], None]:
        """Let the hosts forget this round's models. Call the result for what they have logged, once there is time."""
        engine = self.engine
        handles = [(i, engine.call(Call(i, "close", ()))) for i in self.held]
        self.early_total = None

        def collect() -> None:
            with suppress(HostLost):  # the next call to the host finds out
                for (host, _), log in zip(handles, engine.fetch(handles), strict=True):
                    self.spans += [Span(host, *entry) for entry in log]

        return collect

    def _visits(self, share: WorkUnit) -> list[WorkUnit]:
        """Split a host's share into work units of whole groups, so that what one unit returns stays below
        `WORK_UNIT_BYTES`."""
        engine = self.engine
        per_client = 4 * engine.layers.S * (2 * engine.stateful + engine.spec.stack.peer_models)
        most = max(1, WORK_UNIT_BYTES // (per_client or 1) // engine.spec.batch_clients)
        groups = self._groups(share)
        return [tuple(itertools.chain(*groups[i : i + most])) for i in range(0, len(groups), most)]

    def _groups(self, clients: WorkUnit) -> list[WorkUnit]:
        """The groups in which some clients train, whole: to the same bits they train in no other company."""
        return [*dict.fromkeys(map(self._requests.group, clients))]

    def _lost(self) -> list[int]:
        """The hosts that do not have what they held: another actor is there now."""
        return [i for i in self.held if self.engine.hosts[i] is not self._holders[i]]

    def _train_again(self, hosts: Sequence[int]) -> None:
        """Train the clients of `hosts` again, because their models or sums are missing."""
        self.early_total = None
        clients = [c for i in hosts for c in self.held[i]]
        self._run({i: self._visits(self.held.pop(i)) for i in hosts})
        for client in clients:
            if (status := self._results[client].status) != "ok":
                raise MachineFailure(f"retraining client {client} after a host was lost failed: {status}")

    def _run(
        self, work: Mapping[int, Sequence[WorkUnit]], sums_to: Mapping[int, SumDestination] | None = None,
        while_training: Callable[[], None] = nothing,
    ) -> None:  # fmt: skip
        """Train each host's units, one at a time, in waves over all hosts."""
        for host, units in work.items():
            self._queue.add(host, units)
        while wave := self._queue.wave(self.engine.hosts):
            replies = self._begin(wave, {} if self._queue else sums_to or {})
            sums_to = None
            while_training()
            while_training = nothing
            lost: dict[int, HostLost] = {}
            for (i, unit), (reply, _, *arrays) in zip(wave, replies, strict=True):
                try:
                    [answer] = self.engine.fetch([(i, reply)])
                except HostLost as error:
                    lost |= dict.fromkeys(error.hosts, error)
                    if not self._queue.lost(i, unit):
                        why = f"the process that trained it died {ATTEMPTS} times: {error.why}"
                        self._results |= dict.fromkeys(unit, ClientResult(why, cause="machine"))
                        self._trained_by |= dict.fromkeys(unit, i)
                else:
                    self._take(answer, i, unit, arrays)
            for loss in dict.fromkeys(lost.values()):
                self.early_total = None
                loss.hosts = {i for i in lost if lost[i] is loss}  # each once
                self.engine.replace_lost(loss)
            for i in self._lost():
                self._queue.add(i, self._visits(self.held.pop(i)), first=True)
        held = {i: tuple(c for c in unit if self._results[c].status == "ok") for i, unit in sorted(self.held.items())}
        self.held = {i: clients for i, clients in held.items() if clients}

    def _begin(self, wave: list[tuple[int, WorkUnit]], sums_to: Mapping[int, SumDestination]) -> list[list[Handle]]:
        """Begin the units of a wave; with `sums_to`, the merging of their sums too. Handles of the replies' objects."""
        engine, options = self.engine, self._options | {"early_plan": self._early_plan}
        begun = [
            engine.train(self._requests.call(i, "train", unit, sums_to=sums_to.get(i), **options)) for i, unit in wave
        ]
        if sums_to and self._early_plan:
            partials = {i: sums for (i, _), (_, sums, *_) in zip(wave, begun, strict=True)}
            self.early_total = merge_up(engine, self._early_plan, partials, sums_to)
        return begun

    def _take(self, reply: TrainReply, host: int, unit: WorkUnit, arrays: list[Handle]) -> None:
        """Keep what a unit brought; `arrays` are those of the first client, then those of the next."""
        missing = self._try_again(reply, host, unit)
        if missing:
            self.early_total = None
        self.held[host] = self.held.get(host, ()) + tuple(c for c in unit if c not in missing)
        self._holders[host] = self.engine.hosts[host]
        self._results |= reply.results
        self._trained_by |= dict.fromkeys(unit, host)
        self._report({remark for result in reply.results.values() for remark in result.remarks})
        asked = ("return_states", self.states), ("return_models", self.models), ("trace", self.traces)
        places = [place for option, place in asked if self._options[option]]
        handles = iter(arrays)
        for client in unit if places else ():
            for place in places:
                handle = next(handles)
                if reply.results[client].status == "ok":
                    place[client] = handle
        self.spans.append(Span(host, "train", reply.started, reply.stopped))

    def _try_again(self, reply: TrainReply, host: int, unit: WorkUnit) -> set[int]:
        """Queue those of a unit that failed and may try again, with those that train together with them. Returns all whose
        models the host is not to have."""
        failed = tuple(c for c in unit if reply.results[c].cause in self._retried)
        groups = self._queue.failed(failed, host, len(self.engine.hosts))
        for client in failed:
            if self._queue.tries[client] < ATTEMPTS:
                node = self.engine.nodes[host]
                failure = f"client {client} failed on node {node} and trains again: {reply.results[client].status}"
                self.engine.events.append(Event("client", failure, client, node))
        again = {*itertools.chain(*groups)}
        if groups and self.sums_only:  # a host keeps no sum of a unit in which a client failed
            stay = [group for group in self._groups(unit) if group not in groups]
            rest = [group for group in stay if any(reply.results[c].status == "ok" for c in group)]
            self._queue.add(host, [tuple(itertools.chain(*rest))] * bool(rest))
            again |= {*itertools.chain(*rest)}
        return again

    def _report(self, remarks: set[str]) -> None:
        """Report once how clients trained."""
        self.engine.events += [Event("run", remark) for remark in sorted(remarks - self.engine.remarks)]
        self.engine.remarks |= remarks


def initialize(
    engine: Engine, round_info: RoundInfo, clients: Sequence[int], downlink: Downlink
) -> tuple[ClientResults, dict[int, Handle]]:  # fmt: skip
    """Let `clients` (sorted) initialise from the published model without training; and the new states of those that could."""
    requests = Requests(engine, round_info, tuple(clients), downlink)

    def start() -> tuple[ClientResults, dict[int, Handle]]:
        units = [(i, share) for i, share in enumerate(shares(engine, one_by_one(clients))) if share]
        begun = [engine.train(requests.call(i, "initialize", share, return_states=True)) for i, share in units]
        replies = engine.fetch([(i, reply) for (i, _), (reply, *_) in zip(units, begun, strict=True)])
        results = {client: result for reply in replies for client, result in reply.results.items()}
        states = {
            client: handle
            for (_, share), (_, _, *states) in zip(units, begun, strict=True)
            for client, handle in zip(share, states, strict=True)
            if results[client].status == "ok"
        }
        return ClientResults(results, {client: i for i, share in units for client in share}), states

    return engine.retry_after_loss(start) if clients else (ClientResults({}, {}), {})


def shares(engine: Engine, groups: Sequence[WorkUnit]) -> list[WorkUnit]:
    """The share of each host in a cohort, in whole groups, by what is known of clients and hosts."""
    clients = [*itertools.chain(*groups)]
    costs = iter(engine.pace.costs(clients, engine.partition.sizes[clients].tolist()))
    factors = [engine.pace.factor(i) for i in range(len(engine.hosts))]
    return assign(groups, [sum(itertools.islice(costs, len(group))) for group in groups], factors)


def one_by_one(clients: Sequence[int]) -> list[WorkUnit]:
    """Clients that are in no group with others."""
    return [(client,) for client in clients]
