"""What a client method is: the hooks that it may override, and several of them as one stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from raysim.core.hooks import check_type
from raysim.core.layers import LayerMap
from raysim.core.local_run import LocalRun, descend
from raysim.core.method import Method
from raysim.core.optim import OptimizerSpec
from raysim.core.probe import Probe
from raysim.core.samples import Passes, Samples
from raysim.core.server import DownlinkRule, ServerStep
from raysim.lazy import Tensor

# With it come the classes that a method written by a user names.
__all__ = [
    "FORWARD",
    "ClientMethod",
    "ClientStack",
    "LocalRun",
    "Passes",
    "Samples",
    "Upload",
    "exclusive_hooks",
    "overrides",
]

FORWARD = 1 / 3  # of the work of a sample that goes forward and backward
EXCLUSIVE = ("start", "step", "train", "personal")


@dataclass(frozen=True)
class ClientMethod(Method):
    """Unchanged, this class is a FedAvg client. Override what the paper changes, nothing else.

    A method's fields are the paper's hyper-parameters; it owns no state. `new_state` makes the state of one client, a
    dataclass of tensors and numbers that the simulator keeps between that client's rounds. The hooks are many, and all
    here, because a method may override any of them.
    """

    role: ClassVar[str] = "client"
    probes: ClassVar[tuple[Probe, ...]] = ()
    personal_layers: ClassVar[str | None] = None  # "head": stays with the client, is never sent or overwritten
    sends_parts: ClassVar[bool] = False  # whether `upload.sent` leaves out elements, which then count as received
    batches_per_step: ClassVar[int] = 1  # batches that `step` is given as one
    averages_more: ClassVar[bool] = False  # whether its server step averages more of the clients than their models
    base_weights: ClassVar[str | None] = None  # "uniform" where the paper averages without sizes
    # Several clients may take their steps together (`engine.batch_clients`): `step` and `train` are not overridden, and the
    # hooks of a step (`penalty`, `observe_grad`, `correct_grad`) work under `torch.func.vmap`. They then see of a run
    # `params`, `grad`, `received`, `shared`, `for_steps`, `features`, `layers` and numbers that all clients share.
    batched: ClassVar[bool] = False

    def new_state(self, layers: LayerMap) -> Any:
        """The state of a client that takes part for the first time, or None."""
        return None

    def for_steps(self, run: LocalRun) -> dict[str, Tensor]:
        """Tensors of this client for the hooks of a step: made before the first one, then found as `run.for_steps(self)`.
        The hooks may change them in place."""
        return {}

    @property
    def withholds(self) -> str | None:
        """What of the model a client does not send, as a clause."""
        if self.sends_parts:
            return "sends only parts of its model"
        return f"never sends its {self.personal_layers}" if self.personal_layers else None

    def starts_everyone(self) -> bool:
        """Whether clients that are not drawn run `start` as well, each round, and keep what it leaves."""
        return False

    @property
    def starts_elsewhere(self) -> bool:
        """Whether training need not begin at the model received."""
        return overrides(self, "start")

    @property
    def trains_plainly(self) -> bool:
        """Whether what it sends has moved by one optimiser step a batch, and otherwise stayed as it was."""
        return not (overrides(self, "step") or overrides(self, "train"))

    def own_pass(self, samples: np.ndarray, drop_last: bool) -> tuple[np.ndarray, bool] | None:
        """Of a pass besides training, in train mode and in batches of the usual size: how many of each client's `samples`
        [N] it takes, and whether it leaves out a shorter last batch. None where there is no such pass."""
        return None

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray | float:
        """[K] passes of a sample besides those of the epochs of local training, of clients with so many `samples` [K]; one that
        only goes forward is `FORWARD` of a pass. Simulated time counts them, and knows them before a client trains.

        `passes.epoch(samples)` are those of an epoch of training, `passes.once(samples)` those of another pass in batches."""
        return 0.0

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The optimiser of local training, where the paper asks for another than the configured one."""
        return spec

    @property
    def sends_all(self) -> bool:
        """Whether every client is sent the models of all, where that can be limited by an option `models`."""
        return False

    def server_steps(self) -> tuple[ServerStep, ...]:
        """The server's half of the method, applied before the configured steps."""
        return ()

    def downlink_rule(self) -> DownlinkRule | None:
        """What clients are sent, where that is not the global model."""
        return None

    # Exclusive hooks: at most one method of a stack owns each.

    def start(self, run: LocalRun) -> None:
        """Local initialisation: leave in `run.params` where training begins. The model received is there already."""

    def step(self, run: LocalRun, x: Tensor, y: Tensor) -> None:
        """One optimisation step on one batch."""
        descend(run, x, y)

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


def overrides(method: object, hook: str) -> bool:
    """Whether the method's class overrides the `hook`."""
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
                names = " and ".join(m.name for m in owners)
                raise ValueError(f"{names} both own the hook {hook!r}; a stack can have one")
            setattr(self, hook, getattr(owners[0] if owners else plain, hook))
        # Of a `StepView`, or of the run that is one.
        self.penalties: list[Callable[..., Tensor | float]]
        self.observers: list[Callable[..., None]]
        self.corrections: list[Callable[..., None]]
        self.beginners = [m.begin for m in self.methods if overrides(m, "begin")]
        self.penalties = [m.penalty for m in self.methods if overrides(m, "penalty")]
        self.observers = [m.observe_grad for m in self.methods if overrides(m, "observe_grad")]
        self.corrections = [m.correct_grad for m in self.methods if overrides(m, "correct_grad")]
        self.finishers = [m.finish for m in self.methods if overrides(m, "finish")]

    start: Callable[[LocalRun], Any]  # None, or what is refused
    step: Callable[[LocalRun, Tensor, Tensor], None]
    train: Callable[[LocalRun], None]
    personal: Callable[[LocalRun], None]

    @property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(p for m in self.methods for p in m.probes)

    @property
    def keeps_params(self) -> bool:
        return any(m.needs.previous is not None for m in self.methods)

    @property
    def initial_previous(self) -> bool:
        return any(m.needs.previous == "initial" for m in self.methods)

    @property
    def starts_everyone(self) -> bool:
        return any(m.starts_everyone() for m in self.methods)

    @property
    def batches_per_step(self) -> int:
        return max((m.batches_per_step for m in self.methods), default=1)

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        for method in self.methods:
            made = method.optimizer(spec)
            spec = check_type(
                method.optimizer, made, OptimizerSpec, "Return an OptimizerSpec, such as replace(spec, ...)"
            )
        return spec

    @property
    def peer_models(self) -> bool:
        return any(m.needs.peers is not None for m in self.methods)

    @property
    def personal_layers(self) -> str | None:
        return next((m.personal_layers for m in self.methods if m.personal_layers), None)

    @property
    def base_weights(self) -> str:
        return next((m.base_weights for m in self.methods if m.base_weights), "size")


@dataclass(slots=True)  # another name would be sent by nothing
class Upload:
    """What a client sends: its model, further vectors, scalars for the server's methods. Sizes are counted as sent.

    Scalars of type bool are sent as the indices of those that are true.
    """

    value: Tensor  # [S] parameters and buffers
    vectors: dict[str, Tensor] = field(default_factory=dict)  # reducible with `cohort.reduce(mix, of=name)`
    scalars: dict[str, Tensor] = field(default_factory=dict)  # come back as `cohort.scalars(name)`; may be sparse
    sent: Tensor | None = None  # [S] bool: elements of `value` that are sent, the others are as received; None: all
