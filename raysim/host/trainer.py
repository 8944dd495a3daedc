"""One client's training, from what it is sent to its result."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from raysim.core.arrays import to_numpy
from raysim.core.client import Upload
from raysim.core.failures import breaks_device, cause_of, out_of_memory
from raysim.core.flat import FlatModel, difference, finite
from raysim.core.hooks import alike, check_storage, check_upload, form, misused
from raysim.core.layers import LayerMap
from raysim.core.local_run import LocalRun
from raysim.core.message import FLOAT, INDEX, Message, bytes_of, whole
from raysim.core.rng import seed_layers, stream_seed
from raysim.core.samples import take
from raysim.errors import Explained
from raysim.host.client_state import StateFormat
from raysim.host.download import Download
from raysim.host.evaluator import Evaluator
from raysim.host.messages import ClientResult, HostSpec, SparseVector
from raysim.host.samples import SampleSource
from raysim.lazy import Tensor, torch


class Trainer:
    """Trains clients one after the other on the model of `flat`.

    A host uses only the public methods, so that another trainer, such as `BatchedTrainer`, can replace this class.
    """

    def __init__(self, spec: HostSpec, flat: FlatModel, samples: SampleSource, evaluator: Evaluator):
        self.spec, self.flat, self.samples, self.evaluator = spec, flat, samples, evaluator
        self.device = flat.value.device
        self._stack = spec.stack
        self._task = spec.task.trained_with(spec.settings.class_weights, spec.settings.label_smoothing)
        from raysim.core.tape import Tapes, known

        if spec.tape == "always" or (spec.tape == "auto" and known(flat.model, spec.task, self._stack.penalties)):
            descent = (flat.params, flat.grad) if spec.fast_math and self.device.type == "cpu" else None
            flat.tapes = Tapes([*flat.storage, *self._task.constants(self.device)], descent, spec.cuda_graphs)
        self._states = StateFormat(spec, flat.layers, self.device)
        self.before_client: Callable[[int], None] = lambda client: None  # called as soon as work on a client begins
        counters = [tensor.start for tensor in flat.layers.tensors if tensor.kind == "counter"]
        self._counters = slice(min(counters, default=flat.layers.S), flat.layers.S)  # they are the last

    def train(
        self, download: Download, client: int, update: Tensor, check: bool = True
    ) -> tuple[ClientResult, Mapping[str, Tensor]]:
        """Train `client`, leave its update in `update` [S] and return its result and the further vectors it uploads.

        Where the result's status is not "ok", `update` is to be ignored. `check` refuses a model that is not finite.
        """
        started = self.spec.clock.now()
        trace: dict[str, np.ndarray] = {}
        vectors: Mapping[str, Tensor] = {}
        try:
            run = self._begin(download, client)
            self._start(run, trace)
            self._stack.train(run)
            result, upload = self._measured(download, run, trace)
            self._send(download, run, upload, result, update)
            if check and not finite(update):
                result = not_finite(update, self.flat.layers)
            else:
                self._complete(download, run, upload, result, trace)
                vectors = upload.vectors
        except Exception as error:
            result = self._failed(error)
        result.seconds = self.spec.clock.now() - started
        return result, vectors

    def _send(self, download: Download, run: LocalRun, upload: Upload, result: ClientResult, update: Tensor) -> None:
        """Leave in `upload`, and of its model minus the global one in `update` [S], what the server receives; count bytes."""
        minus = difference if self.flat.has_infinities else torch.sub
        layers, sent = self.flat.layers, upload.sent
        upload.vectors = {name: vector.detach().clone() for name, vector in upload.vectors.items()}
        if self.spec.upload:
            known = self._known(download, run)
            minus(upload.value, known, out=update)
            message = Message(update, layers, upload.vectors, sent, self._stack.personal_layers)
            if finite(update):  # else it is refused
                message.encode(self.spec.upload, run)
                upload.value = run.uploaded = known + update
                for i, probe in enumerate(self.spec.probes):
                    if probe.of_received:
                        result.stats[i] = to_numpy(probe.end(run))
            result.model_bytes, result.vector_bytes = message.costs, tuple(message.vector_costs.tolist())
            if known is download.server(run.client):
                return
        elif sent is not None:
            result.model_bytes = whole(layers, sent)
        minus(upload.value, download.server(run.client), out=update)

    def _known(self, download: Download, run: LocalRun) -> Tensor:
        """The model [S] that client and server both have, to which an encoded update is added: what the client was sent or,
        where that are models of others, its own last upload."""
        if self._stack.peer_models and download.request.mix is None and run.previous is not None:
            return run.previous
        return download.received(run.client, self.flat.layers.P)

    def _complete(
        self, download: Download, run: LocalRun, upload: Upload, result: ClientResult, trace: Mapping[str, np.ndarray]
    ) -> None:
        """Put into `result` all that was asked for, and test the model."""
        request, client = download.request, run.client
        if request.return_states:
            result.state = self._states.pack(run)
        if request.return_models:
            result.model = {"value": to_numpy(upload.value)}
        if request.trace:
            before = {f"state.before.{name}": array for name, array in download.state(client).items()}
            after = {f"state.after.{name}": array for name, array in (result.state or {}).items()}
            sent = (*upload.vectors.items(), *upload.scalars.items())
            uploads = {f"upload.{name}": to_numpy(tensor.to_dense()) for name, tensor in sent}
            result.trace = {**before, **trace, "model": to_numpy(upload.value), **after, **uploads}
        if request.test and client not in request.attacks:
            self._stack.personal(run)
            result.test = self.evaluator.personal(client)

    def initialize(self, download: Download, client: int) -> ClientResult:
        """Only the client's local initialisation: its result has a state and nothing else."""
        try:
            run = self._begin(download, client)
            self._stack.start(run)
            return ClientResult("ok", state=self._states.pack(run))
        except Exception as error:
            return self._failed(error)

    def personal(self, download: Download, client: int) -> ClientResult:
        """The model that the client would now be given, on its own test samples: its result has a test and nothing else."""
        try:
            self._stack.personal(self._begin(download, client))
            return ClientResult("ok", test=self.evaluator.personal(client))
        except Exception as error:
            return self._failed(error)

    def loss(self, download: Download, client: int) -> ClientResult:
        """The model with which the client would begin, on its training samples or on a random batch of them: its result has a
        test and nothing else."""
        try:
            run = self._begin(download, client)
            x, y = run.data.train
            if download.request.of_batch:
                order = torch.randperm(len(y), generator=run.generator("batch of the loss"))
                batch = order[: run.settings.batch_size].to(y.device)
                x, y = take(x, batch), y.index_select(0, batch)
            return ClientResult("ok", test=self.evaluator.loss(x, y))
        except Exception as error:
            return self._failed(error)

    def _begin(self, download: Download, client: int) -> LocalRun:
        """The client before its local initialisation."""
        self.before_client(client)
        request, peers = download.request, download.peers(client)
        round_info = download.round_info(client)
        received = download.received(client, self.flat.layers.P)
        state = self._states.unpack(download.state(client))
        if self._stack.peer_models and client in request.model_index:
            state.previous = peers.model(client)
        run = LocalRun(
            client, round_info, self.flat, self._task, self.spec.settings, self._stack, self.samples.client(client),
            received, download.shared, peers, state,
        )  # fmt: skip
        run.orders = [] if request.trace else None
        run.batch_probes = [p for p in self.spec.probes if p.watches_batches]
        run.sample_losses = [] if any(p.needs_sample_losses for p in self.spec.probes) else None
        self.spec.seed_generators(stream_seed(round_info.seed, round_info.t, client, "start"), self.device)
        return run

    def _start(self, run: LocalRun, trace: dict[str, np.ndarray]) -> None:
        """All that is before the training; `trace` gets what is recorded on the way, if anything is."""
        stack = self._stack
        check_storage(stack.start, run, stack.start(run))
        seed_layers(stream_seed(run.round_info.seed, run.t, run.client, "model"), self.device)
        for begin in stack.beginners:
            check_storage(begin, run, begin(run))
        if run.orders is not None:
            trace["init"] = to_numpy(run.value)
        for probe in self.spec.probes:
            probe.begin(run)

    def _measured(
        self, download: Download, run: LocalRun, trace: dict[str, np.ndarray]
    ) -> tuple[ClientResult, Upload]:  # fmt: skip
        """All that is after the training."""
        check_storage(self._stack.step, run)
        if name := self.flat.changed_constant():
            raise ValueError(
                f"training has changed the model's tensor {name}, which no client sends: it is frozen, or a table of integers. "
                "Integers that change must do so from the first batch on, or be floats"
            )
        if replaced := self.flat.replaced():
            raise ValueError(f"the model's forward {replaced}")
        upload = Upload(run.value)
        for finish in self._stack.finishers:
            check_upload(finish, finish(run, upload), upload, run.flat.value)
        self._attack(download, run, upload)
        if upload.sent is not None:
            upload.value = torch.where(upload.sent, upload.value, run.received)
        run.uploaded = upload.value
        stats = [probe.end(run) for probe in self.spec.probes]
        if run.orders is not None:
            rows = self.samples.partition.train[run.client]
            trace |= {f"samples.{i:04d}.{name}": rows[batch.numpy()] for i, (name, batch) in enumerate(run.orders)}
        return self._result(run, upload, stats), upload

    def _attack(self, download: Download, run: LocalRun, upload: Upload) -> None:
        """Put into `upload` what the client sends if it is malicious."""
        P, server = self.flat.layers.P, download.server(run.client)
        for i in download.request.attacks.get(run.client, ()):
            attack, known = self.spec.attacks[i], download.known(i)
            if attack.sees_others and known is None:
                continue  # none of the others came back
            honest = difference(upload.value[:P], server[:P])
            lie = attack.update(honest, run, known)
            if not alike(lie, honest):
                raise misused(attack.update, f"returned {form(lie)}", f"Return {form(honest)}, as honest is")
            upload.value = torch.cat([server[:P] + lie, upload.value[P:]])

    def _result(self, run: LocalRun, upload: Upload, stats: Sequence[Tensor]) -> ClientResult:
        seen = [batches for batches in run.losses if batches]  # none where no step was taken, or by a method of its own
        epochs = [*seen[:1], *seen[-1:]][: len(seen)]
        (*means,), counters = read_numbers(epochs, upload.value[self._counters])
        scalars = {name: _sent(scalar) for name, scalar in upload.scalars.items()}
        remarks = ["steps are not recorded (engine.tape), so engine.cuda_graphs does nothing"] * self.spec.cuda_graphs
        if self.flat.tapes is not None:
            remarks = [f"steps are not recorded (engine.tape): {why}" for why in self.flat.tapes.refusals]
        result = ClientResult(
            "ok", run.steps, stats=[to_numpy(stat) for stat in stats], scalars=scalars, counters=counters, notes=run.notes,
            vector_bytes=(bytes_of(upload.vectors), 0, 0),
            scalar_bytes=FLOAT * sum(a.size for a in scalars.values() if a.dtype != bool),
            mask_bytes=INDEX * sum(int(a.sum()) for a in scalars.values() if a.dtype == bool),
            remarks=tuple(remarks),
        )  # fmt: skip
        if means:
            result.first_loss, result.last_loss = means[0], means[-1]
        return result

    def _failed(self, error: Exception) -> ClientResult:
        """What is said of a client whose work raised `error`: of one in the code its traceback, else a line."""
        if breaks_device(error):
            raise error  # the next client would fail, too
        if out_of_memory(error):
            self.samples.clear()
        cause = cause_of(error)
        line = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, Explained):
            return ClientResult(str(error), cause=cause)
        return ClientResult(traceback.format_exc() if cause == "code" else line, cause=cause)


