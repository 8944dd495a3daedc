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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core.client import ClientData, ClientMethod, ClientStack, LocalRun, LocalSettings, Moment, Samples, Upload
from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.probe import Probe
from raysim.core.rng import seed_layers, stream_seed
from raysim.core.state import pack, unpack
from raysim.data import Dataset, Partition
from raysim.engine import tree
from raysim.models import Inputs, build

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class HostSpec:
    """What every host of a run is made from."""

    model: str
    inputs: Inputs
    options: dict[str, Any]
    layer_by: str
    blocks: tuple[str, ...]
    channels_last: bool
    settings: LocalSettings
    methods: tuple[ClientMethod, ...]
    probes: tuple[Probe, ...]
    eval_batch: int = 512
    threads: int = 1
    device: str = "auto"  # auto: a GPU if this process has one
    keep_freed_memory: bool = True

    def network(self) -> tuple[torch.nn.Module, LayerMap]:
        model = build(self.model, self.inputs, **self.options)
        return model, LayerMap.of(model, self.layer_by, self.blocks, self.channels_last)

    @cached_property
    def stack(self) -> ClientStack:
        return ClientStack(self.methods)

    def stateful(self, layers: LayerMap) -> bool:
        """Whether clients keep anything between rounds."""
        s = self.stack
        kept = s.keeps_params or s.personal_layers or self.settings.persist or self.settings.local_buffers
        return bool(kept) or any(m.new_state(layers) is not None for m in self.methods)


@dataclass(frozen=True)
class Visit:
    """One host's share of a round: which clients to train, and where in the accompanying objects their inputs are."""

    moment: Moment
    clients: tuple[int, ...]
    kept: Mapping[int, int] = field(default_factory=dict)  # client -> index of its kept arrays
    bank: Mapping[int, int] = field(default_factory=dict)  # client -> index of its last model
    mix: Mapping[int, tuple[tuple[int, float], ...]] | None = None  # client -> (bank client, weight)s it is sent
    peers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # client -> clients whose models it is sent
    keep_models: bool = False  # hand out the uploaded models, for the bank
    test: bool = False  # test each trained model on its client's test samples
    trace: bool = False
    foreseen: SumRequest | None = None  # the plan, where it was known before training: sum the models, keep none


@dataclass
class Outcome:
    """What comes back from one client in numbers. Where `status` is not "ok" it says why, and the rest is empty."""

    status: str
    steps: int = 0
    first_loss: float = float("nan")  # mean training loss of the first local epoch
    last_loss: float = float("nan")
    seconds: float = 0.0
    stats: list[np.ndarray] = field(default_factory=list)  # one a probe
    scalars: Arrays = field(default_factory=dict)
    counters: list[float] = field(default_factory=list)  # the model's integer buffers
    vector_bytes: int = 0  # of further uploads
    kept: np.ndarray | None = None  # [T + Tb] elements of every tensor that it sends; None: all
    test: tuple[int, int, float] | None = None  # correct, samples, summed loss


