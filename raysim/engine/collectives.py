"""Sums, per-client calls and gathers over a trained cohort, whose models rest on hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raysim.core import tree
from raysim.core.arrays import tensor_of
from raysim.core.hooks import form, misused
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe
from raysim.core.rng import SERVER, stream_seed
from raysim.engine.base import Call, Engine, Handle
from raysim.engine.columns import batched, column_pieces, sent_pieces
from raysim.engine.dispatcher import Dispatcher, TrainedCohort
from raysim.engine.sums import aggregation, chunks, destinations, merge_up, place, sum_request
from raysim.host.messages import ClientResult, ColumnPiece, SparseVector, SumDestination, SumRequest
from raysim.lazy import Tensor, torch


class HostedCohort:
    """A `raysim.core.cohort.Cohort`: its numbers come from `trained`, its models stay on the hosts that `dispatcher` tracks."""

    def __init__(
        self, engine: Engine, dispatcher: Dispatcher, trained: TrainedCohort, began_with: Tensor | None = None
    ):  # fmt: skip
        """`began_with` [K, B] are the clients' first buffers, where they began at models of different rounds."""
        self._began_with = began_with
        self._engine, self._dispatcher, self.trained = engine, dispatcher, trained
        self.layers: LayerMap = engine.layers
        self.clients = trained.clients
        results = [trained.results[c] for c in self.clients]
        self.sizes = torch.tensor([len(engine.partition.train[c]) for c in self.clients])
        self.steps = torch.tensor([result.steps for result in results])
        measured = zip(*(result.stats for result in results), strict=True)
        stacked = (torch.from_numpy(np.array(stats)) for stats in measured)
        self._stats: dict[Probe, Tensor] = dict(zip(engine.spec.probes, stacked, strict=False))  # empty without clients
        self._distances_to: tuple[Mixture, Tensor] | None = None  # the last answer of `distances_to_mixture`
        self._computed, self._asked = 0, 0  # calls of `compute` and of `each`
        self.server_value = engine.value  # [S] what the round began with

    # What came back with training.

    def stat(self, probe: Probe) -> Tensor:
        return self._stats[probe]

    def scalars(self, name: str) -> Tensor:
        found = [self._result(c).scalars[name] for c in self.clients]
        rows = [row for row in found if isinstance(row, SparseVector)]
        return SparseVector.stack(rows) if rows else torch.from_numpy(np.array(found))

    @property
    def counters(self) -> Tensor:
        return torch.tensor([self._result(c).counters for c in self.clients], dtype=torch.float64)

    def by_size(self) -> Mixture:
        return Mixture.of(self.sizes, self.layers)

    def uniform(self) -> Mixture:
        return Mixture.of(torch.ones(len(self.clients)), self.layers)

    def _result(self, client: int) -> ClientResult:
        return self.trained.results[client]

    # Calls about each client.

    def each(self, function: Callable[..., Tensor], *payload: Any) -> Tensor:
        sent = [
            self._engine.put(p.numpy()) if isinstance(p, torch.Tensor) else p for p in payload
        ]  # once for all hosts
        self._asked += 1
        return self._per_client("each", self._seed(f"each {self._asked}"), function, *sent)

    def distances(self, to: Tensor, layers: LayerMap | None = None) -> Tensor:
        self._need_one_model(self.distances)
        return self._distances(to - self.server_value[: len(to)], layers or self.layers)

    def distances_to_mixture(self, mix: Mixture) -> Tensor:
        if self._distances_to is None or self._distances_to[0] is not mix:
            centre = self._sum(sum_request(self.clients, self.layers, mix.weights))
            self._distances_to = mix, self._distances(centre, self.layers)
        return self._distances_to[1]

    def dots(self, with_: Tensor, layers: LayerMap | None = None) -> Tensor:
        return self.each(_dots, with_, layers or self.layers)

    def predict(self, rows: np.ndarray) -> Tensor:
        self._need_one_model(self.predict)
        return self._per_client("predict", rows)

    def _distances(self, to: Tensor, layers: LayerMap) -> Tensor:
        """[K, L] of the updates from `to` [P] or [S]."""
        return layers.segments.per_layer(
            self._per_client("squared_distances", self._engine.put(to.numpy()), layers)
        ).sqrt()

    def _seed(self, call: str) -> int:
        """The seed of one call in this round, for layers and functions that draw from global generators."""
        info = self.trained.round_info
        return stream_seed(info.seed, info.t, SERVER, call)

    def _per_client(self, method: str, *args: Any) -> Tensor:
        """Ask every host about the clients it holds: [K, ...] in the order of `clients`."""
        dispatcher = self._dispatcher
        dispatcher.need_models()

        def ask() -> Tensor:
            held = dispatcher.held
            results = self._engine.ask([Call(i, method, (clients, *args)) for i, clients in held.items()])
            by_client = {
                c: row
                for clients, rows in zip(held.values(), results, strict=True)
                for c, row in zip(clients, rows, strict=True)
            }
            return torch.from_numpy(np.stack([by_client[c] for c in self.clients]))

        return dispatcher.retry(ask)

    def _need_one_model(self, of: Callable[..., Any]) -> None:
        if self._began_with is not None:
            way = "Only their updates can be compared: cohort.each, dots, gram, columns and reduce"
            fault = "was asked for, but the clients of this round began at models of different rounds"
            raise misused(of, fault, way, self.trained.round_info.t)

    # Gathers.

    @property
    def gathers(self) -> bool:
        return len(self.clients) * self.layers.S * 4 <= self._engine.gather_bytes

    def gather(self) -> Tensor:
        self._need_room()
        return self._per_client("rows")

    def gram(self) -> Tensor:
        pieces = column_pieces(self.layers.P)
        return tensor_of(np.sum(self._exchanged(_products, pieces), axis=0))

    def columns(self, function: Callable[..., Tensor], mix: Mixture | None = None, *payload: Any) -> Tensor:
        result = torch.zeros(self.layers.S)
        pieces = column_pieces(self.layers.S) if mix is None else sent_pieces(mix)
        pieces = [piece for piece in pieces if piece.senders != ()]
        for piece, made in zip(pieces, self._exchanged(function, pieces, *payload), strict=True):
            if made.shape != (piece.stop - piece.start,):
                way = f"Return [{piece.stop - piece.start}], a number for each column"
                raise misused(function, f"returned {form(tensor_of(made))}", way, self.trained.round_info.t)
            result[piece.start : piece.stop] = tensor_of(made)
        greatest = self.server_value.clone()
        self._set_counters(greatest, mix or self.uniform())
        counters = slice(min((part.start for _, part, _ in self.layers.counters), default=self.layers.S), None)
        result[counters] = (greatest - self.server_value)[counters]
        return result

    def _exchanged(
        self, function: Callable[..., Tensor], pieces: Sequence[ColumnPiece], *payload: Any
    ) -> list[np.ndarray]:
        """`function` of each piece, in order. The hosts share the pieces, and send each other slices of their updates."""
        engine, dispatcher = self._engine, self._dispatcher
        dispatcher.need_models()
        self._asked += 1
        seed, place = self._seed(f"columns {self._asked}"), {client: row for row, client in enumerate(self.clients)}

        def ask() -> list[np.ndarray]:
            held = dispatcher.held
            places = [[place[client] for client in clients] for clients in held.values()]
            made = []
            share = -(-(pieces[-1].stop - pieces[0].start) // len(held)) if pieces else 0
            batches = [*batched(pieces, min(share, engine.gather_bytes // (4 * len(self.clients))))]
            for first in range(0, len(batches), len(held)):
                calls = []
                for host, batch in zip(held, batches[first:], strict=False):
                    bounds = batch[0].start, batch[-1].stop
                    slices = [engine.call(Call(i, "slices", (clients, *bounds))) for i, clients in held.items()]
                    calls.append(Call(host, "columns", (function, seed, batch, payload, places, *slices)))
                made += [one for result in engine.ask(calls) for one in result]
            return made

        return dispatcher.retry(ask)

    def compute(self, function: Callable[..., Any], *payload: Any, models: bool = False) -> Any:
        engine, dispatcher = self._engine, self._dispatcher
        seed = self._seed(f"compute {self._computed}")
        self._computed += 1
        if models:
            self._need_one_model(self.compute)
            self._need_room()
            dispatcher.need_models()

        def run() -> Any:
            held = dispatcher.held.items() if models else ()
            updates = [engine.call(Call(i, "rows", (clients,))) for i, clients in held]
            place = {client: row for row, client in enumerate(self.clients)}
            places = [
                [place[client] for client in clients] for _, clients in held
            ]  # of who trained again, not in order
            base = engine.published_public if models else engine.published
            return engine.ask([Call(0, "compute", (function, seed, base, payload, places, *updates))])[0]

        return dispatcher.retry(run)

    def _need_room(self) -> None:
        if not self.gathers:
            need, limit = len(self.clients) * self.layers.S * 4 / 2**30, self._engine.gather_bytes / 2**30
            models = f"{len(self.clients)} models in one process are {need:.2g} GiB"
            raise MemoryError(f"{models}, but the engine's gather_bytes allows {limit:.2g} GiB")

    # Sums.

    def reduce(self, mix: Mixture, of: str = "model", power: int = 1, distances_to: Mixture | None = None) -> Tensor:
        if distances_to is not None and len(self._dispatcher.held) == 1 and self._began_with is None:
            return self._reduce_with_distances(mix, distances_to)
        if of != "model" or power != 1:
            weights = mix.coefficients if of == "model" else mix.weights
            return self._sum(sum_request(self.clients, self.layers, weights, of=of, power=power))
        early = self.trained.early_sum if self._dispatcher.sums_only else None
        made_early = early is not None and mix is early.mixture and self.clients == self.trained.asked
        result = self._sum(early.request if early and made_early else aggregation(mix, self.clients))
        if self._began_with is not None:  # buffers are averaged, and not what has changed of them
            weights = mix.buffers.repeat_interleave(self.layers.sizes[self.layers.T :], dim=1)
            result[self.layers.P :] += (weights * (self._began_with - self.server_value[self.layers.P :])).sum(0)
        self._set_counters(result, mix)
        return result

    def _reduce_with_distances(self, mix: Mixture, centre: Mixture) -> Tensor:
        """`reduce` and `distances_to_mixture` in one pass over the models, where one host has them all."""
        dispatcher = self._dispatcher
        dispatcher.need_models()
        requests = [aggregation(mix, self.clients)]
        if not torch.equal(mix.weights, centre.weights):
            requests.append(sum_request(self.clients, self.layers, centre.weights))

        def ask() -> Any:
            ((host, held),) = dispatcher.held.items()
            return self._engine.ask([Call(host, "sum_and_distances", (held, *requests))])[0]

        total, per_run = map(tensor_of, dispatcher.retry(ask))
        self._distances_to = centre, self.layers.segments.per_layer(per_run).sqrt()
        result, sent = torch.empty(self.layers.S), [bool(weights.any()) for *_, weights in requests[0].pieces]
        scaled = replace(requests[0], factors=[1.0] * len(sent))  # the host has done that
        place(scaled.compact(total, sent), scaled, self.server_value, result)
        self._set_counters(result, mix)
        return result

    def _set_counters(self, result: Tensor, mix: Mixture) -> None:
        """Integer buffers are not averaged: the largest value sent is used."""
        for tensor, elements, columns in self.layers.counters:
            sent = mix.sent[:, tensor]
            if sent.any():
                result[elements] = self.counters[sent, columns].amax(0)

    def _sum(self, request: SumRequest) -> Tensor:
        """The sums of all pieces as one vector."""
        engine, dispatcher = self._engine, self._dispatcher
        if not request.planned_early and request.of == "model":
            dispatcher.need_models()
        result = torch.empty(request.bounds[1])

        def total() -> None:
            if request.planned_early and dispatcher.early_total:
                parts, roots = [request], [dispatcher.early_total]
            else:
                parts = [request] if request.planned_early else chunks(request)
                # All sums are asked for before any merge: a host sums the next part while the last one travels. Hosts
                # take turns to merge, so that none has to hand all of a model on.
                begun = [self._partials(part, turn) for turn, part in enumerate(parts)]
                roots = [merge_up(engine, part, *begun[turn], turn) for turn, part in enumerate(parts)]
            for part, root in zip(parts, roots, strict=True):
                value, sent = engine.fetch([root])[0][0, len(part.position)]  # of the whole cohort, and nothing less
                place(tree.Partial(tensor_of(value), sent), part, self.server_value, result)

        dispatcher.retry(total)
        return result

    def _partials(self, request: SumRequest, turn: int) -> tuple[dict[int, Handle], dict[int, SumDestination]]:
        """Every host's partial sums, and where they go."""
        held = self._dispatcher.held
        sums_to = destinations(self._engine, list(held), turn)
        calls = {i: Call(i, "partial", (held[i], request, to)) for i, to in sums_to.items()}
        return {i: self._engine.call(call) for i, call in calls.items()}, sums_to


def _products(updates: Tensor) -> Tensor:
    """[K, K] of some coordinates."""
    updates = updates.double()
    return updates @ updates.T


def _dots(update: Tensor, own: LayerMap, with_: Tensor, layers: LayerMap) -> Tensor:
    return layers.dots(update[: len(with_)], with_)
