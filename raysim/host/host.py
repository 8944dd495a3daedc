"""Some clients on one device: the thin front of all client-side work. The in-process engine calls it, the Ray engine an
actor that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from raysim import machine
from raysim.core.arrays import on_device
from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.rng import SERVER, preserved, seed_globals, seeded_for, stream_seed
from raysim.core.score import Score
from raysim.core.server_model import ServerModel
from raysim.data import Dataset, Partition
from raysim.host import distances
from raysim.host.batched_trainer import BatchedTrainer
from raysim.host.device import choose_device, keep_freed_memory, numerics
from raysim.host.download import Download
from raysim.host.evaluator import Evaluator
from raysim.host.messages import (
    Arrays,
    ClientResult,
    ColumnPiece,
    HostSpec,
    SumDestination,
    SumRequest,
    Sums,
    TrainReply,
    TrainRequest,
)
from raysim.host.samples import SampleSource
from raysim.host.sums import LogEntry, PartialSums
from raysim.host.trained import TrainedModels
from raysim.host.trainer import Trainer
from raysim.lazy import Tensor, torch

PREDICT_BATCH = 512  # samples; part of the bits, and so none of the settings


class ClientHost:
    """Trains clients on one model, and keeps what they trained until the round is closed.

    An engine calls every method here, so the class has many; each is a few lines that call one part.
    """

    def __init__(self, spec: HostSpec, data: Dataset, partition: Partition):
        torch.set_num_threads(spec.threads)
        self.device = choose_device(spec.device)
        model, self.layers = spec.network()
        if spec.keep_freed_memory:
            keep_freed_memory(4 * self.layers.S)
        self.flat = FlatModel(model, self.layers, self.device)
        self.samples = SampleSource(data, partition, self.device, spec.channels_last, spec.augment)
        self.task = spec.task
        self.evaluator = Evaluator(spec, self.flat, self.samples)
        kind = BatchedTrainer if spec.batch_clients > 1 else Trainer
        self.trainer = kind(spec, self.flat, self.samples, self.evaluator)
        self.trained = TrainedModels(self.layers.S, self.device)
        self.spec, self.clock = spec, spec.clock
        self.sums = PartialSums(self.trained, self.layers, self.clock)
        self.t = -1
        self._server: Tensor = torch.empty(0)  # [S] what the round began with
        # What becomes of a client's state or model as soon as it is made.
        self.store: Callable[[Arrays], Arrays] = lambda arrays: arrays
        held = 0 if self.device.type == "cuda" else machine.private_memory()
        self._peak_before = self._peak() - held  # of the process, which may have served another run

    def computes_on(self) -> str:
        """The kind of its device: cpu or cuda."""
        return self.device.type

    def most_memory(self) -> int:
        """Bytes of its GPU's memory that this run has taken at most, or of the machine's, with what the process had before."""
        return self._peak() - self._peak_before

    def _peak(self) -> int:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_reserved(self.device) if on_gpu else machine.most_resident()

    def numerics(self) -> dict[str, Any]:
        """What decides the bits of its device."""
        return numerics(self.device)

    # Clients.

    def train(self, request: TrainRequest, value: np.ndarray, shared: Arrays, *objects: Arrays) -> TrainReply:
        """Train the request's clients, who are sent `value` [S] and `shared`."""
        started = self.clock.wall()
        if self.t != request.round_info.t:
            self.close()
        self.t = request.round_info.t
        download = Download.of(request, value, shared, objects, self.device)
        self._server = download.newest
        self.samples.expect(request.clients)
        results: dict[int, ClientResult] = {}

        def train(client: int, update: Tensor, check: bool = True) -> bool:
            result, vectors = self.trainer.train(download, client, update, check)
            results[client] = self._stored(result)
            self.trained.add_vectors(client, vectors)
            return result.status == "ok"

        with self._global_streams():
            if request.early_plan is None:
                self.trained.reserve(len(request.clients))
                for client in request.clients:
                    train(client, self.trained.place(client))
            else:
                made = self.sums.made_while_training(request.clients, request.early_plan, train)
                # A client that failed may train elsewhere: no sum here may then have its place.
                if all(result.status == "ok" for result in results.values()):
                    self.sums.add_early(made, request.early_plan)
        stopped = self.clock.wall()
        return TrainReply(results, started, stopped, self.sums.early(request.sums_to) if request.sums_to else {})

    def initialize(self, request: TrainRequest, value: np.ndarray, shared: Arrays, *objects: Arrays) -> TrainReply:
        """Only the clients' local initialisation: their results have a state and nothing else."""
        started, download = self.clock.wall(), Download.of(request, value, shared, objects, self.device)
        with self._global_streams():
            results = {c: self._stored(self.trainer.initialize(download, c)) for c in request.clients}
        return TrainReply(results, started, self.clock.wall())

    def personal(
        self, request: TrainRequest, value: np.ndarray, shared: Arrays, *objects: Arrays
    ) -> dict[int, ClientResult]:  # fmt: skip
        """Test, for each client, the model it would now be given. No state changes."""
        download = Download.of(request, value, shared, objects, self.device)
        with self._global_streams():
            return {client: self.trainer.personal(download, client) for client in request.clients}

    def loss(
        self, request: TrainRequest, value: np.ndarray, shared: Arrays, *objects: Arrays
    ) -> dict[int, ClientResult]:  # fmt: skip
        """The loss of what each client is sent, on its training samples. No state changes."""
        download = Download.of(request, value, shared, objects, self.device)
        self.samples.expect(request.clients)
        with self._global_streams():
            return {client: self.trainer.loss(download, client) for client in request.clients}

    def evaluate(self, value: np.ndarray, rows: np.ndarray, t: int) -> list[Score]:
        """The model `value` [S] on each batch of `rows` of the data set, in round t."""
        self.flat.value.copy_(on_device(value, self.device))
        with self._global_streams():
            return self.evaluator.score(rows, stream_seed(self.spec.seed, t, SERVER, "test"))

    def _stored(self, result: ClientResult) -> ClientResult:
        if result.state is not None:
            result.state = self.store(result.state)
        if result.model is not None:
            result.model = self.store(result.model)
        return result

    @contextmanager
    def _global_streams(self) -> Iterator[None]:
        """Put the global random streams back afterwards, and the model in train mode before."""
        with preserved():
            self.flat.model.train()
            yield

    # Collectives over the trained clients.

    def each(self, clients: Sequence[int], seed: int, function: Callable[..., Tensor], *payload: Any) -> np.ndarray:
        """[k, ...] `function(update [S], layers, *payload)` of each client. One at a time, because a reduction over a
        matrix may add in another order than over its rows, and the result must not depend on the packing."""
        tensors = [on_device(p, self.device) if isinstance(p, np.ndarray) else p for p in payload]
        results = []
        for client in clients:
            with seeded_for(function, stream_seed(seed, self.t, client, "each")):
                results.append(function(self.trained.update(client), self.layers, *tensors))
        return np.stack([r.detach().cpu().numpy() for r in results])

    def predict(self, clients: Sequence[int], rows: np.ndarray) -> np.ndarray:
        """[k, M, C] logits of the clients' models on M `rows` of the data set, in eval mode."""
        parts, logits = self.samples.inputs(rows).split(PREDICT_BATCH), []
        with preserved():
            for client in clients:
                self.spec.seed_generators(stream_seed(self.spec.seed, self.t, client, "predict"), self.device)
                torch.add(self._server, self.trained.update(client), out=self.flat.value)
                logits.append(torch.cat([self.evaluator.outputs(x) for x in parts]).cpu().numpy())
        return np.stack(logits)

    def rows(self, clients: Sequence[int]) -> np.ndarray:
        """[k, S] the clients' updates."""
        return self.trained.gather(clients).cpu().numpy()

    def slices(self, clients: Sequence[int], start: int, stop: int) -> np.ndarray:
        """[k, stop - start] of the clients' updates."""
        return self.trained.gather(clients, start, stop).cpu().numpy()

    def columns(
        self, function: Callable[..., Tensor], seed: int, pieces: Sequence[ColumnPiece], payload: Sequence[Any],
        places: Sequence[Sequence[int]], *slices: np.ndarray,
    ) -> list[np.ndarray]:  # fmt: skip
        """`function(updates, *payload)` of each piece of some adjacent columns. The `slices` have all clients' updates of
        these, at `places`: where in the cohort each row is."""
        rows = torch.empty(sum(map(len, places)), pieces[-1].stop - pieces[0].start, device=self.device)
        for at, rows_of_host in zip(places, slices, strict=True):
            rows[list(at)] = on_device(rows_of_host, self.device)
        made = []
        for start, stop, senders in pieces:
            part = rows[:, start - pieces[0].start : stop - pieces[0].start]
            part = part if senders is None else part[list(senders)]
            with seeded_for(function, stream_seed(seed, self.t, SERVER, f"columns {start}")):
                made.append(function(part, *payload).detach().cpu().numpy())
        return made

    def squared_distances(self, clients: Sequence[int], to: np.ndarray, layers: LayerMap) -> np.ndarray:
        """[k, runs] float64: squared distances of the clients' updates from `to` [P] (or [S]), for each run of
        `layers.segments`."""
        return distances.of_updates(self.trained, clients, to, layers)

    def partial(self, clients: Sequence[int], request: SumRequest, to: SumDestination) -> Sums:
        """Sum the largest nodes of the tree that `clients`, trained here, make up."""
        return self.sums.partial(clients, request, to)

    def merge(self, clients: int, sizes: Sequence[int], to: SumDestination, *others: Sums) -> Sums:
        """Merge the partial sums that wait here with those of `others`, of pieces of these `sizes`."""
        return self.sums.merge(clients, sizes, to, others)

    def sum_and_distances(
        self, clients: Sequence[int], mix: SumRequest, centre: SumRequest | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `PartialSums.with_distances`."""
        return self.sums.with_distances(clients, mix, centre)

    # Other work for the server.

    def distances(self, blocks: Sequence[range], *models: Arrays) -> list[np.ndarray]:
        """For each block of rows, see `distances.between_models`."""
        return distances.between_models(blocks, models, self.layers.P, self.device)

    def compute(
        self, function: Callable[..., Any], seed: int, value: np.ndarray, payload: tuple[Any, ...],
        places: Sequence[Sequence[int]], *models: np.ndarray,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """The server's work on data: `function(server_model, *payload)`; `models` are rows of updates from all hosts, and
        `places` where in the cohort each of them is."""
        updates = None
        if models:
            updates = torch.empty(sum(map(len, models)), self.layers.S, device=self.device)
            for rows, of_host in zip(places, models, strict=True):
                updates[list(rows)] = on_device(of_host, self.device)
        server_model = ServerModel(self.flat, on_device(value, self.device), updates, self.samples.rows, self.task)
        with self._global_streams():
            seed_globals(seed, self.device)
            result = function(server_model, *(p.to(self.device) if isinstance(p, torch.Tensor) else p for p in payload))
        # Copies: what a function returns may lie in the model's own storage, which others will use.
        if isinstance(result, torch.Tensor):
            return result.detach().to("cpu", copy=True)
        return tuple(r.detach().to("cpu", copy=True) for r in result)

    def close(self) -> list[LogEntry]:
        """Forget the trained models and return what was logged since the last time."""
        self.trained.clear()
        self.t = -1
        return self.sums.clear()