@dataclass
class Report:
    """What comes back from a visit."""

    outcomes: dict[int, Outcome]  # by client
    started: float  # seconds since the epoch
    stopped: float


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
        self.stateful = spec.stateful(layers)
        self.updates = torch.empty(0, layers.S, device=self.device)  # one row a trained client: client minus server
        self.row: dict[int, int] = {}  # client -> its row
        self.vectors: dict[str, dict[int, Tensor]] = {}  # further uploads by name and client
        self.t = -1
        self._counters = [spec for spec in layers.tensors if spec.kind == "counter"]
        self._pending: dict[int, tree.Partials] = {}  # partial sums that wait here to be merged
        self._foreseen: tree.Partials = {}  # sums made while training
        self._log: list[tuple[str, float, float, int]] = []
        self._server: Tensor = torch.empty(0)

    def ping(self) -> int:
        """The round whose trained models this host holds."""
        return self.t

    def train(self, visit: Visit, value: np.ndarray, shared: Arrays, *objects: Arrays) -> list[Any]:
        """Train the visit's clients: [Report], then for each client its new state, its model and its trace, as asked."""
        started = time.time()
        if self.t != visit.moment.t:
            self.close()
        self.t = visit.moment.t
        self._server = server = on_device(value, self.device)
        shared_tensors = {name: on_device(array, self.device) for name, array in shared.items()}
        outcomes: dict[int, Outcome] = {}
        outputs: dict[int, list[Arrays]] = {}

        def train(client: int, update: Tensor) -> bool:
            """Leave the client's update in `update` [S]; whether there is one."""
            kept: Arrays = objects[visit.kept[client]] if client in visit.kept else {}
            trace: Arrays = {f"state.before.{name}": array for name, array in kept.items()} if visit.trace else {}
            begun = time.perf_counter()
            try:
                run = self._run(visit, client, server, shared_tensors, kept, objects)
                outcome, upload = self._train(run, trace)
                torch.sub(upload.value, server, out=update)
                if not finite(update):
                    outcome = Outcome("its model is not finite (NaN or Inf): refused")
            except Exception:
                outcome = Outcome(traceback.format_exc())
            outcome.seconds = time.perf_counter() - begun
            outcomes[client] = outcome
            ok = outcome.status == "ok"
            out = outputs[client] = []
            if ok:
                for name, vector in upload.vectors.items():
                    self.vectors.setdefault(name, {})[client] = vector.detach().clone()
                if visit.test:
                    outcome.test = self.test(client)
            if self.stateful:
                out.append(self._kept_arrays(run) if ok else {})
            if visit.keep_models:
                out.append({"value": to_numpy(upload.value)} if ok else {})
            if visit.trace:
                out.append(trace | self._traced(upload, out[0] if self.stateful else {}) if ok else {})
            return ok

        with self._global_stream():
            if visit.foreseen is None:
                self._grow(len(self.row) + len(visit.clients))
                for client in visit.clients:
                    train(client, self.updates[self.row.setdefault(client, len(self.row))])
            else:
                self._sum_while_training(visit, visit.foreseen, train)
        results = [item for client in visit.clients for item in outputs[client]]
        return [Report(outcomes, started, time.time()), *results]

    def _sum_while_training(self, visit: Visit, request: SumRequest, train: Callable[[int, Tensor], bool]) -> None:
        """Train in the order of the tree and add each model as it comes: no more than its depth are held at once."""
        positions = {request.position[c]: c for c in visit.clients}

        def leaf(position: int) -> dict[int, Tensor | None]:
            update = torch.empty(self.layers.S, device=self.device)
            if not train(positions[position], update):
                return dict.fromkeys(request.pieces)
            parts = {i: (update[start:stop], float(w[position])) for i, (start, stop, w) in request.pieces.items()}
            return {i: part.mul_(weight) if weight else None for i, (part, weight) in parts.items()}

        for node in tree.cover(set(positions), len(request.position)):
            self._foreseen |= {(node, piece): part for piece, part in tree.accumulate(node, leaf).items()}

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
        self, visit: Visit, client: int, server: Tensor, shared: Mapping[str, Tensor], kept: Arrays, objects: Sequence[Arrays]
    ) -> LocalRun:  # fmt: skip
        def last_model(peer: int) -> Tensor:
            # A client that has not taken part yet has the global model.
            return on_device(objects[visit.bank[peer]]["value"], self.device) if peer in visit.bank else server

        received = server
        if visit.mix is not None:
            received = torch.stack([last_model(peer) * weight for peer, weight in visit.mix[client]]).sum(0)
        peers = {peer: last_model(peer) for peer in visit.peers.get(client, ())}
        run = LocalRun(
            client, visit.moment, self.flat, self.spec.settings, self.stack, self.client_data(client),
            received, shared, peers, self._kept_objects(kept),
        )  # fmt: skip
        run.orders = [] if visit.trace else None
        run.batch_probes = [p for p in self.spec.probes if p.watches_batches]
        seed_layers(stream_seed(visit.moment.seed, visit.moment.t, client, "model"), self.device)
        return run

    def _train(self, run: LocalRun, trace: Arrays) -> tuple[Outcome, Upload]:
        self.stack.start(run)
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
        outcome = Outcome(
            "ok", run.steps, *((losses[0], losses[-1]) if losses else ()),
            stats=[to_numpy(stat) for stat in stats],
            scalars={name: to_numpy(scalar) for name, scalar in upload.scalars.items()},
            counters=[float(s.view(upload.value)) for s in self._counters],
            vector_bytes=sum(v.numel() * v.element_size() for v in upload.vectors.values()),
        )  # fmt: skip
        if upload.kept is not None:
            outcome.kept = np.array([int(upload.kept[s.start : s.stop].sum()) for s in self.layers.tensors])
        return outcome, upload

    def _traced(self, upload: Upload, kept: Arrays) -> Arrays:
        trace = {"model": to_numpy(upload.value)} | {f"state.after.{name}": array for name, array in kept.items()}
        return trace | {f"upload.{name}": to_numpy(v) for name, v in (*upload.vectors.items(), *upload.scalars.items())}

    def _grow(self, rows: int) -> None:
        if rows > len(self.updates):
            grown = torch.empty(rows, self.layers.S, device=self.device)
            grown[: len(self.updates)] = self.updates
            self.updates = grown

    # What a client keeps between rounds, as a flat dict of arrays.

    def _kept_objects(self, arrays: Arrays) -> dict[str, Any]:
        """Copies: the arrays may be shared, and the new state counts only once the round is committed."""
        tensors = {name: torch.tensor(array, device=self.device) for name, array in arrays.items()}
        methods = {type(m).__name__.lower(): m for m in self.spec.methods}
        kept: dict[str, Any] = {}
        for name in {name.partition(".")[0] for name in tensors}:
            part = {k.partition(".")[2]: v for k, v in tensors.items() if k.partition(".")[0] == name}
            if name in methods:
                kept[name] = unpack(type(methods[name].new_state(self.layers)), part)
            else:
                kept[name] = part if "" not in part else part[""]
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
        return ClientData(lambda part: self.samples(rows[part][client], client))

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
        return [self._score(self.samples(rows[i : i + self.spec.eval_batch])) for i in batches]

    def test(self, client: int) -> tuple[int, int, float]:
        """Correct predictions, samples and summed loss of the loaded model on `client`'s test samples."""
        rows = self.partition.test[client]
        parts = [rows[i : i + self.spec.eval_batch] for i in range(0, len(rows), self.spec.eval_batch)]
        scores = [self._score(self.samples(part, client)) for part in parts]
        return sum(c for c, _ in scores), len(rows), sum(loss for _, loss in scores)

    def personal(
        self, visit: Visit, value: np.ndarray, shared: Arrays, *objects: Arrays
    ) -> dict[int, tuple[int, int, float]]:
        """Test, for each client, the model it would now be given. No state is kept."""
        server = on_device(value, self.device)
        shared_tensors = {name: on_device(array, self.device) for name, array in shared.items()}
        scores = {}
        with self._global_stream():
            for client in visit.clients:
                kept = objects[visit.kept[client]] if client in visit.kept else {}
                run = self._run(visit, client, server, shared_tensors, kept, objects)
                self.stack.personal(run)
                scores[client] = self.test(client)
        return scores

    @torch.no_grad()
    def _score(self, samples: Samples) -> tuple[int, float]:
        self.flat.model.eval()
        logits = self.flat.model(samples.x)
        loss = torch.nn.functional.cross_entropy(logits, samples.y, reduction="sum")
        self.flat.model.train()
        return int((logits.argmax(1) == samples.y).sum()), float(loss)

    # Collectives over the trained clients.

    def each(self, clients: Sequence[int], function: Callable[..., Tensor], *payload: Any) -> np.ndarray:
        """[k, ...] `function(update [S], layers, *payload)` of each client. One at a time, because a reduction over a
        matrix may add in another order than over its rows, and the result must not depend on the packing."""
        tensors = [on_device(p, self.device) if isinstance(p, np.ndarray) else p for p in payload]
        results = [function(self.updates[self.row[c]], self.layers, *tensors) for c in clients]
        return np.stack([r.detach().cpu().numpy() for r in results])

    @torch.no_grad()
    def predict(self, clients: Sequence[int], raw: np.ndarray) -> np.ndarray:
        """[k, M, C] logits in eval mode."""
        x, logits = self.inputs(raw), []
        self.flat.model.eval()
        for client in clients:
            torch.add(self._server, self.updates[self.row[client]], out=self.flat.value)
            parts = [self.flat.model(x[i : i + self.spec.eval_batch]) for i in range(0, len(x), self.spec.eval_batch)]
            logits.append(torch.cat(parts).cpu().numpy())
        self.flat.model.train()
        return np.stack(logits)

    def rows(self, clients: Sequence[int]) -> np.ndarray:
        """[k, S] the clients' updates."""
        return to_numpy(self.updates[[self.row[c] for c in clients]])

    def partial(self, key: int, clients: Sequence[int], request: SumRequest, stay: bool) -> Arrays:
        """Sum the largest nodes of the tree that `clients`, held here, make up. With `stay` they wait under `key`."""
        started = time.time()
        if request.foreseen:
            return self._leave(key, self._foreseen, stay, started)
        positions = {request.position[c]: c for c in clients}
        source = self.vectors.get(request.of, {})
        rows = {
            p: (self.updates[self.row[c]] if request.of == "model" else source[c]) for p, c in positions.items()
        }
        if request.power == 2:
            rows = {p: row.square() for p, row in rows.items()}
        sums: tree.Partials = {}
        for node in tree.cover(set(positions), len(request.position)):
            for piece, (start, stop, weights) in request.pieces.items():
                out = torch.empty(stop - start, device=self.device)
                parts = {p: rows[p][start:stop] for p in range(*node)}
                some = tree.weighted_sum(parts, {p: float(weights[p]) for p in range(*node)}, node, out)
                sums[node, piece] = out if some else None
        return self._leave(key, sums, stay, started)

    def merge(self, key: int, clients: int, pieces: Sequence[int], stay: bool, *others: Arrays) -> Arrays:
        """Merge the partial sums that wait here with those of `others`."""
        started = time.time()
        sums = self._pending.pop(key)
        for other in others:
            sums |= {k: None if v is None else on_device(v, self.device) for k, v in other.items()}  # type: ignore
        return self._leave(key, tree.merge(sums, clients, pieces), stay, started)

    def _leave(self, key: int, sums: tree.Partials, stay: bool, started: float) -> Arrays:
        if stay:
            self._pending[key] = sums
        sent = {} if stay else {k: None if v is None else to_numpy(v) for k, v in sums.items()}
        size = sum(array.nbytes for array in sent.values() if array is not None)
        self._log.append(("reduce", started, time.time(), size))
        return sent  # type: ignore[return-value]

    def compute(self, function: Callable[..., Any], value: np.ndarray, payload: tuple[Any, ...], *models: np.ndarray) -> Any:
        """The server's work on data: `function(workbench, *payload)`; `models` are rows of updates from all hosts."""
        updates = torch.cat([on_device(m, self.device) for m in models]) if models else None
        return function(Workbench(self.flat, on_device(value, self.device), updates, self.samples), *payload)

    def close(self) -> list[tuple[str, float, float, int]]:
        """Forget the trained models (their memory is used again); return (phase, start, stop, bytes sent)s since."""
        self.row, self.vectors, self._pending, self._foreseen = {}, {}, {}, {}
        self.t = -1
        log, self._log = self._log, []
        return log


