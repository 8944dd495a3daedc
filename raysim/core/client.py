"""What a client does in a round: the hooks a method may override, and the run they act on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.core.note import Note
from raysim.core.optim import SGD, Adam, OptimizerSpec
from raysim.core.probe import Probe
from raysim.core.rng import generator, seed_layers, stream_seed

if TYPE_CHECKING:
    from raysim.core.server import DownlinkRule, ServerStep

EXCLUSIVE = ("start", "step", "train", "personal")


@dataclass(frozen=True)
class ClientMethod:
    """Unchanged, this class is a FedAvg client. Override what the paper changes, nothing else.

    A method's fields are the paper's hyper-parameters; it owns no state. `new_state` makes the state of one client, a
    dataclass of tensors and numbers that the simulator keeps between that client's rounds.
    """

    probes: ClassVar[tuple[Probe, ...]] = ()
    personal_layers: ClassVar[str | None] = None  # "head": stays with the client, is never sent or overwritten
    keeps_params: ClassVar[bool] = False  # keep the trained model between rounds, as `run.previous`
    initial_previous: ClassVar[bool] = False  # `run.previous` of a newcomer is the model that the run began with
    batches_per_step: ClassVar[int] = 1  # batches that `step` is given as one
    base_weights: ClassVar[str | None] = None  # "uniform" where the paper averages without sizes
    peer_models: ClassVar[bool] = False  # a bank keeps every client's last upload, for others and as `run.previous`

    def new_state(self, layers: LayerMap) -> Any:
        """The state of a client that takes part for the first time, or None."""
        return None

    def starts_everyone(self) -> bool:
        """Whether clients that are not drawn run `start` as well, each round, and keep what it leaves."""
        return False

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The optimiser of local training, where the paper asks for another than the configured one."""
        return spec

    def server_steps(self) -> tuple[ServerStep, ...]:
        """The server's half of the method, applied before the configured steps."""
        return ()

    def downlink_rule(self) -> DownlinkRule | None:
        """What clients are sent, where that is not the global model."""
        return None

    # Exclusive hooks: at most one method of a stack owns each.

    def start(self, run: LocalRun) -> None:
        """Local initialisation: leave in `run.params` where training begins."""
        run.receive()

    def step(self, run: LocalRun, x: Tensor, y: Tensor) -> None:
        """One optimisation step on one batch."""
        run.gradient(x, y)
        run.optimizer.step(run.trained)

    def train(self, run: LocalRun) -> None:
        """Local training."""
        run.fit()

    def personal(self, run: LocalRun) -> None:
        """Leave in `run.params` the model that is evaluated for this client: by default the one it has just trained or,
        where it has not trained, the one it would start from."""
        if not run.steps:
            run.stack.start(run)

    # Additive hooks: a stack applies all of them, in list order.

    def begin(self, run: LocalRun) -> None:
        """After the local initialisation, before training."""

    def penalty(self, run: LocalRun, x: Tensor, y: Tensor, z: Tensor, loss: Tensor) -> Tensor | float:
        """A term added to the objective; `z` [B, D] are the latents and `loss` the cross-entropy of the batch."""
        return 0.0

    def observe_grad(self, run: LocalRun) -> None:
        """See `run.grad` [P] before any correction."""

    def correct_grad(self, run: LocalRun) -> None:
        """Edit `run.grad` [P] in place."""

    def finish(self, run: LocalRun, upload: Upload) -> None:
        """After training: update the state, replace or extend what is uploaded."""


def overrides(method: ClientMethod, hook: str) -> bool:
    return getattr(type(method), hook) is not getattr(ClientMethod, hook)


def exclusive_hooks(method: ClientMethod) -> tuple[str, ...]:
    """The exclusive hooks `method` owns."""
    return tuple(hook for hook in EXCLUSIVE if overrides(method, hook))


class ClientStack:
    """Several client methods as one: exclusive hooks have one owner, additive hooks are applied in order."""

    def __init__(self, methods: Sequence[ClientMethod]):
        self.methods = tuple(methods)
        plain = ClientMethod()
        for hook in EXCLUSIVE:
            owners = [m for m in self.methods if overrides(m, hook)]
            if len(owners) > 1:
                names = " and ".join(type(m).__name__ for m in owners)
                raise ValueError(f"{names} both own the hook {hook!r}; a stack can have one")
            setattr(self, hook, getattr(owners[0] if owners else plain, hook))
        self.beginners = [m.begin for m in self.methods if overrides(m, "begin")]
        self.penalties = [m.penalty for m in self.methods if overrides(m, "penalty")]
        self.observers = [m.observe_grad for m in self.methods if overrides(m, "observe_grad")]
        self.corrections = [m.correct_grad for m in self.methods if overrides(m, "correct_grad")]
        self.finishers = [m.finish for m in self.methods if overrides(m, "finish")]

    start: Callable[[LocalRun], None]
    step: Callable[[LocalRun, Tensor, Tensor], None]
    train: Callable[[LocalRun], None]
    personal: Callable[[LocalRun], None]

    @property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(p for m in self.methods for p in m.probes)

    @property
    def keeps_params(self) -> bool:
        return any(m.keeps_params for m in self.methods)

    @property
    def initial_previous(self) -> bool:
        return any(m.initial_previous for m in self.methods)

    @property
    def starts_everyone(self) -> bool:
        return any(m.starts_everyone() for m in self.methods)

    @property
    def batches_per_step(self) -> int:
        return max((m.batches_per_step for m in self.methods), default=1)

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        for method in self.methods:
            spec = method.optimizer(spec)
        return spec

    @property
    def peer_models(self) -> bool:
        return any(m.peer_models for m in self.methods)

    @property
    def personal_layers(self) -> str | None:
        return next((m.personal_layers for m in self.methods if m.personal_layers), None)

    @property
    def base_weights(self) -> str:
        return next((m.base_weights for m in self.methods if m.base_weights), "size")


