"""Cohorts of clients over hosts, wherever the hosts live. An engine adds only how a host is called and replaced."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core import tree
from raysim.core.layers import LayerMap
from raysim.core.local_run import RoundInfo
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe
from raysim.core.rng import SERVER, stream_seed
from raysim.core.score import Score
from raysim.core.server import Downlink
from raysim.data import Dataset, Partition
from raysim.engine.merging import schedule
from raysim.host.device import keep_freed_memory, tensor_of
from raysim.host.messages import (
    Arrays,
    ClientResult,
    HostSpec,
    SumDestination,
    SumRequest,
    TrainReply,
    TrainRequest,
)  # fmt: skip

Handle = Any  # a value, or a reference to one
CHUNK = 1 << 23  # floats of one message of a reduction: larger models travel in pieces, so that levels overlap
GATHER_BYTES = 2 << 30  # default of `Engine.gather_bytes`
VISIT_BYTES = 1 << 30  # states and models that a host holds back until a visit ends; after it they may be spilled
ATTEMPTS = 3  # hosts a client may bring down before it is left out of the round


def nothing() -> None:
    pass


class HostLost(Exception):
    """Hosts died; `hosts` are their indices."""

    def __init__(self, hosts: set[int]):
        super().__init__(f"hosts {sorted(hosts)} were lost")
        self.hosts = hosts


class StateLost(Exception):
    """Client states went down with a node; only a checkpoint has them."""


@dataclass(frozen=True)
class Call:
    """A method of one host with its arguments, and how many results it has."""

    host: int
    method: str
    args: tuple[Any, ...]
    returns: int = 1


@dataclass(frozen=True)
class Span:
    """One phase on one host, for the timeline; seconds since the epoch."""

    host: int
    phase: str
    start: float
    stop: float
    sent: int = 0  # payload bytes it serialised for other processes


@dataclass
class Engine(ABC):
    """Runs cohorts. Subclasses say how a host is called, how its results are awaited, and how a dead one is replaced."""

    spec: HostSpec
    data: Dataset
    partition: Partition
    fan_in: int = 4
    gather_bytes: int = GATHER_BYTES  # `Cohort.gather` refuses to bring more than this into one process
    nodes: list[str] = field(default_factory=list)  # the machine of every host
    kept: dict[int, Handle] = field(default_factory=dict)  # committed state of clients that have taken part
    bank: dict[int, Handle] = field(default_factory=dict)  # their last models, where a method asks for them
    spans: list[Span] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # the machines of hosts that died since somebody looked
    seconds: dict[int, float] = field(default_factory=dict)  # how long each client's last training took

    def __post_init__(self) -> None:
        if self.spec.keep_freed_memory:
            keep_freed_memory()
        _, self.layers = self.spec.network()
        self.stateful = self.spec.stateful(self.layers)
        self.keys = itertools.count()
        self.value = torch.empty(0)  # [S] the server's model, published to the hosts
        self.published: Handle = None
        self.published_shared: Handle = None
        self.newcomer: Handle = None  # what a client that has not taken part yet keeps, where that is not nothing

    # What an engine provides.

    @property
    @abstractmethod
    def hosts(self) -> Sequence[Any]:
        """The hosts, in the order in which a sorted cohort is dealt to them."""

    @abstractmethod
    def call(self, call: Call) -> list[Handle]:
        """Begin a call and return handles of its results."""

    @abstractmethod
    def fetch(self, calls: Sequence[tuple[int, Handle]]) -> list[Any]:
        """Values of (host, handle)s, in order. Raises `HostLost`."""

    @abstractmethod
    def put(self, value: Any) -> Handle:
        """Make a value available to all hosts."""

    @abstractmethod
    def value_of(self, handle: Handle) -> Any:
        """The value behind a handle that `put` or a host made. Raises `StateLost`."""

    @abstractmethod
    def replace(self, hosts: set[int]) -> None:
        """Put new hosts in the place of dead ones."""

    @abstractmethod
    def close(self) -> None:
        """Stop all hosts."""

    # What all engines do with it.

    def park(self, arrays: Arrays) -> Handle:
        """Keep a client's state or model, read from a checkpoint, as if a host had returned it."""
        return self.put(arrays)

    @property
    def models(self) -> HostedModels:
        """The clients' last models, for downlink rules."""
        return HostedModels(self)

    def ask(self, calls: Sequence[Call]) -> list[Any]:
        """Make calls side by side and return their first results."""
        handles = [(c.host, self.call(c)[0]) for c in calls]
        return self.fetch(handles)

    def begin(self, value: Tensor) -> None:
        """`value` [S] is the model that the run began with. Newcomers may have it as their previous one, and start with
        its running statistics where those stay with the clients."""
        kept = {"previous": value.numpy().copy()} if self.spec.stack.initial_previous else {}
        if self.spec.settings.local_buffers:
            kept["buffers"] = value[self.layers.P :].numpy().copy()
        self.newcomer = self.put(kept) if kept else None

    def publish(self, value: Tensor, shared: Mapping[str, Tensor]) -> None:
        """Make the server's model and what travels with it available to all hosts."""
        self.value = value
        self.published = self.put(value.numpy())
        self.published_shared = self.put({n: tensor.numpy() for n, tensor in shared.items()}) if shared else {}

    def cohort(
        self,
        round_info: RoundInfo,
        clients: Sequence[int],
        downlink: Downlink,
        *,
        test: bool = False,
        trace: bool = False,
    ) -> HostedCohort:
        """`clients` (sorted) that will train from the published model."""
        self.spans = []
        return HostedCohort(self, round_info, tuple(clients), downlink, test, trace)

    def initialize(self, round_info: RoundInfo, clients: Sequence[int], downlink: Downlink) -> dict[int, Handle]:
        """Let `clients` (sorted) initialise from the published model without training; returns what they then keep."""
        cohort = HostedCohort(self, round_info, tuple(clients), downlink)

        def start() -> dict[int, Handle]:
            shares = [(i, share) for i, share in enumerate(self.deal(clients)) if share]
            results = [self.call(cohort.call_for(i, "initialize", share)) for i, share in shares]
            self.fetch([(i, result[0]) for (i, _), result in zip(shares, results, strict=True)])
            kept = [zip(share, result[2:], strict=True) for (_, share), result in zip(shares, results, strict=True)]
            return {client: handle for pairs in kept for client, handle in pairs}

        return self.retry_after_loss(start) if clients else {}

    def deal(self, clients: Sequence[int]) -> list[tuple[int, ...]]:
        """Contiguous runs of a sorted cohort, one a host, with the dearest run as cheap as can be."""
        if len(clients) <= len(self.hosts):
            return [(client,) for client in clients]
        cost = [self.seconds.get(c, -1.0) for c in clients]
        if min(cost, default=0.0) < 0:  # not all have been measured: seconds and samples do not compare
            cost = [float(len(self.partition.train[c])) for c in clients]
        return [tuple(clients[lo:hi]) for lo, hi in cut(cost, len(self.hosts))]

    def evaluate(self, rows: np.ndarray) -> tuple[float, float]:
        """Accuracy and mean loss of the published model on `rows` of the data set; hosts share the batches."""
        batch = self.spec.eval_batch
        bounds = [round(i * -(-len(rows) // batch) / len(self.hosts)) * batch for i in range(len(self.hosts) + 1)]
        shares = [(i, rows[a:b]) for i, (a, b) in enumerate(itertools.pairwise(bounds)) if a < b and a < len(rows)]

        def score() -> list[tuple[int, float]]:
            calls = [Call(i, "evaluate", (self.published, share)) for i, share in shares]
            return [pair for result in self.ask(calls) for pair in result]

        started = time.time()
        scores = self.retry_after_loss(score)
        self.spans += [Span(i, "evaluate", started, time.time()) for i, _ in shares]
        # Batches are the same ones however they are shared, and are added in their order.
        return sum(c for c, _ in scores) / len(rows), sum(loss for _, loss in scores) / len(rows)

    def personal(self, round_info: RoundInfo, clients: Sequence[int], downlink: Downlink) -> dict[int, Score]:
        """For each client the model it would now be given, tested on its own test samples."""
        cohort = HostedCohort(self, round_info, tuple(clients), downlink)

        def score() -> list[dict[int, Score]]:
            shares = enumerate(self.deal(clients))
            return self.ask([cohort.call_for(i, "personal", share) for i, share in shares if share])

        return {client: s for result in self.retry_after_loss(score) for client, s in result.items()}

    def replace_lost(self, hosts: set[int]) -> None:
        """`replace`, and remember that it was necessary."""
        self.lost += [self.nodes[i] for i in sorted(hosts)]
        self.replace(hosts)

    def retry_after_loss(self, action: Callable[[], Any], restore: Callable[[set[int]], None] | None = None) -> Any:
        """`action`, again after every loss of hosts."""
        while True:
            try:
                return action()
            except HostLost as lost:
                self.replace_lost(lost.hosts)
                if restore:
                    restore(lost.hosts)

    def commit(self, cohort: HostedCohort) -> None:
        """The round counts: so do the states its clients came back with."""
        self.kept.update(cohort.new_kept)
        self.bank.update(cohort.new_bank)


@dataclass(frozen=True)
class HostedModels:
    """The engine's bank as downlink rules see it. See `raysim.core.server.ModelStore`."""

    engine: Engine

    @property
    def clients(self) -> tuple[int, ...]:
        return tuple(sorted(self.engine.bank))

    def distances(self, clients: Sequence[int]) -> Tensor:
        engine, M = self.engine, len(clients)
        # Row i meets the models after it only: every n-th row to a host makes shares of like cost.
        shares = [range(i, M - 1, len(engine.hosts)) for i in range(len(engine.hosts))]

        def measure() -> Tensor:
            models = [engine.bank[c] for c in clients]
            rows = engine.ask([Call(i, "distances", (share, *models)) for i, share in enumerate(shares) if share])
            squared = torch.zeros(M, M, dtype=torch.float64)
            for share, row in zip((s for s in shares if s), rows, strict=True):
                squared[list(share)] = torch.from_numpy(row)
            return squared + squared.T

        started = time.time()
        squared = engine.retry_after_loss(measure)
        engine.spans += [Span(i, "distances", started, time.time()) for i, share in enumerate(shares) if share]
        return squared


class HostedCohort:
    """A cohort whose models rest on hosts. See `raysim.core.cohort.Cohort`."""

    def __init__(
        self, engine: Engine, round_info: RoundInfo, asked: tuple[int, ...], downlink: Downlink,
        test: bool = False, trace: bool = False,
    ):  # fmt: skip
        self.engine, self.round_info, self.asked, self.downlink = engine, round_info, asked, downlink
        self._test, self._trace = test, trace
        self.layers: LayerMap = engine.layers
        self.clients = asked
        self.sizes = self._sizes()
        self.spans = engine.spans  # of this round
        self.held: dict[int, tuple[int, ...]] = {}  # host -> the clients whose models it holds
        self.outcomes: dict[int, ClientResult] = {}
        self.trained_by: dict[int, int] = {}  # client -> the host it was tried on
        self.new_kept: dict[int, Handle] = {}
        self.new_bank: dict[int, Handle] = {}
        self.traces: dict[int, Handle] = {}
        self._stats: dict[Probe, Tensor] = {}  # [K, ...] each
        self._computed = 0  # calls of `compute`
        self._foreseen: tuple[Mixture, SumRequest] | None = None
        self._spread: tuple[Mixture, Tensor] | None = None  # the last one asked for
        self._root: tuple[int, Handle] | None = None  # host and handle of the foreseen sum
        self._position = {client: i for i, client in enumerate(asked)}
        self.server_value = engine.value  # [S] what the round began with
        self.server = self.server_value[: self.layers.P]

    # Training.

    def call_for(self, host: int, method: str, clients: tuple[int, ...], sums: SumDestination | None = None) -> Call:
        """A visit to `clients`, with references to the states and models it needs."""
        engine, down = self.engine, self.downlink
        objects: list[Handle] = []
        kept, bank = {}, {}
        for client in clients:
            handle = engine.kept.get(client, engine.newcomer)
            if handle is not None:
                kept[client] = len(objects)
                objects.append(handle)
        mix = None
        wanted: set[int] = set()
        if down.mix is not None:
            rows = {c: down.mix[self._position[c]].tolist() for c in clients}
            mix = {c: tuple(zip(down.bank, row, strict=True)) for c, row in rows.items()}
            wanted |= set(down.bank)
        peers = {c: down.peers[self._position[c]] for c in clients} if down.peers else {}
        wanted |= {peer for those in peers.values() for peer in those}
        wanted |= {*clients} if engine.spec.stack.peer_models else set()  # their own: `run.previous`
        for peer in sorted(wanted & engine.bank.keys()):
            bank[peer] = len(objects)
            objects.append(engine.bank[peer])
        train = method == "train"
        request = TrainRequest(
            self.round_info, clients, kept, bank, mix, peers,
            return_states=method == "initialize" or (train and engine.stateful),
            return_models=engine.spec.stack.peer_models and train,
            trace=self._trace and train, test=self._test,
            early_plan=self._foreseen[1] if self._foreseen else None, sums_to=sums,
        )  # fmt: skip
        returns = 1 if method == "personal" else request.objects
        return Call(host, method, (request, engine.published, engine.published_shared, *objects), returns)

    def train(self, foreseen: Mixture | None = None, while_training: Callable[[], None] = nothing) -> None:
        """Train all; returns once they have come back or failed. With a plan that was `foreseen` hosts add the models
        as they train them and keep none; whatever else is then asked of the models trains them again. `while_training` is called
        once the hosts are busy."""
        if foreseen is not None:
            self._foreseen = foreseen, replace(self._aggregation(foreseen), planned_early=True)
        shares = {i: self._visits(share) for i, share in enumerate(self.engine.deal(self.asked)) if share}
        sums = self._sums_to(list(shares)) if foreseen is not None and all(len(s) == 1 for s in shares.values()) else {}
        self._train(shares, sums, while_training)
        self._count()

    def _visits(self, share: tuple[int, ...]) -> list[tuple[int, ...]]:
        """A host's share in as many visits as keep what one hands back, about two models of state a client, small."""
        stack, model = self.engine.spec.stack, 4 * self.layers.S
        most = max(1, VISIT_BYTES // (model * (2 * self.engine.stateful + stack.peer_models) or 1))
        return [share[i : i + most] for i in range(0, len(share), most)]

    def _count(self) -> None:
        """Who came back."""
        self.clients = tuple(c for c in self.asked if self.outcomes[c].status == "ok")
        self.sizes = self._sizes()
        self.steps = torch.tensor([self.outcomes[c].steps for c in self.clients])
        measured = zip(*(self.outcomes[c].stats for c in self.clients), strict=True)
        stacked = (torch.from_numpy(np.array(stats)) for stats in measured)
        self._stats = dict(zip(self.engine.spec.probes, stacked, strict=False))  # of nobody there is nothing
        ok = set(self.clients)
        held = {i: tuple(c for c in clients if c in ok) for i, clients in sorted(self.held.items())}
        self.held = {i: clients for i, clients in held.items() if clients}

    def _sizes(self) -> Tensor:
        return torch.tensor([len(self.engine.partition.train[c]) for c in self.clients])

    def _need_models(self) -> None:
        """The models were only summed, and are asked for after all: train them again, to the same bits."""
        if self._foreseen:
            self._foreseen = None
            self._train({i: self._visits(self.held.pop(i)) for i in list(self.held)})

    def _train(
        self, queue: dict[int, list[tuple[int, ...]]], sums: Mapping[int, SumDestination] | None = None,
        while_training: Callable[[], None] = nothing,
    ) -> None:  # fmt: skip
        """Train each host's shares, one at a time. A share that brings its host down is tried again on the host's
        replacement, then client by client; a client that does so `ATTEMPTS` times is left out.

        With `sums`, the merging of what hosts add while they train is asked for at once: it needs nobody's answer."""
        engine = self.engine
        deaths: Counter[int] = Counter()
        while queue:
            # Indices that share a host, after losses without room, take turns: no share dies of another's client.
            turns = {engine.hosts[i]: i for i in queue}
            wave = [(i, queue[i].pop(0)) for i in turns.values()]
            sums = sums if len(turns) == len(queue) else None
            calls = [self.call_for(i, "train", share, sums[i] if sums else None) for i, share in wave]
            handles = [engine.call(call) for call in calls]
            if sums:
                self._root = self._merge_up(
                    {i: results[1] for (i, _), results in zip(wave, handles, strict=True)}, sums
                )
                sums = None
            while_training()
            while_training = nothing
            lost: set[int] = set()
            for (i, share), results in zip(wave, handles, strict=True):
                try:
                    report = engine.fetch([(i, results[0])])[0]
                except HostLost as error:
                    lost |= error.hosts
                    deaths.update(share)
                    if max(deaths[c] for c in share) >= ATTEMPTS:
                        self.outcomes |= {
                            c: ClientResult("the process training it died again and again") for c in share
                        }
                        self.trained_by |= dict.fromkeys(share, i)
                    elif deaths[share[0]] > 1:
                        queue[i] = [(c,) for c in share] + queue[i]
                    else:
                        queue[i].insert(0, share)
                else:
                    self.held[i] = self.held.get(i, ()) + share
                    self._take(report, i, share, results[2:])
            if lost:
                self._root = None
                engine.replace_lost(lost)
                for i in lost & self.held.keys():  # models of this round that died with their host
                    queue.setdefault(i, []).insert(0, self.held.pop(i))
            queue = {i: shares for i, shares in queue.items() if shares}

    def _restore(self, lost: set[int]) -> None:
        """Train again, to the same bits, what died with hosts."""
        self._train({i: self._visits(self.held.pop(i)) for i in lost & self.held.keys()})

    def _take(self, report: TrainReply, host: int, share: tuple[int, ...], handles: list[Handle]) -> None:
        self.outcomes |= report.results
        self.trained_by |= dict.fromkeys(share, host)
        rest = iter(handles)
        for client in share:
            for wanted, into in (
                (self.engine.stateful, self.new_kept),
                (self.engine.spec.stack.peer_models, self.new_bank),
                (self._trace, self.traces),
            ):
                if wanted:
                    handle = next(rest)
                    if report.results[client].status == "ok":
                        into[client] = handle
        self.engine.seconds |= {c: outcome.seconds for c, outcome in report.results.items()}
        self.engine.spans.append(Span(host, "train", report.started, report.stopped))

    # What came back with training.

    def _stack(self, array: Callable[[ClientResult], Any]) -> Tensor:
        return torch.from_numpy(np.array([array(self.outcomes[c]) for c in self.clients]))

    def stat(self, probe: Probe) -> Tensor:
        return self._stats[probe]

    def scalars(self, name: str) -> Tensor:
        return self._stack(lambda outcome: outcome.scalars[name])

    @property
    def counters(self) -> Tensor:
        return torch.tensor([self.outcomes[c].counters for c in self.clients], dtype=torch.float64)

    def by_size(self) -> Mixture:
        return Mixture.of(self.sizes, self.layers)

    def uniform(self) -> Mixture:
        return Mixture.of(torch.ones(len(self.clients)), self.layers)

    # Collectives.

    def _visit(self, method: str, *args: Any) -> Tensor:
        """Ask every host about the clients it holds: [K, ...] in the order of `clients`."""
        self._need_models()

        def ask() -> Tensor:
            results = self.engine.ask([Call(i, method, (held, *args)) for i, held in self.held.items()])
            by_client = {
                c: row
                for held, rows in zip(self.held.values(), results, strict=True)
                for c, row in zip(held, rows, strict=True)
            }
            return torch.from_numpy(np.stack([by_client[c] for c in self.clients]))

        return self.engine.retry_after_loss(ask, self._restore)

    def each(self, function: Callable[..., Tensor], *payload: Any) -> Tensor:
        sent = [self.engine.put(p.numpy()) if isinstance(p, Tensor) else p for p in payload]  # once for all hosts
        return self._visit("each", function, *sent)

    def distances(self, to: Tensor, layers: LayerMap | None = None) -> Tensor:
        return self._distances(to - self.server_value[: len(to)], layers or self.layers)

    def _distances(self, to: Tensor, layers: LayerMap) -> Tensor:
        """[K, L] of the updates from `to` [P] or [S]."""
        return layers.segments.per_layer(self._visit("squared_distances", self.engine.put(to.numpy()), layers)).sqrt()

    def dots(self, with_: Tensor, layers: LayerMap | None = None) -> Tensor:
        return self.each(_dots, with_, layers or self.layers)

    def predict(self, rows: np.ndarray) -> Tensor:
        return self._visit("predict", rows)

    @property
    def gathers(self) -> bool:
        return len(self.clients) * self.layers.S * 4 <= self.engine.gather_bytes

    def gather(self) -> Tensor:
        self._need_room()
        return self._visit("rows")

    def _need_room(self) -> None:
        if not self.gathers:
            need, limit = len(self.clients) * self.layers.S * 4 / 2**30, self.engine.gather_bytes / 2**30
            models = f"{len(self.clients)} models in one process are {need:.2g} GiB"
            raise MemoryError(f"{models}, but engine.gather_bytes allows {limit:.2g} GiB")

    def gram(self) -> Tensor:
        updates = self.gather()[:, : self.layers.P].double()
        return updates @ updates.T

    def compute(self, function: Callable[..., Any], *payload: Any, models: bool = False) -> Any:
        engine = self.engine
        # One stream for each call of a round, for layers that draw for themselves.
        seed = stream_seed(self.round_info.seed, self.round_info.t, SERVER, f"compute {self._computed}")
        self._computed += 1
        if models:
            self._need_room()
            self._need_models()

        def run() -> Any:
            updates = []
            if models:
                updates = [engine.call(Call(i, "rows", (held,)))[0] for i, held in self.held.items()]
            return engine.ask([Call(0, "compute", (function, seed, engine.published, payload, *updates))])[0]

        return engine.retry_after_loss(run, self._restore)

    def reduce(self, mix: Mixture, of: str = "model", power: int = 1, spread: Mixture | None = None) -> Tensor:
        if spread is not None and len(self.held) == 1:
            return self._reduce_with_spread(mix, spread)
        if of != "model" or power != 1:
            return self._sum(self._request(mix.coefficients if of == "model" else mix.weights, of=of, power=power))
        planned, foreseen = self._foreseen or (None, None)
        as_foreseen = mix is planned and self.clients == self.asked
        result = self._sum(foreseen if foreseen and as_foreseen else self._aggregation(mix))
        self._counters(result, mix.sent[:, self.layers.T :])
        return result

    def _request(self, weights: Tensor, kept: np.ndarray | float = 0.0, **options: Any) -> SumRequest:
        """The sum with `weights` [K, tensors] over the clients, and with `kept` [tensors] over the server's model."""
        columns = np.empty((weights.shape[1], len(weights) + 1))
        columns[:, :-1], columns[:, -1] = weights.numpy().T, kept
        pieces = equal_columns(columns, self.layers)
        own = [float(column[-1]) for *_, column in pieces]
        pieces, factors = tree.without_factors((start, stop, column[:-1]) for start, stop, column in pieces)
        return SumRequest({c: i for i, c in enumerate(self.clients)}, pieces, factors, own, **options)

    def _aggregation(self, mix: Mixture) -> SumRequest:
        """The new value that `mix` describes. The leaves of the tree are updates, because that way the small differences
        of the clients are kept."""
        kept = mix.kept.numpy()
        return self._request(mix.coefficients, np.where(np.abs(kept - 1) <= 1e-9, 1.0, kept))

    def spread(self, mix: Mixture) -> Tensor:
        if self._spread is None or self._spread[0] is not mix:
            self._spread = mix, self._distances(self._sum(self._request(mix.weights)), self.layers)
        return self._spread[1]

    def _reduce_with_spread(self, mix: Mixture, spread: Mixture) -> Tensor:
        """`reduce`, and `spread` in the same read of the models, which one host has."""
        self._need_models()
        unequal = not torch.equal(mix.weights, spread.weights)
        requests = [self._aggregation(mix), *([self._request(spread.weights)] if unequal else [])]

        def ask() -> tuple[np.ndarray, np.ndarray]:
            ((host, held),) = self.held.items()
            return self.engine.ask([Call(host, "spread", (held, *requests))])[0]

        total, per_run = map(tensor_of, self.engine.retry_after_loss(ask, self._restore))
        self._spread = spread, self.layers.segments.per_layer(per_run).sqrt()
        result, sent = torch.empty(self.layers.S), [bool(weights.any()) for *_, weights in requests[0].pieces]
        done = replace(requests[0], factors=[1.0] * len(sent))
        place(done.compact(total, sent), done, self.server_value, result)
        self._counters(result, mix.sent[:, self.layers.T :])
        return result

    def _counters(self, result: Tensor, sent: Tensor) -> None:
        """Integer buffers are not averaged: the largest of those that were sent counts."""
        specs = [(i, s) for i, s in enumerate(self.layers.tensors[self.layers.T :]) if s.kind == "counter"]
        if specs:
            sent = sent[:, [i for i, _ in specs]]
            greatest = self.counters.masked_fill(~sent, -torch.inf).amax(0)
            first, stop = specs[0][1].start, specs[-1][1].stop  # they come last, each of them a single number
            result[first:stop] = torch.where(sent.any(0), greatest, result[first:stop]).to(result.dtype)

    def _sum(self, request: SumRequest) -> Tensor:
        """The sums of all pieces as one vector."""
        engine = self.engine
        if not request.planned_early and request.of == "model":
            self._need_models()
        result = torch.empty(request.bounds[1])

        def total() -> None:
            if request.planned_early and self._root:
                parts, roots, self._root = [request], [self._root], None
            else:
                parts = [request] if request.planned_early else chunks(request)
                # All sums are asked for before any merge: a host sums the next part while the last one travels. Hosts
                # take turns to merge, so that none has to hand all of a model on.
                begun = [(*self._partials(part, turn), part, turn) for turn, part in enumerate(parts)]
                roots = [self._merge_up(*one) for one in begun]
            for part, where in zip(parts, roots, strict=True):
                ((value, sent),) = engine.fetch([where])[0].values()
                place(tree.Partial(tensor_of(value), sent), part, self.server_value, result)

        engine.retry_after_loss(total, self._restore)
        return result

    def _partials(self, request: SumRequest, turn: int) -> tuple[dict[int, Handle], dict[int, SumDestination]]:
        """Every host's partial sums, and where they go."""
        sums = self._sums_to(list(self.held), turn)
        calls = {i: Call(i, "partial", (self.held[i], request, to)) for i, to in sums.items()}
        return {i: self.engine.call(call)[0] for i, call in calls.items()}, sums

    def _sums_to(self, holders: Sequence[int], turn: int = 0) -> dict[int, SumDestination]:
        """Where the sums of each host go first."""
        levels = self._levels(holders, turn)
        return {i: SumDestination(next(self.engine.keys), leads(i, levels)) for i in holders}

    def _levels(self, holders: Sequence[int], turn: int) -> list[list[list[int]]]:
        return schedule(holders, [self.engine.nodes[i] for i in holders], self.engine.fan_in, turn)

    def _merge_up(
        self, partials: dict[int, Handle], sums: Mapping[int, SumDestination], request: SumRequest | None = None, turn: int = 0
    ) -> tuple[int, Handle]:  # fmt: skip
        """Merge partial sums within each machine, then across: (host, handle) of the whole."""
        if request is None:
            assert self._foreseen is not None
            request = self._foreseen[1]
        levels = self._levels(list(partials), turn)
        root = next(iter(partials))
        for level, groups in enumerate(levels):
            for root, *others in groups:
                to = SumDestination(sums[root].key, leads(root, levels[level + 1 :]))
                args = (len(request.position), request.sizes, to, *(partials[i] for i in others))
                partials[root] = self.engine.call(Call(root, "merge", args))[0]
        return root, partials[root]

    def close(self) -> Callable[[], None]:
        """Let the hosts forget this round's models. Call the result for what they have logged, once there is time."""
        engine = self.engine
        handles = [(i, engine.call(Call(i, "close", ()))[0]) for i in self.held]

        def collect() -> None:
            with suppress(HostLost):  # the next call to the host finds out
                for (host, _), log in zip(handles, engine.fetch(handles), strict=True):
                    self.spans += [Span(host, *entry) for entry in log]

        return collect


def leads(host: int, levels: list[list[list[int]]]) -> bool:
    """Whether the next group that `host` is in is its own: then its sums wait there for the others'."""
    group = next((group for level in levels for group in level if host in group), None)
    return group is not None and group[0] == host


def _dots(update: Tensor, own: LayerMap, with_: Tensor, layers: LayerMap) -> Tensor:
    return layers.dots(update[: len(with_)], with_)


def cut(costs: Sequence[float], runs: int) -> list[tuple[int, int]]:
    """Cut a sequence into at most `runs` contiguous runs so that the dearest is as cheap as can be: [(lo, hi)]."""

    def greedy(limit: float) -> list[tuple[int, int]]:
        bounds, lo, load = [], 0, 0.0
        for i, cost in enumerate(costs):
            if load + cost > limit and i > lo:
                bounds.append((lo, i))
                lo, load = i, 0.0
            load += cost
        return [*bounds, (lo, len(costs))]

    low, high = max(costs, default=0.0), sum(costs)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if len(greedy(middle)) <= runs else (middle, high)
    return greedy(high * (1 + 1e-9))


def equal_columns(columns: np.ndarray, layers: LayerMap) -> list[tree.Piece]:
    """Pieces (start, stop, column [n]) of the flat vector, of at most `CHUNK`, whose tensors have equal `columns`
    [T + Tb, n]."""
    edges = [0, *(1 + np.flatnonzero((columns[1:] != columns[:-1]).any(1))), len(columns)]
    pieces = []
    for i, j in itertools.pairwise(edges):
        start, stop = layers.tensors[i].start, layers.tensors[j - 1].stop
        n = -(-(stop - start) // CHUNK)
        bounds = [start + (stop - start) * part // n for part in range(n + 1)]
        pieces += [(a, b, columns[i]) for a, b in itertools.pairwise(bounds)]
    return pieces


@np.errstate(over="ignore", invalid="ignore")  # a round looks at its new model
def place(total: tree.Partial, request: SumRequest, server: Tensor, result: Tensor) -> None:
    """result = kept · server + factor · total for all pieces of the request, without a total that nobody sent."""
    begin, sums, own, new = 0, total.value.numpy(), server.numpy(), result.numpy()
    told = zip(request.pieces, total.sent, request.factors, request.server_coefficients, strict=True)
    for (sent, factor, kept), alike in itertools.groupby(told, key=itemgetter(1, 2, 3)):
        (start, stop, _), *more = [piece for piece, *_ in alike]
        stop = more[-1][1] if more else stop
        for a in range(start, stop, tree.BLOCK):  # which stays in a core's cache
            b = min(a + tree.BLOCK, stop)
            out = new[a:b]
            if not sent:
                out[:] = own[a:b] * kept if kept else 0.0
                continue
            part = sums[begin : begin + b - a]
            begin += b - a
            if factor != 1:
                part = np.multiply(part, factor, out=out)
            if kept:
                np.add(own[a:b] if kept == 1 else own[a:b] * kept, part, out=out)
            elif factor == 1:
                out[:] = part


def chunks(request: SumRequest) -> list[SumRequest]:
    """Its pieces in messages of at least `CHUNK` floats, as long as there are enough."""
    edges, size = [0], 0
    for i, piece in enumerate(request.sizes):
        if size >= CHUNK:
            edges.append(i)
            size = 0
        size += piece
    bounds = itertools.pairwise([*edges, len(request.pieces)])
    return [
        replace(
            request,
            pieces=request.pieces[a:b],
            factors=request.factors[a:b],
            server_coefficients=request.server_coefficients[a:b],
        )
        for a, b in bounds
    ]