@dataclass(frozen=True)
class SumRequest:
    """One tree reduction: where each client stands, and the weights of every piece of the vector."""

    position: Mapping[int, int]  # client -> position among the K that came back
    pieces: Mapping[int, tuple[int, int, np.ndarray]]  # piece -> start, stop, float64 weights [K]
    of: str = "model"
    power: int = 1
    foreseen: bool = False  # the sums were made while training


@dataclass(frozen=True)
class Workbench:
    """Where a server method that needs data or a forward pass works: a model, and what was gathered."""

    flat: FlatModel
    value: Tensor  # [S] the global model the round began with
    updates: Tensor | None  # [K, S]
    samples: Callable[[np.ndarray], Samples]  # rows of the data set -> inputs and labels

    @property
    def layers(self) -> LayerMap:
        return self.flat.layers


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return tensor_of(array).to(device)


def tensor_of(array: np.ndarray) -> Tensor:
    """A tensor over `array`. It may be read-only, of which torch warns: nobody writes to what was received."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy that owns its memory."""
    return tensor.detach().to("cpu", copy=True).numpy()


def mean_loss(batches: Sequence[tuple[Tensor, int]]) -> float:
    """Mean over samples of an epoch's batch losses; one transfer from the device."""
    losses = torch.stack([loss for loss, _ in batches]).tolist()
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
