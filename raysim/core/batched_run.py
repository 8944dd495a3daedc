"""The steps of several clients on one device, taken together: their models are the rows of one matrix."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from raysim.core.embedding import padding_detached
from raysim.core.local_run import LocalRun, StepView
from raysim.core.optim import Rows
from raysim.core.outputs import Outputs, floats, latent_rows, mapped
from raysim.core.rng import Streams
from raysim.lazy import Tensor, nn, torch

ForSteps = dict[str, dict[str, Tensor]]  # what methods have made for their steps, by method and name
Seen = tuple[Tensor, Tensor, Tensor, ForSteps]  # parameters and gradient [P], the model received [S]


class BatchedRun:
    """The local training of k clients, those with most samples first.

    Clients whose next batches have the same size step together: one forward and one backward pass through all their
    models, and one step of the optimiser. Nothing is padded, so that BatchNorm sees only the samples of one client.
    """

    def __init__(self, runs: Sequence[LocalRun], values: Tensor):
        """The runs are about to train, run i from the model `values[i]` [S]; there `fit` leaves what it has trained."""
        self.runs, self.values = runs, values
        first = runs[0]
        self.flat, self.task, self.settings, self.stack = first.flat, first.task, first.settings, first.stack
        layers = first.layers
        self._parameters, self._others = layers.tensors[: layers.T], layers.tensors[layers.T :]
        self._params, self._grad = values[:, : layers.P].clone(), values.new_empty(len(runs), layers.P)
        # vmap updates running statistics that are not contiguous in a copy, and so loses the update.
        self._buffers = {
            spec.name: spec.view(values).clone(memory_format=torch.contiguous_format) for spec in self._others
        }
        self.flat.tapes = None  # a client that no other joins takes the ordinary step
        from raysim.core.tape import known

        model = self.flat.model  # looking at all that it calls takes a tenth of a small model's step
        self._may_embed = any(isinstance(m, nn.Embedding) for m in model.modules()) or not known(model, self.task)
        self._optimizers = Rows([run.optimizer for run in runs], self._params, self._grad)
        self._received = _in_rows([run.received for run in runs])
        self._for_steps = self._made_for_steps()

    def _made_for_steps(self) -> ForSteps:
        """Each method's tensors of all runs as rows, and those of a run as views of its rows."""
        made: ForSteps = {}
        for method in self.stack.methods:
            of_runs = [run.for_steps(method) for run in self.runs]
            rows = {name: _in_rows([own[name] for own in of_runs]) for name in of_runs[0]}
            for i, own in enumerate(of_runs):
                own.update({name: row[i] for name, row in rows.items()})
            made[method.name] = rows
        return made

    def fit(self) -> None:
        """Train all clients, each on its own batches in their order. Raises `RuntimeError` where a step draws from a global
        generator, as each client has its streams."""
        device = self.values.device
        streams, looked = Streams.now(device), False
        waiting = [self._batches(run) for run in self.runs]
        following = [next(batches, None) for batches in waiting]
        while any(following):
            sizes = [0 if batch is None else len(batch[1]) for batch in following]
            # A short batch is taken as soon as it comes: so all full ones are taken in the same steps, and the clients that
            # have none left are the last rows.
            now = {size for size in sizes if 0 < size < self.settings.batch_size} or {self.settings.batch_size}
            for size, group in itertools.groupby(range(len(sizes)), sizes.__getitem__):
                if size in now:
                    rows = [*group]
                    self._step(slice(rows[0], rows[-1] + 1), [batch for i in rows if (batch := following[i])])
                    for i in rows:
                        following[i] = next(waiting[i], None)
            if not looked:  # else all steps might be in vain
                _check_undrawn(streams, device)
                looked = True
        _check_undrawn(streams, device)
        self.values[:, : self._params.shape[1]] = self._params
        for spec in self._others:
            spec.view(self.values).copy_(self._buffers[spec.name])

    def _batches(self, run: LocalRun) -> Iterator[tuple[Tensor, Tensor]]:
        for run.epoch in range(self.settings.epochs):
            run.losses.append([])
            yield from run.batches()

    def _step(self, rows: slice, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A step of some adjacent rows, each on its batch."""
        x, y = (torch.stack(parts) for parts in zip(*batches, strict=True))
        cut = {method: {n: t[rows] for n, t in tensors.items()} for method, tensors in self._for_steps.items()}
        seen = self._params[rows], self._grad[rows], self._received[rows], cut
        leaves = {spec.name: spec.view(seen[0]).detach().requires_grad_() for spec in self._parameters}
        buffers = {name: buffer[rows] for name, buffer in self._buffers.items()}
        # PyTorch 2.14 has wrong gradients of max-pooling for one sample of one model under vmap.
        forward = self._together if len(batches) > 1 else self._alone
        *latents, outputs = forward(leaves | buffers, x)
        losses = objectives = self.task.losses_of_batches(outputs, y)
        if self.stack.penalties:
            objectives = torch.func.vmap(self._objective)(seen, x, y, losses, *latents)
        # Rows do not depend on each other: the gradient of the sum is that of each.
        grads = torch.autograd.grad(objectives.sum(), [*leaves.values()], materialize_grads=True)
        torch.cat([spec.flat(g) for spec, g in zip(self._parameters, grads, strict=True)], 1, out=self._grad[rows])
        if self.stack.observers or self.stack.corrections or self.settings.grad_clip is not None:
            torch.func.vmap(self._correct)(seen)
        self._optimizers.step(rows.start, rows.stop)
        for run, loss in zip(self.runs[rows], losses.detach(), strict=True):
            run.losses[-1].append((loss, y.shape[1]))
            run.steps += 1
        if self.runs[0].sample_losses is not None:
            own = self.task.samples_of_batches(mapped(torch.Tensor.detach, outputs), y)
            for run, losses_of_run in zip(self.runs[rows], own, strict=True):
                if run.sample_losses is not None and len(run.losses) == 1:
                    run.sample_losses.append(losses_of_run)

    def _together(self, tensors: dict[str, Tensor], x: Tensor) -> tuple[Outputs, ...]:
        """What `_forward` makes of several rows."""
        with padding_detached() if self._may_embed else nullcontext():
            made: tuple[Outputs, ...] = torch.func.vmap(self._forward)(tensors, x)
        return made

    def _alone(self, tensors: dict[str, Tensor], x: Tensor) -> tuple[Outputs, ...]:
        """What `_forward` makes of one row [1, ...]."""
        made = self._forward({name: tensor[0] for name, tensor in tensors.items()}, x[0])
        rows: tuple[Outputs, ...] = mapped(lambda tensor: tensor[None], made)
        return rows

    # Under vmap: what one row does.

    def _forward(self, tensors: dict[str, Tensor], x: Tensor) -> tuple[Outputs, ...]:
        """Latents, if the model has a head, and outputs."""
        low = self.settings.low
        with torch.autocast(self.values.device.type, low, enabled=low is not None):
            z, outputs = self.flat.forward_of(tensors, x)
        made = (outputs,) if z is None else (z, outputs)
        return made if low is None else floats(made)

    def _objective(self, seen: Seen, x: Tensor, y: Tensor, loss: Tensor, *latents: Tensor) -> Tensor:
        z = latent_rows(latents[0]) if latents else None
        return self._view(seen).objective(x, y, z, loss)

    def _correct(self, seen: Seen) -> Tensor:
        view = self._view(seen)
        view.correct()
        return view.grad

    def _view(self, seen: Seen) -> StepView:
        """What the hooks of a step see of one row. Among the clients of a round they are alike in the rest."""
        params, grad, received, for_steps = seen
        run = self.runs[0]
        return StepView(
            run.round_info, run.flat, run.settings, run.stack, run.shared, received, params, grad, for_steps
        )  # fmt: skip


def _check_undrawn(streams: Streams, device: torch.device) -> None:
    if moved := streams.moved(device):
        raise RuntimeError(f"a step draws from {moved}, of which each client has its own numbers")


def _in_rows(tensors: Sequence[Tensor]) -> Tensor:
    """[k, ...] the tensors [...]; without a copy where all are the same one."""
    first = tensors[0]
    same = all(tensor is first for tensor in tensors)
    return first.expand(len(tensors), *first.shape) if same else torch.stack([*tensors])
