"""One client in one round: the run that methods and probes act on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raysim.core.flat import FlatModel, finite
from raysim.core.hooks import check_nothing, check_term, check_type, replaced
from raysim.core.layers import LayerMap
from raysim.core.note import Note
from raysim.core.optim import SGD, Adam, OptimizerSpec
from raysim.core.outputs import floats, latent_rows, mapped
from raysim.core.rng import generator, seeded, stream_seed
from raysim.core.samples import ClientData, batch_slices, take
from raysim.core.task import Task
from raysim.lazy import Tensor, nn, torch
from raysim.registry import Named

if TYPE_CHECKING:
    from raysim.core.client import ClientMethod, ClientStack
    from raysim.core.message import Transform
    from raysim.core.probe import Probe


@dataclass(frozen=True)
class LocalSettings:
    """Local training, the same for all clients."""

    epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False
    optimizer: OptimizerSpec = OptimizerSpec()
    grad_clip: float | None = None
    persist: bool = False  # a client's optimiser keeps its state between rounds
    local_buffers: bool = False  # bn_stats: local
    precision: str = "fp32"  # in what numbers training steps compute: fp32 | bf16 | fp16
    pass_size: int | None = None  # most samples of one pass through the model; None: as many as a step has
    class_weights: tuple[float, ...] = ()  # of the training loss; none: all classes weigh the same
    label_smoothing: float = 0.0

    @cached_property
    def low(self) -> torch.dtype | None:
        """The numbers of 16 bits in which training steps compute, if they do."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)


@dataclass(frozen=True)
class RoundInfo:
    """When and in what company a client runs: known to the server and to every client."""

    seed: int
    t: int  # round, from 0
    rounds: int  # total
    clients: int  # N, in the federation
    lr: float  # this round's local learning rate
    mean_samples: float = 0.0  # training samples of a client that has any


@dataclass
class ClientState:
    """What a client keeps between its rounds. Hooks may change it; changes count once the round is committed."""

    methods: dict[str, Any] = field(default_factory=dict)  # the states of methods, by name
    previous: Tensor | None = None  # [S] the model it trained (or, where it needs peers, uploaded) last
    personal: Tensor | None = None  # parameters of the layers that no client sends
    buffers: Tensor | None = None  # [B], with `bn_stats: local`
    optimizer: dict[str, Tensor] | None = None  # with `local.state: persist`


class StepView:
    """What the hooks of a training step (`penalty`, `observe_grad`, `correct_grad`) see of a client. Where several clients step
    together, there is no more of each: a hook that asks for more cannot train several at once."""

    def __init__(
        self, round_info: RoundInfo, flat: FlatModel, settings: LocalSettings, stack: ClientStack,
        shared: Mapping[str, Tensor], received: Tensor, params: Tensor, grad: Tensor,
        for_steps: dict[str, dict[str, Tensor]] | None = None,
    ):  # fmt: skip
        """`for_steps` has what methods have made for their steps, by method and name."""
        self.round_info, self.flat, self.settings, self.stack = round_info, flat, settings, stack
        self.shared, self.received, self.params, self.grad = shared, received, params, grad
        self.layers: LayerMap = flat.layers
        self.lr = round_info.lr
        self.trained = slice(None)  # the parameters that an optimiser step moves
        self._for_steps = {} if for_steps is None else for_steps

    @property
    def t(self) -> int:
        return self.round_info.t

    def for_steps(self, method: ClientMethod) -> dict[str, Tensor]:
        """What `method` has made for its steps; the same tensors on every call."""
        return self._for_steps[method.name]

    def objective(self, x: Tensor, y: Tensor, z: Tensor | None, loss: Tensor) -> Tensor:
        """The task's `loss` of a batch with all penalties."""
        objective = loss
        for penalty in self.stack.penalties:
            objective = objective + check_term(penalty, penalty(self, x, y, z, loss), loss if z is None else z)
        return objective

    def correct(self) -> None:
        """Make of the objective's gradient the one by which a step moves."""
        grad = self.grad
        for hook in (*self.stack.observers, *self.stack.corrections):
            check_nothing(hook, hook(self), "run.grad, as in run.grad.copy_(...)")
            if self.grad is not grad:
                raise replaced(hook, "grad")
        self.clip()

    def clip(self) -> None:
        """Shorten the gradient of what is trained to `local.grad_clip`."""
        if self.settings.grad_clip is not None:
            grad = self.grad[self.trained]
            grad.mul_((self.settings.grad_clip / grad.norm().clamp_min(1e-12)).clamp_max(1.0))

    def features(self, value: Tensor, x: Tensor) -> Tensor:
        """Latents [B, D] of another model `value` [S], in the present mode; none of its buffers changes. A sequence with
        outputs at each of T positions has T latents."""
        return latent_rows(self.flat.features_of(value, x))