def not_finite(update: Tensor, layers: LayerMap) -> ClientResult:
    """The result of a client whose `update` [S] has a NaN or infinity."""
    first = next(spec.name for spec in layers.tensors if not finite(update[spec.start : spec.stop]))
    reason = "its model is not finite (NaN or Inf): refused. A lower local.lr or local.grad_clip may help"
    return ClientResult(f"{reason}. {first} is the first tensor that became so", cause="client")


def _sent(scalar: Tensor) -> np.ndarray | SparseVector:
    if not scalar.is_sparse:
        return to_numpy(scalar)
    scalar = scalar.cpu().coalesce()
    return SparseVector(to_numpy(scalar.indices()[0]), to_numpy(scalar.values()), scalar.numel())


def read_numbers(epochs: Sequence[Sequence[tuple[Tensor, int]]], counters: Tensor) -> tuple[list[float], list[float]]:
    """The mean over samples of each epoch's batch losses, and the counters [n]; a device is waited for once."""
    losses = [loss for batches in epochs for loss, _ in batches]
    parts = [*([torch.stack(losses)] if losses else []), *([counters] if counters.numel() else [])]
    numbers = iter((torch.cat(parts) if len(parts) > 1 else parts[0]).tolist() if parts else [])
    means = [sum(next(numbers) * n for _, n in batches) / sum(n for _, n in batches) for batches in epochs]
    return means, [*numbers]