class Samples(NamedTuple):
    """Model inputs [n, ...] and labels [n] on the client's device."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class ClientData:
    """A client's samples, brought to the device when first asked for."""

    load: Callable[[str], Samples]  # "train" | "test" | "val" -> samples

    @cached_property
    def train(self) -> Samples:
        return self.load("train")

    @cached_property
    def test(self) -> Samples:
        return self.load("test")

    @cached_property
    def val(self) -> Samples:
        return self.load("val")


@dataclass
class Upload:
    """What a client sends: its model, further vectors, scalars for the server's methods. Sizes are counted as sent.

    Scalars of type bool are sent as the indices of those that are true.
    """

    value: Tensor  # [S] parameters and buffers
    vectors: dict[str, Tensor] = field(default_factory=dict)  # reducible with `cohort.reduce(mix, of=name)`
    scalars: dict[str, Tensor] = field(default_factory=dict)  # come back as `cohort.scalars(name)`; bools: see below
    sent: Tensor | None = None  # [S] bool: elements of `value` that are sent, the others are as received; None: all


@dataclass(frozen=True)
class LocalSettings:
    """Local training, the same for all clients."""

    epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False
    optimizer: OptimizerSpec = OptimizerSpec()
    grad_clip: float | None = None
    persist: bool = False  # optimiser state survives the overwrite of the weights
    local_buffers: bool = False  # bn_stats: local


@dataclass(frozen=True)
class RoundInfo:
    """When and in what company a client runs: known to the server and to every client."""

    seed: int
    t: int  # round, from 0
    rounds: int  # total
    clients: int  # N, in the federation
    lr: float  # this round's local learning rate
    samples: int = 0  # training samples of all N clients together