class LocalRun(StepView):
    """One client in one round; built by the host, seen by the hooks.

    `value` [S], `params` [P], `buffers` [B] and `grad` [P] are the model's own storage. `received` [S], `shared` and
    `peers` are what the server sent and must not be written to; layers of `received` that the server never gets are the
    client's own. An update is always client minus server: `run.params - run.received[: run.layers.P]`.
    """

    def __init__(
        self, client: int, round_info: RoundInfo, flat: FlatModel, task: Task, settings: LocalSettings, stack: ClientStack,
        data: ClientData, received: Tensor, shared: Mapping[str, Tensor], peers: Mapping[int, Tensor],
        client_state: ClientState,
    ):  # fmt: skip
        super().__init__(round_info, flat, settings, stack, shared, received, flat.params, flat.grad)
        self.client, self.task, self.data, self.peers = client, task, data, peers
        self.value, self.buffers = flat.value, flat.buffers
        self.uploaded = flat.value  # [S] what the server gets to see, for probes: a method may send another model
        self.client_state = client_state
        if client_state.personal is not None:
            self.received = self._with_personal(received.clone())
        self.optimizer: SGD | Adam = stack.optimizer(settings.optimizer).build(self.params, self.grad, self.lr)
        self.optimizer.private = self.layers.span(stack.personal_layers) if stack.personal_layers else None
        if settings.persist and client_state.optimizer is not None:
            self.optimizer.load(client_state.optimizer)
        self.first_stage = 0  # stages before this one are not trained and need no graph
        self.epoch, self.epochs = 0, settings.epochs
        self.steps = 0
        self.loss_scale = 65536.0  # in fp16, see `_backward`
        self.losses: list[list[tuple[Tensor, int]]] = []  # per epoch: mean loss and samples of every batch
        self.sample_losses: list[Tensor] | None = None  # of the first epoch, [B] a batch, where a probe needs them
        self.scratch: dict[str, Any] = {}  # for hooks; gone after the round
        self.notes: list[Note] = []
        self.batch_probes: Sequence[Probe] = ()
        self.orders: list[tuple[str, Tensor]] | None = None  # purpose and samples of every batch, when traced
        self._streams: dict[str, torch.Generator] = {}
        self.receive()

    @property
    def model(self) -> nn.Module:
        """The module that is trained. Who has it may change what a step does, so steps are not repeated from tapes any more."""
        if self.flat.tapes is not None and self.flat.tapes.descend:
            raise RuntimeError(
                "run.model is not available with engine.fast_math, whose steps are recorded: set it to false"
            )
        self.flat.tapes = None
        return self.flat.model

    @property
    def previous(self) -> Tensor | None:
        """The model [S] this client trained last, or, for methods that need peers, uploaded last; None
        before the first time."""
        return self.client_state.previous

    def state(self, method: ClientMethod | Transform) -> Any:
        """This client's state of `method`; changes count once the round is committed."""
        name, states = method.name, self.client_state.methods
        if name not in states:
            with self.params.device:
                states[name] = method.new_state(self.layers)
        return states[name]

    def for_steps(self, method: ClientMethod) -> dict[str, Tensor]:
        """What `method` makes for its steps, when it is first asked for."""
        if method.name not in self._for_steps:
            made = method.for_steps(self)
            check_type(method.for_steps, made, dict, "Return a dict of tensors by name")
            self._for_steps[method.name] = made
        return super().for_steps(method)

    def generator(self, purpose: str) -> torch.Generator:
        """The client's random stream for `purpose` in this round; the same object on every call."""
        if purpose not in self._streams:
            self._streams[purpose] = generator(self.round_info.seed, self.t, self.client, purpose)
        return self._streams[purpose]

    def note(self, method: Named, name: str, value: Tensor, *axes: str) -> None:
        """Record `value` of this client in this round, one axis name a dimension. It is for the run's tables: nothing is
        sent in the simulated method."""
        value = value.detach().cpu().double()[None]
        self.notes.append(Note(method.name, name, value, ("client", *axes), (self.client,)))

    def aside(self, purpose: str) -> AbstractContextManager[None]:
        """Passes besides the main training: what is drawn in them from global generators, as by layers (dropout), is not
        taken from that one's streams."""
        seed = stream_seed(self.round_info.seed, self.t, self.client, f"{purpose} model")
        return seeded(seed, self.value.device)

    def receive(self) -> None:
        """Load what the server sent, except the layers (and, with `bn_stats: local`, buffers) that stay with the client. A
        run begins with it."""
        self.load(self.received)

    def load(self, value: Tensor) -> None:
        """Load a model `value` [S], except the layers and buffers that stay with the client."""
        self._with_personal(self.value.copy_(value))
        if self.settings.local_buffers and self.client_state.buffers is not None:
            self.buffers.copy_(self.client_state.buffers)

    def _with_personal(self, value: Tensor) -> Tensor:
        """`value` [S], in which the layers that stay with the client are now its own."""
        if self.client_state.personal is not None:
            value[self.layers.span(self.stack.personal_layers or "head")] = self.client_state.personal
        return value

    def batches(
        self, fraction: float = 1.0, purpose: str = "batches", batch_size: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One shuffled pass over a random `fraction` of the training samples, in the order of the stream `purpose`."""
        order = torch.randperm(self.data.train.y.shape[0], generator=self.generator(purpose))
        if fraction < 1:
            order = order[: max(1, int(fraction * len(order)))]
        return self.slices(order, purpose, batch_size)

    def slices(
        self, order: Tensor, purpose: str, batch_size: int | None = None, drop_last: bool | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the training samples in `order` [n], without a shorter last one if `drop_last` (None: as training
        does). One gather a pass: the batches themselves are views."""
        drop = self.settings.drop_last if drop_last is None else drop_last
        x, y = self.data.train
        on_device = order.to(y.device)
        x, y = take(x, on_device), y.index_select(0, on_device)
        if self.data.augment is not None:
            x = self.data.augment(x, int(torch.randint(1 << 62, (), generator=self.generator(f"augment {purpose}"))))
        for part in batch_slices(order.shape[0], batch_size or self.settings.batch_size, drop):
            if self.orders is not None:
                self.orders.append((purpose, order[part]))
            yield x[part], y[part]

    def fit(self, epochs: int | None = None, only: str = "all", purpose: str = "batches") -> None:
        """Epochs of `step` over the training samples; `only` ("head", "body") trains only those layers.

        A pass besides the main training has a `purpose` of its own, so that it does not reorder that one's batches.
        """
        self.trained = self.layers.span(only) if only != "all" else slice(None)
        self.first_stage = self.layers.stages - 1 if only == "head" else 0
        self.epochs = self.settings.epochs if epochs is None else epochs
        step, batch_size = self.stack.step, self.settings.batch_size * self.stack.batches_per_step
        for self.epoch in range(self.epochs):
            self.losses.append([])
            for x, y in self.batches(purpose=purpose, batch_size=batch_size):
                step(self, x, y)
                self.steps += 1
        self.trained, self.first_stage = slice(None), 0

    def gradient(self, x: Tensor, y: Tensor, corrected: bool = True, stage: int | None = None) -> Tensor:
        """Fill `run.grad` with the gradient of the objective on a batch and return the task's loss (0-d, detached).

        Not `corrected`, it is the gradient of the plain loss: no penalties, corrections, clipping or statistics.
        Stages before `stage` (default: those that are not trained) run without a graph and get no gradient. Who names it
        learns something else than the model, in fp32 whatever the precision of training. A batch of several passes
        (`local.accumulate`) has the mean of their gradients, weighted by samples and, where they have some, by classes.
        """
        n = y.shape[0]
        passes = batch_slices(n, self.settings.pass_size or max(n, 1), drop_last=False)
        if len(passes) < 2:
            loss, z, own = self._pass(x, y, corrected, stage)
        else:
            total, found, shares = torch.zeros_like(self.grad), [], [self.task.share(y[part], y) for part in passes]
            for part, share in zip(passes, shares, strict=True):
                found.append(self._pass(x[part], y[part], corrected, stage))
                total.add_(self.grad, alpha=share)
            self.grad.copy_(total)
            loss = torch.stack([loss * share for share, (loss, *_) in zip(shares, found, strict=True)]).sum()
            z, own = (
                None if part[0] is None else torch.cat(part) for part in zip(*(rest for _, *rest in found), strict=True)
            )
        if not corrected:
            return loss
        for probe in self.batch_probes:
            probe.batch(self, z)
        self.correct()
        self._record(loss, n, own)
        return loss

    @property
    def needs_gradient(self) -> bool:
        """Whether a step does anything with the gradient but to subtract it, or is not recorded."""
        tapes, settings, stack = self.flat.tapes, self.settings, self.stack
        if tapes is None or not tapes.descend or self.trained != slice(None) or not self.optimizer.subtracts:
            return True
        hooks = self.batch_probes or stack.observers or stack.corrections
        changed = settings.pass_size is not None or settings.grad_clip is not None or settings.precision == "fp16"
        return bool(hooks or changed)

    def _record(self, loss: Tensor, samples: int, own: Tensor | None) -> None:
        """Keep the mean loss of a batch, and the losses of its samples where they are wanted."""
        if self.losses:
            self.losses[-1].append((loss, samples))
            if own is not None and len(self.losses) == 1 and self.sample_losses is not None:
                self.sample_losses.append(own)

    def _pass(
        self, x: Tensor, y: Tensor, penalised: bool, stage: int | None, rate: float | None = None
    ) -> tuple[Tensor, Any, Any]:  # fmt: skip
        """Fill `run.grad` with the gradient of the loss, `penalised` or alone; return that loss, the latents and, where a probe
        needs them, the samples' losses, all detached. With a `rate` the parameters have moved by it against the gradient, which
        is used up."""
        first = self.first_stage if stage is None else stage
        low, by_sample = self.settings.low if stage is None else None, self.sample_losses is not None

        def step(x: Tensor, y: Tensor, *_: Tensor) -> tuple[Tensor, Any, Any]:
            with nullcontext() if low is None else torch.autocast(x.device.type, low):
                z, outputs = self.flat.forward_from(first, x)
            if low is not None:
                z, outputs = floats((z, outputs))
            loss = self.task.loss(outputs, y)
            if z is not None:
                z = latent_rows(z)
            self._backward(self.objective(x, y, z, loss) if penalised else loss)
            own = self.task.losses(mapped(torch.Tensor.detach, outputs), y) if by_sample else None
            return loss.detach(), None if z is None else z.detach(), own

        if self.flat.tapes is None or self.settings.precision == "fp16":  # which halves its scale by values
            return step(x, y)
        read = self._read_by_penalties() if penalised and self.stack.penalties else ()
        key = first, low, self.flat.model.training, penalised, by_sample
        return self.flat.tapes.run(step, key, x, y, *read, rate=rate)

    def _read_by_penalties(self) -> list[Tensor]:
        """What penalties read of the client beside the batch."""
        owners = [penalty.__self__ for penalty in self.stack.penalties]  # type: ignore[attr-defined]
        return [self.received, *[tensor for owner in owners for tensor in self.for_steps(owner).values()]]

    def _backward(self, objective: Tensor) -> None:
        """Fill `run.grad`. In fp16 the gradient is that of a scaled objective (Micikevicius et al., Mixed Precision Training,
        2018): small numbers stay above zero, and the scale is halved for the rest of the round whenever one overflows."""
        if self.settings.precision != "fp16":
            self.flat.backward(objective)
            return
        while True:
            self.flat.backward(objective * self.loss_scale, again=True)
            self.grad.div_(self.loss_scale)
            if self.loss_scale == 1 or finite(self.grad) or not objective.isfinite():
                return
            self.loss_scale /= 2


def descend(run: LocalRun, x: Tensor, y: Tensor) -> None:
    """A step of the optimiser on a batch. With `engine.fast_math` the gradient may never be as a whole in `run.grad`."""
    if run.needs_gradient:
        run.gradient(x, y)
        run.optimizer.step(run.trained)
    else:
        loss, _, own = run._pass(x, y, True, None, run.optimizer.lr)
        run.optimizer.count(run.trained)
        run._record(loss, len(y), own)
