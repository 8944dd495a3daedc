"""A host's part of the tree reductions over a round's clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from raysim.clock import Clock
from raysim.core import tree
from raysim.core.arrays import on_device
from raysim.core.flat import finite
from raysim.core.layers import LayerMap
from raysim.host import distances
from raysim.host.messages import SumDestination, SumRequest, Sums
from raysim.host.trained import TrainedModels
from raysim.lazy import Tensor, torch

LogEntry = tuple[str, float, float, int]  # phase, start, stop (seconds since the epoch), bytes sent to other hosts


class PartialSums:
    """Sums over the clients that one host has trained, and their merging with those of other hosts."""

    def __init__(self, trained: TrainedModels, layers: LayerMap, clock: Clock):
        self.trained, self.layers, self.clock = trained, layers, clock
        self.log: list[LogEntry] = []
        self._waiting: dict[int, tree.Partials] = {}  # by the key of their `SumDestination`: to be merged here
        self._early: tree.Partials = {}  # made while training

    def made_while_training(
        self, clients: Sequence[int], request: SumRequest, train: Callable[[int, Tensor, bool], bool]
    ) -> tree.Partials:
        """Train in the order of the tree and add each update as it comes, so that no more than the tree's depth are held
        at once. `train(client, update, check)` leaves an update [S] and says whether there is one."""
        positions = {request.position[c]: c for c in clients}
        spare: list[Tensor] = []

        def leaf(position: int, check: bool) -> tree.Partial:
            update = spare.pop() if spare else torch.empty(self.layers.S, device=self.trained.device)
            weights = [float(w[position]) for *_, w in request.pieces]
            if not train(positions[position], update, check or not all(weights)):
                return tree.Partial(update.new_empty(0), (False,) * len(weights))
            for (start, stop, _), weight in zip(request.pieces, weights, strict=True):
                if weight not in (0, 1):
                    update[start:stop] *= weight
            return request.compact(update, [weight != 0 for weight in weights])

        made: tree.Partials = {}
        for node in tree.cover(set(positions), len(request.position)):
            total = tree.accumulate(node, partial(leaf, check=False), request.sizes, spare)
            if not finite(total.value):
                # Again, to see whose model it is.
                total = tree.accumulate(node, partial(leaf, check=True), request.sizes, spare)
            made[node] = total
        return made

    def add_early(self, made: tree.Partials, request: SumRequest) -> None:
        """Keep what `made_while_training` has returned, beside what it did for other clients of the same round."""
        self._early = (
            tree.merge(self._early | made, len(request.position), request.sizes) if self._early else made
        )  # fmt: skip

    def early(self, to: SumDestination) -> Sums:
        """The sums that were made while training."""
        return self._leave(self._early, to, self.clock.wall())

    def partial(self, clients: Sequence[int], request: SumRequest, to: SumDestination) -> Sums:
        """Sum the largest nodes of the tree that `clients`, trained here, make up."""
        if request.planned_early:
            return self.early(to)
        started, client = self.clock.wall(), {request.position[c]: c for c in clients}
        sums: tree.Partials = {}
        first, last = request.bounds
        for node in tree.cover(set(client), len(request.position)):
            blocks = self.trained.blocks([client[p] for p in range(*node)], request.of, request.power)
            total = self.trained.updates.new_empty(last - first)
            weighted, out = tree.WeightedSum(request.pieces, node, total), tree.as_array(total)
            for start, stop in weighted.blocks():
                weighted.add(blocks(start, stop), start, out[start - first : stop - first])
            sums[node] = request.compact(total, weighted.sent)
        return self._leave(sums, to, started)

    def merge(self, clients: int, sizes: Sequence[int], to: SumDestination, others: Sequence[Sums]) -> Sums:
        """Merge the partial sums that wait here with those of other hosts, of pieces of these `sizes`."""
        started = self.clock.wall()
        sums = self._waiting.pop(to.key)
        for other in others:
            for node, (value, sent) in other.items():
                sums[node] = tree.Partial(on_device(value, self.trained.device), sent)
        return self._leave(tree.merge(sums, clients, sizes), to, started)

    def with_distances(
        self, clients: Sequence[int], mix: SumRequest, centre: SumRequest | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """All clients of a round are here: the sum [S] of a mixture of their updates, and, for each run of the layers'
        segments [K, runs], the squared distances of the updates from the mixture `centre` (None: from the same one).

        Each block of the updates is read once for all of that.
        """
        started, trained, P, S = self.clock.wall(), self.trained, self.layers.P, self.layers.S
        blocks, node = trained.blocks(sorted(clients, key=mix.position.__getitem__)), (0, len(clients))
        total = trained.updates.new_zeros(S)
        space = tree.as_array(total.new_empty(len(clients), trained.block))  # one for all: it is to stay in the cache
        sums = [tree.WeightedSum(r.pieces, node, total, r.factors, space) for r in (mix, centre) if r]
        out, mean = tree.as_array(total), tree.as_array(total.new_empty(trained.block))

        def add(block: Any, start: int, stop: int) -> Any:
            sums[0].add(block, start, out[start:stop])
            if centre is None:
                return out[start:stop]
            mean[: stop - start] = 0
            sums[1].add(block, start, mean[: stop - start])
            return mean[: stop - start]

        per_run = distances.squared(blocks, add, self.layers, P, space)
        for start in range(P, S, sums[0].block):  # the buffers
            stop = min(start + sums[0].block, S)
            sums[0].add(blocks(start, stop), start, out[start:stop])
        self.log.append(("reduce", started, self.clock.wall(), 0))
        return total.cpu().numpy(), per_run

    def _leave(self, sums: tree.Partials, to: SumDestination, started: float) -> Sums:
        """Let the sums wait here, or return them as arrays for another process."""
        leaving: Sums = {}
        if to.stay:
            self._waiting[to.key] = dict(sums)
        else:
            leaving = {node: (part.value.cpu().numpy(), part.sent) for node, part in sums.items()}
        self.log.append(("reduce", started, self.clock.wall(), sum(value.nbytes for value, _ in leaving.values())))
        return leaving

    def clear(self) -> list[LogEntry]:
        """Forget all sums, and return what was logged since the last time."""
        self._waiting, self._early = {}, {}
        log, self.log = self.log, []
        return log
