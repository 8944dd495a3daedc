"""Some clients on one device: all client-side work. The in-process engine calls it, the Ray engine wraps it in an actor."""

from __future__ import annotations

import ctypes
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core import tree
from raysim.core.client import (
    ClientData,
    LocalRun,
    Samples,
    Upload,
)
from raysim.core.flat import FlatModel
from raysim.core.layers import RUN, LayerMap
from raysim.core.rng import seed_layers, stream_seed
from raysim.core.score import Score, correct_and_loss
from raysim.core.state import pack, unpack
from raysim.core.workbench import Workbench
from raysim.data import Dataset, Partition
from raysim.host.messages import (
    Arrays,
    ClientResult,
    HostSpec,
    SumDestination,
    SumRequest,
    Sums,
    TrainReply,
    TrainRequest,
)  # fmt: skip

SAMPLE_BYTES = 256 << 20  # model inputs that a host keeps on its device from round to round


class ClientHost:
    """Trains clients one after the other on one model, and keeps what they trained until the round is closed."""

    def __init__(self, spec: HostSpec, data: Dataset, partition: Partition):
        torch.set_num_threads(spec.threads)
        if spec.keep_freed_memory:
            keep_freed_memory()
        self.spec, self.data, self.partition = spec, data, partition
        self.device = choose_device(spec.device)
        model, layers = spec.network()
        self.flat = FlatModel(model, layers, self.device)
        self.layers, self.stack = layers, spec.stack
        self.updates = torch.empty(0, layers.S, device=self.device)  # one row a trained client: client minus server
        self.row: dict[int, int] = {}  # client -> its row
        self.vectors: dict[str, dict[int, Tensor]] = {}  # further uploads by name and client
        self.t = -1
        self._samples: dict[tuple[int, str], Samples] = {}  # what clients trained on, as long as there is room
        self._room = SAMPLE_BYTES
        self._counters = [spec for spec in layers.tensors if spec.kind == "counter"]
        self._pending: dict[int, tree.Partials] = {}  # partial sums that wait here to be merged
        self._foreseen: tree.Partials = {}  # sums made while training
        self._log: list[tuple[str, float, float, int]] = []
        self._server: Tensor = torch.empty(0)
        # What becomes of a client's state or model as soon as it is made.
        self.store: Callable[[Arrays], Arrays] = lambda arrays: arrays

    def ping(self) -> int:
        """The round whose trained models this host holds."""
        return self.t

    def train(self, visit: TrainRequest, value: np.ndarray, shared: Arrays, *objects: Arrays) -> TrainReply:
        """Train the request's clients, who are sent `value` [S] and `shared`."""
        started = time.time()
        if self.t != visit.round_info.t:
            self.close()
        self.t = visit.round_info.t
        self._server = server = on_device(value, self.device)
        shared_tensors = {name: on_device(array, self.device) for name, array in shared.items()}
        results: dict[int, ClientResult] = {}

        def train(client: int, update: Tensor, check: bool = True) -> bool:
            """Leave the client's update in `update` [S]; whether there is one. `check` refuses what is not finite."""
            kept: Arrays = objects[visit.state_index[client]] if client in visit.state_index else {}
            trace: Arrays = {f"state.before.{name}": array for name, array in kept.items()} if visit.trace else {}
            begun = time.perf_counter()
            try:
                run = self._run(visit, client, server, shared_tensors, kept, objects)
                outcome, upload = self._train(run, trace)
                torch.sub(upload.value, server, out=update)
                if check and not finite(update):
                    outcome = ClientResult(
                        "its model is not finite (NaN or Inf): refused. A lower local.lr or local.grad_clip may help"
                    )
            except Exception:
                outcome = ClientResult(traceback.format_exc())
            outcome.seconds = time.perf_counter() - begun
            results[client] = outcome
            if outcome.status != "ok":
                return False
            for name, vector in upload.vectors.items():
                self.vectors.setdefault(name, {})[client] = vector.detach().clone()
            if visit.return_states:
                outcome.state = self.store(self._kept_arrays(run))
            if visit.return_models:
                outcome.model = self.store({"value": to_numpy(upload.value)})
            if visit.trace:
                outcome.trace = trace | self._traced(upload, outcome.state or {})
            if visit.test:
                self.stack.personal(run)
                outcome.test = self.test(client)
            return True

        with self._global_stream():
            if visit.early_plan is None:
                self._grow(len(self.row) + len(visit.clients))
                for client in visit.clients:
                    train(client, self.updates[self.row.setdefault(client, len(self.row))])
            else:
                self._sum_while_training(visit, visit.early_plan, train)
        stopped = time.time()
        sums = self._leave(self._foreseen, visit.sums_to, stopped) if visit.sums_to else {}
        return TrainReply(results, started, stopped, sums)

    def _sum_while_training(
        self, visit: TrainRequest, request: SumRequest, train: Callable[[int, Tensor, bool], bool]
    ) -> None:
        """Train in the order of the tree and add each model as it comes: no more than its depth are held at once."""
        positions = {request.position[c]: c for c in visit.clients}

        def leaf(position: int, check: bool) -> tree.Partial:
            update = torch.empty(self.layers.S, device=self.device)
            weights = [float(w[position]) for *_, w in request.pieces]
            if not train(positions[position], update, check or not all(weights)):
                return tree.Partial(update.new_empty(0), (False,) * len(weights))
            for (start, stop, _), weight in zip(request.pieces, weights, strict=True):
                if weight not in (0, 1):
                    update[start:stop] *= weight
            return request.compact(update, [weight != 0 for weight in weights])

        earlier = bool(self._foreseen)  # visits of the same round
        for node in tree.cover(set(positions), len(request.position)):
            total = tree.accumulate(node, partial(leaf, check=False), request.sizes)
            if not finite(total.value):
                # Again, to see whose model it is.
                total = tree.accumulate(node, partial(leaf, check=True), request.sizes)
            self._foreseen[node] = total
        if earlier:
            self._foreseen = tree.merge(self._foreseen, len(request.position), request.sizes)

    @contextmanager
    def _global_stream(self) -> Iterator[None]:
        """Put torch's global random stream back afterwards, and the model in train mode before."""
        before = torch.get_rng_state()
        self.flat.model.train()
        try:
            yield
        finally:
            torch.set_rng_state(before)

    def _run(
        self, visit: TrainRequest, client: int, server: Tensor, shared: Mapping[str, Tensor], kept: Arrays,
        objects: Sequence[Arrays],
    ) -> LocalRun:  # fmt: skip
        peers = PeerModels(visit, client, server, objects)
        received = mixed(peers, client, visit.mix[client], self.layers.P) if visit.mix is not None else server
        kept_objects = self._kept_objects(kept)
        if self.stack.peer_models and client in visit.model_index:
            kept_objects["previous"] = peers.model(client)
        run = LocalRun(
            client, visit.round_info, self.flat, self.spec.settings, self.stack, self.client_data(client),
            received, shared, peers, kept_objects,
        )  # fmt: skip
        run.orders = [] if visit.trace else None
        run.batch_probes = [p for p in self.spec.probes if p.watches_batches]
        seed_layers(stream_seed(visit.round_info.seed, visit.round_info.t, client, "start"), self.device)
        return run

    def _train(self, run: LocalRun, trace: Arrays) -> tuple[ClientResult, Upload]:
        self.stack.start(run)
        seed_layers(stream_seed(run.round_info.seed, run.t, run.client, "model"), self.device)
        for begin in self.stack.beginners:
            begin(run)
        if run.orders is not None:
            trace["init"] = to_numpy(run.value)
        for probe in self.spec.probes:
            probe.begin(run)
        self.stack.train(run)
        upload = Upload(run.value)
        for finish in self.stack.finishers:
            finish(run, upload)
        run.uploaded = upload.value
        stats = [probe.end(run) for probe in self.spec.probes]
        if run.orders is not None:
            rows = self.partition.train[run.client]
            trace |= {f"samples.{i:04d}.{name}": rows[batch.numpy()] for i, (name, batch) in enumerate(run.orders)}
        losses = [mean_loss(batches) for batches in {id(b): b for b in (run.losses[:1] + run.losses[-1:])}.values()]
        first, last = (losses[0], losses[-1]) if losses else (float("nan"), float("nan"))
        outcome = ClientResult(
            "ok", run.steps, first, last,
            stats=[to_numpy(stat) for stat in stats],
            scalars={name: to_numpy(scalar) for name, scalar in upload.scalars.items()},
            counters=[float(s.view(upload.value)) for s in self._counters],
            vector_bytes=sum(v.numel() * v.element_size() for v in upload.vectors.values()),
            notes=run.notes,
        )  # fmt: skip
        if upload.sent is not None:
            outcome.sent_counts = np.array([int(upload.sent[s.start : s.stop].sum()) for s in self.layers.tensors])
        return outcome, upload

    def _traced(self, upload: Upload, kept: Arrays) -> Arrays:
        trace = {"model": to_numpy(upload.value)} | {f"state.after.{name}": array for name, array in kept.items()}
        return trace | {f"upload.{name}": to_numpy(v) for name, v in (*upload.vectors.items(), *upload.scalars.items())}

    def initialize(self, visit: TrainRequest, value: np.ndarray, shared: Arrays, *objects: Arrays) -> TrainReply:
        """The clients' local initialisation alone: their results have a state and nothing else."""
        started = time.time()
        server = on_device(value, self.device)
        shared_tensors = {name: on_device(array, self.device) for name, array in shared.items()}
        results = {}
        with self._global_stream():
            for client in visit.clients:
                before = objects[visit.state_index[client]] if client in visit.state_index else {}
                run = self._run(visit, client, server, shared_tensors, before, objects)
                self.stack.start(run)
                results[client] = ClientResult("ok", state=self.store(self._kept_arrays(run)))
        return TrainReply(results, started, time.time())

    def _grow(self, rows: int) -> None:
        if rows > len(self.updates):
            grown = torch.empty(rows, self.layers.S, device=self.device)
            grown[: len(self.updates)] = self.updates
            self.updates = grown

    # What a client keeps between rounds, as a flat dict of arrays.

    def _kept_objects(self, arrays: Arrays) -> dict[str, Any]:
        """Copies: the arrays may be shared, and the new state counts only once the round is committed."""
        if not arrays:
            return {}
        tensors = {name: torch.tensor(array, device=self.device) for name, array in arrays.items()}
        methods = {type(m).__name__.lower(): m for m in self.spec.methods}
        kept: dict[str, Any] = {}
        for name in {name.partition(".")[0] for name in tensors}:
            part = {k.partition(".")[2]: v for k, v in tensors.items() if k.partition(".")[0] == name}
            if name in methods:
                kept[name] = unpack(type(methods[name].new_state(self.layers)), part)
            else:
                kept[name] = part.get("", part)
        return kept

    def _kept_arrays(self, run: LocalRun) -> Arrays:
        kept: dict[str, Any] = {}
        for method in self.spec.methods:
            state = run.state(method)
            if state is not None:
                kept |= {f"{type(method).__name__.lower()}.{k}": v for k, v in pack(state).items()}
        if self.stack.keeps_params:
            kept["previous"] = run.value
        if self.stack.personal_layers:
            kept["personal"] = run.params[self.layers.span(self.stack.personal_layers)]
        if self.spec.settings.local_buffers:
            kept["buffers"] = run.buffers
        if self.spec.settings.persist:
            kept |= {f"optimizer.{name}": tensor for name, tensor in run.optimizer.state().items()}
        return {name: to_numpy(tensor) for name, tensor in kept.items()}

    # Samples.

    def client_data(self, client: int) -> ClientData:
        rows = {"train": self.partition.train, "test": self.partition.test, "val": self.partition.val}

        def load(part: str) -> Samples:
            samples = self._samples.get((client, part)) or self.samples(rows[part][client], client)
            size = samples.x.nbytes + samples.y.nbytes
            if (client, part) not in self._samples and size <= self._room:
                self._samples[client, part] = samples
                self._room -= size
            return samples

        return ClientData(load)

    def samples(self, rows: np.ndarray, client: int | None = None) -> Samples:
        """Model inputs and labels of `rows` of the data set, on the device; labels as `client` sees them."""
        x = self.inputs(self.data.x[rows])
        y = self.data.y[rows]
        if client is not None and self.partition.label_map is not None:
            y = self.partition.label_map[client][y]
        return Samples(x, torch.from_numpy(np.ascontiguousarray(y)).to(self.device))

    def inputs(self, raw: np.ndarray) -> Tensor:
        x = self.data.transform(torch.from_numpy(raw).to(self.device))
        return x.contiguous(memory_format=torch.channels_last) if self.spec.channels_last and x.dim() == 4 else x

    # Evaluation.

    def evaluate(self, value: np.ndarray, rows: np.ndarray) -> list[tuple[int, float]]:
        """Correct predictions and summed loss of `value` for each batch of `rows`."""
        self.flat.value.copy_(on_device(value, self.device))
        batches = range(0, len(rows), self.spec.eval_batch)
        samples = (self.samples(rows[i : i + self.spec.eval_batch]) for i in batches)
        return [correct_and_loss(self._logits(x), y) for x, y in samples]

    def test(self, client: int) -> Score:
        """The loaded model on `client`'s test samples."""
        rows = self.partition.test[client]
        if not len(rows):
            return Score(0, 0, 0.0, float("nan"))
        batches = range(0, len(rows), self.spec.eval_batch)
        parts = [self.samples(rows[i : i + self.spec.eval_batch], client) for i in batches]
        return Score.of(torch.cat([self._logits(x) for x, _ in parts]), torch.cat([y for _, y in parts]))

    def personal(self, visit: TrainRequest, value: np.ndarray, shared: Arrays, *objects: Arrays) -> dict[int, Score]:
        """Test, for each client, the model it would now be given. No state is kept."""
        server = on_device(value, self.device)
        shared_tensors = {name: on_device(array, self.device) for name, array in shared.items()}
        scores = {}
        with self._global_stream():
            for client in visit.clients:
                kept = objects[visit.state_index[client]] if client in visit.state_index else {}
                run = self._run(visit, client, server, shared_tensors, kept, objects)
                self.stack.personal(run)
                scores[client] = self.test(client)
        return scores

    @torch.no_grad()
    def _logits(self, x: Tensor) -> Tensor:
        """Of the loaded model in eval mode."""
        self.flat.model.eval()
        logits = self.flat.model(x)
        self.flat.model.train()
        return logits

    # Collectives over the trained clients.

    def each(self, clients: Sequence[int], function: Callable[..., Tensor], *payload: Any) -> np.ndarray:
        """[k, ...] `function(update [S], layers, *payload)` of each client. One at a time, because a reduction over a
        matrix may add in another order than over its rows, and the result must not depend on the packing."""
        tensors = [on_device(p, self.device) if isinstance(p, np.ndarray) else p for p in payload]
        results = [function(self.updates[self.row[c]], self.layers, *tensors) for c in clients]
        return np.stack([r.detach().cpu().numpy() for r in results])

    @torch.no_grad()
    def predict(self, clients: Sequence[int], rows: np.ndarray) -> np.ndarray:
        """[k, M, C] logits on `rows` of the data set in eval mode."""
        x, logits = self.inputs(self.data.x[rows]), []
        self.flat.model.eval()
        for client in clients:
            torch.add(self._server, self.updates[self.row[client]], out=self.flat.value)
            parts = [self.flat.model(x[i : i + self.spec.eval_batch]) for i in range(0, len(x), self.spec.eval_batch)]
            logits.append(torch.cat(parts).cpu().numpy())
        self.flat.model.train()
        return np.stack(logits)

    def rows(self, clients: Sequence[int]) -> np.ndarray:
        """[k, S] the clients' updates."""
        return self.updates[[self.row[c] for c in clients]].cpu().numpy()

    def distances(self, rows: Sequence[int], *models: Arrays) -> np.ndarray:
        """[rows, M] float64: ‖w_i − w_j‖² of the parameters of the M `models` for each i of `rows` and the j after it."""
        squared = np.zeros((len(rows), len(models)))

        def params(i: int) -> Tensor:
            return on_device(models[i]["value"], self.device)[: self.layers.P]

        for first in range(0, len(rows), 8):  # a few models at once, so that the others are read less often
            own = {row: (rows[row], params(rows[row])) for row in range(first, min(first + 8, len(rows)))}
            for j in range(rows[first] + 1, len(models)):
                other = params(j)
                for row, (i, model) in own.items():
                    if i < j:
                        squared[row, j] = squared_distance(model, other)
        return squared

    def partial(self, clients: Sequence[int], request: SumRequest, to: SumDestination) -> Sums:
        """Sum the largest nodes of the tree that `clients`, held here, make up."""
        started = time.time()
        if request.planned_early:
            return self._leave(self._foreseen, to, started)
        client = {request.position[c]: c for c in clients}
        sums, (first, last) = tree.Partials(), request.bounds
        for node in tree.cover(set(client), len(request.position)):
            rows = self._rows([client[p] for p in range(*node)], request.of, request.power)
            total = self.updates.new_empty(last - first)
            weighted, out = tree.WeightedSum(request.pieces, node, total), tree.as_array(total)
            for start, stop in weighted.blocks():
                weighted.add(rows(start, stop), start, out[start - first : stop - first])
            sums[node] = request.compact(total, weighted.sent)
        return self._leave(sums, to, started)

    def spread(
        self, clients: Sequence[int], mix: SumRequest, centre: SumRequest | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """All clients of a round are here: the sum [S] of a mixture of their updates, and, run by run [K, runs], the squared
        distances of the updates from another mixture, or the same. A block of the models is read once for all of that."""
        started = time.time()
        rows, node = self._rows(sorted(clients, key=mix.position.__getitem__)), (0, len(clients))
        total = self.updates.new_zeros(self.layers.S)
        space = tree.as_array(total.new_empty(len(clients), self._block))  # one for all: it is to stay in the cache
        sums = [tree.WeightedSum(r.pieces, node, total, r.factors, space) for r in (mix, centre) if r]
        out, mean = tree.as_array(total), tree.as_array(total.new_empty(self._block))

        def add(block: Any, start: int, stop: int) -> Any:
            sums[0].add(block, start, out[start:stop])
            if centre is None:
                return out[start:stop]
            mean[: stop - start] = 0
            sums[1].add(block, start, mean[: stop - start])
            return mean[: stop - start]

        per_run = self._squared_distances(rows, add, self.layers, self.layers.P, space)
        for start in range(self.layers.P, self.layers.S, sums[0].block):  # the buffers
            stop = min(start + sums[0].block, self.layers.S)
            sums[0].add(rows(start, stop), start, out[start:stop])
        self._log.append(("reduce", started, time.time(), 0))
        return total.cpu().numpy(), per_run

    def squared_distances(self, clients: Sequence[int], to: np.ndarray, layers: LayerMap) -> np.ndarray:
        """[k, runs] float64: squared distances of the clients' updates from `to` [P] (or [S]), run by run."""
        there = tree.as_array(on_device(to, self.device))
        space = tree.as_array(self.updates.new_empty(len(clients), self._block))
        return self._squared_distances(self._rows(clients), lambda _, a, b: there[a:b], layers, len(to), space)

    def _squared_distances(
        self,
        rows: Callable[[int, int], Any],
        centre: Callable[[Any, int, int], Any],
        layers: LayerMap,
        width: int,
        space: Any,
    ) -> np.ndarray:
        """Of the first `width` elements of the rows from the `centre(block, start, stop)` of each block."""
        ops: Any = torch if self.device.type == "cuda" else np
        columns = []
        for start, stop in layers.blocks(self._block):
            if start < width:
                block = rows(start, stop)
                difference = ops.subtract(block, centre(block, start, stop), out=space[:, : stop - start])
                columns.append(layers.squares(torch.as_tensor(difference), start))
        return torch.cat(columns, 1).cpu().numpy()

    @property
    def _block(self) -> int:
        return max(RUN, tree.GPU_BLOCK if self.device.type == "cuda" else tree.BLOCK)

    def _rows(self, clients: Sequence[int], of: str = "model", power: int = 1) -> Callable[[int, int], Any]:
        """What `clients` trained or uploaded, for a `tree.WeightedSum`: (start, stop) -> [k, stop - start]."""
        if of == "model":
            matrix, rows = tree.as_array(self.updates), [self.row[c] for c in clients]
            if rows == list(range(rows[0], rows[0] + len(rows))):  # without a copy
                part = matrix[rows[0] : rows[0] + len(rows)]
                return (lambda a, b: part[:, a:b] ** 2) if power == 2 else (lambda a, b: part[:, a:b])
            return lambda a, b: matrix[rows, a:b] ** power
        vectors = [tree.as_array(self.vectors[of][c]) for c in clients]
        stack = torch.stack if self.device.type == "cuda" else np.stack
        return lambda a, b: stack([v[a:b] for v in vectors]) ** power

    def merge(self, clients: int, sizes: Sequence[int], to: SumDestination, *others: Sums) -> Sums:
        """Merge the partial sums that wait here with those of `others`, of pieces of these `sizes`."""
        started = time.time()
        sums = self._pending.pop(to.key)
        for other in others:
            sums |= {node: tree.Partial(on_device(value, self.device), sent) for node, (value, sent) in other.items()}
        return self._leave(tree.merge(sums, clients, sizes), to, started)

    def _leave(self, sums: tree.Partials, to: SumDestination, started: float) -> Sums:
        leaving: Sums = {}
        if to.stay:
            self._pending[to.key] = dict(sums)
        else:
            leaving = {node: (part.value.cpu().numpy(), part.sent) for node, part in sums.items()}
        self._log.append(("reduce", started, time.time(), sum(value.nbytes for value, _ in leaving.values())))
        return leaving

    def compute(
        self, function: Callable[..., Any], seed: int, value: np.ndarray, payload: tuple[Any, ...], *models: np.ndarray
    ) -> Any:
        """The server's work on data: `function(workbench, *payload)`; `models` are rows of updates from all hosts."""
        updates = torch.cat([on_device(m, self.device) for m in models]) if models else None
        bench = Workbench(self.flat, on_device(value, self.device), updates, self.samples)
        with self._global_stream():
            seed_layers(seed, self.device)
            result = function(bench, *(p.to(self.device) if isinstance(p, Tensor) else p for p in payload))
        # Copies: what a function returns may lie in the model's own storage, which others will use.
        if isinstance(result, Tensor):
            return result.detach().to("cpu", copy=True)
        return tuple(r.detach().to("cpu", copy=True) for r in result)

    def close(self) -> list[tuple[str, float, float, int]]:
        """Forget the trained models (their memory is used again); return (phase, start, stop, bytes sent)s since."""
        self.row, self.vectors, self._pending, self._foreseen = {}, {}, {}, {}
        self.t = -1
        log, self._log = self._log, []
        return log


@dataclass(frozen=True)
class PeerModels(Mapping[int, Tensor]):
    """The models a client is sent, by client, in the order of the plan. Each is read when it is asked for, because all
    of them together may be more than fits into memory."""

    visit: TrainRequest
    client: int
    server: Tensor
    objects: Sequence[Arrays]

    def model(self, client: int) -> Tensor:
        """The last model [S] of anybody in the visit's bank; a client that has not taken part yet has the global one."""
        if client not in self.visit.model_index:
            return self.server
        return on_device(self.objects[self.visit.model_index[client]]["value"], self.server.device)

    def __getitem__(self, client: int) -> Tensor:
        if client not in self.visit.peers.get(self.client, ()):
            raise KeyError(client)
        return self.model(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self.visit.peers.get(self.client, ()))

    def __len__(self) -> int:
        return len(self.visit.peers.get(self.client, ()))


def mixed(models: PeerModels, client: int, weights: Sequence[tuple[int, float]], P: int) -> Tensor:
    """The client's own model w, with the parameters w + Σ_m weight_m (w_m − w): small differences of large models are
    kept, and so are buffers."""
    own = models.model(client)
    result = own.clone()
    for peer, weight in weights:
        if weight and peer != client:
            result[:P].add_(models.model(peer)[:P] - own[:P], alpha=weight)
    return result


def squared_distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖², in float64; block by block on a CPU, where a block stays in a core's cache."""
    block = len(a) if a.is_cuda else tree.BLOCK
    parts = [(a[i : i + block].double() - b[i : i + block]).square_().sum() for i in range(0, len(a), block)]
    return float(torch.stack(parts).sum())


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return tensor_of(array).to(device)


def tensor_of(array: np.ndarray) -> Tensor:
    """A tensor over `array`. It may be read-only, of which torch warns: nobody writes to what was received."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy that owns its memory."""
    return tensor.detach().to("cpu", copy=True).numpy()


def mean_loss(batches: Sequence[tuple[Tensor, int]]) -> float:
    """Mean over samples of an epoch's batch losses."""
    tensors = [loss for loss, _ in batches]
    losses = torch.stack(tensors).tolist() if tensors[0].is_cuda else [loss.item() for loss in tensors]  # one transfer
    sizes = [n for _, n in batches]
    return sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes)


def finite(update: Tensor) -> bool:
    # The sum is one fast pass; only where it overflows is every element looked at.
    return math.isfinite(update.sum()) or bool(update.isfinite().all())


def keep_freed_memory() -> None:
    """Let glibc keep freed buffers in the process: returning them costs page faults, up to 1.9 x the training time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