class LocalRun:
    """One client in one round; built by the host, seen by the hooks.

    `value` [S], `params` [P], `buffers` [B] and `grad` [P] are the model's own storage. `received` [S], `shared` and
    `peers` are what the server sent and must not be written to. An update is always client minus server:
    `run.params - run.received[: run.layers.P]`.
    """

    def __init__(
        self, client: int, round_info: RoundInfo, flat: FlatModel, settings: LocalSettings, stack: ClientStack, data: ClientData,
        received: Tensor, shared: Mapping[str, Tensor], peers: Mapping[int, Tensor], kept: dict[str, Any],
    ):  # fmt: skip
        self.client, self.round_info, self.flat, self.settings = client, round_info, flat, settings
        self.stack, self.data, self.received, self.shared, self.peers = stack, data, received, shared, peers
        self.layers: LayerMap = flat.layers
        self.model, self.value, self.grad = flat.model, flat.value, flat.grad
        self.params, self.buffers = flat.params, flat.buffers
        self.uploaded = flat.value  # [S] what the server gets to see, for probes: a method may send another model
        self._kept = kept  # states by method name, and the simulator's own entries: previous, personal, buffers, ...
        self.lr = round_info.lr
        self.optimizer: SGD | Adam = stack.optimizer(settings.optimizer).build(self.params, self.grad, self.lr)
        if settings.persist and "optimizer" in kept:
            self.optimizer.load(kept["optimizer"])
        self.trained = slice(None)  # the parameters that an optimiser step moves
        self.first_stage = 0  # stages before this one are not trained and need no graph
        self.epoch, self.epochs = 0, settings.epochs
        self.steps = 0
        self.losses: list[list[tuple[Tensor, int]]] = []  # per epoch: mean loss and samples of every batch
        self.scratch: dict[str, Any] = {}  # for hooks; gone after the round
        self.notes: list[Note] = []
        self.batch_probes: Sequence[Probe] = ()
        self.orders: list[tuple[str, Tensor]] | None = None  # purpose and samples of every batch, when traced
        self._streams: dict[str, torch.Generator] = {}

    @property
    def t(self) -> int:
        return self.round_info.t

    @property
    def previous(self) -> Tensor | None:
        """The model [S] this client trained last, for methods with `keeps_params`, or uploaded last, for those with
        `peer_models`; None before the first time."""
        return self._kept.get("previous")

    def state(self, method: ClientMethod) -> Any:
        """This client's state of `method`; changes count once the round is committed."""
        name = type(method).__name__.lower()
        if name not in self._kept:
            with self.params.device:
                self._kept[name] = method.new_state(self.layers)
        return self._kept[name]

    def generator(self, purpose: str) -> torch.Generator:
        """The client's random stream for `purpose` in this round; the same object on every call."""
        if purpose not in self._streams:
            self._streams[purpose] = generator(self.round_info.seed, self.t, self.client, purpose)
        return self._streams[purpose]

    def note(self, method: ClientMethod, name: str, value: Tensor, *axes: str) -> None:
        """Record `value` of this client in this round, one axis name a dimension. It is for the run's tables: nothing is
        sent in the simulated method."""
        value = value.detach().cpu().double()[None]
        self.notes.append(Note(type(method).__name__.lower(), name, value, ("client", *axes), (self.client,)))

    @contextmanager
    def aside(self, purpose: str) -> Iterator[None]:
        """Passes besides the main training: what layers draw in them (dropout) is not taken from that one's stream."""
        device = self.value.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed_layers(stream_seed(self.round_info.seed, self.t, self.client, f"{purpose} model"), device)
            yield

    def receive(self) -> None:
        """Load what the server sent, except the layers (and, with `bn_stats: local`, buffers) that stay with the client."""
        self.load(self.received)

    def load(self, value: Tensor) -> None:
        """Load a model `value` [S], except the layers and buffers that stay with the client."""
        self.value.copy_(value)
        if "personal" in self._kept:
            self.params[self.layers.span(self.stack.personal_layers or "head")] = self._kept["personal"]
        if self.settings.local_buffers and "buffers" in self._kept:
            self.buffers.copy_(self._kept["buffers"])

    def batches(
        self, fraction: float = 1.0, purpose: str = "batches", batch_size: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One shuffled pass over a random `fraction` of the training samples, in the order of the stream `purpose`."""
        order = torch.randperm(self.data.train.y.shape[0], generator=self.generator(purpose))
        if fraction < 1:
            order = order[: max(1, int(fraction * len(order)))]
        return self.slices(order, purpose, batch_size)

    def slices(self, order: Tensor, purpose: str, batch_size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the training samples in `order` [n]. One gather a pass: the batches themselves are views."""
        x, y = self.data.train
        on_device = order.to(y.device)
        x, y = take(x, on_device), y.index_select(0, on_device)
        for part in batch_slices(order.shape[0], batch_size or self.settings.batch_size, self.settings.drop_last):
            if self.orders is not None:
                self.orders.append((purpose, order[part]))
            yield x[part], y[part]

    def fit(self, epochs: int | None = None, only: str = "all", purpose: str = "batches") -> None:
        """Epochs of `step` over the training samples; `only` ("head", "body") trains those layers alone.

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
        """Fill `run.grad` with the gradient of the objective on a batch and return its cross-entropy (0-d, detached).

        Not `corrected`, it is the bare cross-entropy's gradient: no penalties, corrections, clipping or statistics.
        Stages before `stage` (default: those that are not trained) run without a graph and get no gradient.
        """
        self.grad.zero_()
        z, logits = self.flat.forward_from(self.first_stage if stage is None else stage, x)
        loss = F.cross_entropy(logits, y)
        if not corrected:
            loss.backward()
            return loss.detach()
        objective = loss
        for penalty in self.stack.penalties:
            objective = objective + penalty(self, x, y, z, loss)
        objective.backward()
        for probe in self.batch_probes:
            probe.batch(self, z.detach())
        for observe in self.stack.observers:
            observe(self)
        for correct in self.stack.corrections:
            correct(self)
        if self.settings.grad_clip is not None:
            grad = self.grad[self.trained]
            grad.mul_((self.settings.grad_clip / grad.norm().clamp_min(1e-12)).clamp_max(1.0))
        loss = loss.detach()
        if self.losses:
            self.losses[-1].append((loss, y.shape[0]))
        return loss

    def features(self, value: Tensor, x: Tensor) -> Tensor:
        """Latents [B, D] of another model `value` [S], in the present mode; none of its buffers changes."""
        return self.flat.features_of(value, x)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], in the memory format of `x`: indexing would be several times slower where that is channels-last."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return x.index_select(0, rows)


def batch_slices(n: int, batch_size: int, drop_last: bool) -> list[slice]:
    """Consecutive batches of n samples. A client smaller than one batch keeps its short one, or it would never train."""
    stop = n - n % batch_size if drop_last and n >= batch_size else n
    return [slice(start, min(start + batch_size, n)) for start in range(0, stop, batch_size)]
