"""What an engine and its hosts send each other: plain values, which may cross a process boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any, Literal, NamedTuple

import numpy as np

from raysim.clock import CLOCK, Clock
from raysim.core import tree
from raysim.core.arrays import tensor_of
from raysim.core.attack import Attack
from raysim.core.client import ClientMethod, ClientStack
from raysim.core.failures import Cause
from raysim.core.layers import LayerMap
from raysim.core.layout import StageError, keep_frozen
from raysim.core.local_run import LocalSettings, RoundInfo
from raysim.core.message import Transform
from raysim.core.note import Note
from raysim.core.pairs import entries
from raysim.core.probe import Probe
from raysim.core.rng import initial, may_draw, preserved, seed_globals, seed_layers
from raysim.core.score import Score
from raysim.core.task import Task
from raysim.data.augment import Augmentation
from raysim.lazy import Tensor, nn, torch
from raysim.models import Inputs, assemble
from raysim.models.staged import ModelError
from raysim.models.structure import called, structure_of

Arrays = Mapping[str, np.ndarray]
Sums = dict[tree.Node, tuple[np.ndarray, tuple[bool, ...]]]  # `tree.Partials` as arrays


@dataclass(frozen=True)
class HostSpec:
    """What every host of a run is made from."""

    model: str  # its name, for messages
    build_model: Callable[..., nn.Module]  # a host's process need not know the name
    inputs: Inputs
    samples: np.ndarray  # two training inputs of the model, see `structure_of`
    task: Task
    options: dict[str, Any]
    layer_by: str
    blocks: tuple[str, ...]
    channels_last: bool
    settings: LocalSettings
    methods: tuple[ClientMethod, ...]
    probes: tuple[Probe, ...]
    eval_batch: int = 512
    threads: int = 1
    device: str = "auto"  # auto: a GPU if the host's process has one
    keep_freed_memory: bool = True
    batch_clients: int = 1  # clients that train together
    tape: Literal["auto", "always", "never"] = "auto"  # whether steps are recorded: see `engine.tape`
    fast_math: bool = False  # whether they may round otherwise than as written
    cuda_graphs: bool = False  # whether they are captured on a GPU
    augment: tuple[Augmentation, ...] = ()  # of training images
    clock: Clock = CLOCK  # by which all seconds of the run are measured
    seed: int = 0
    upload: tuple[Transform, ...] = ()  # of what clients send
    attacks: tuple[Attack, ...] = ()
    frozen: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that no round changes, where a file has them

    def network(self) -> tuple[nn.Module, LayerMap]:
        """A new model with the weights that the seed gives it, and its layers. Raises `ModelError`."""
        model = self._built()
        if "layers" not in vars(self):  # later calls need not build a model for them
            vars(self)["layers"] = self._laid_out(model)
        return model, self.layers

    def _built(self) -> nn.Module:
        """A new model. All that it draws comes from the run's seed, whatever the state_dict may not have included."""
        with initial(self.seed):
            model = assemble(self.model, self.build_model, self.inputs, self.options)
            if any(map(nn.parameter.is_lazy, model.parameters())):
                with torch.no_grad():
                    called(model.eval(), tensor_of(self.samples))
            keep_frozen(model)
            return model.train()

    def _laid_out(self, model: nn.Module) -> LayerMap:
        """The layers of a model, which stays as it is: another one is tried."""
        try:
            with preserved():
                found = structure_of(model, self._built, self.samples, getattr(self.build_model, "head", None))
            layers = LayerMap.of(model, self.layer_by, self.blocks, self.channels_last, found.head, found.counted)
            for name, tensor in self.frozen.items():
                layers.constants[name][1].copy_(tensor)
            return layers
        except (ModelError, StageError) as error:
            raise ModelError(f"{self.model}: {error}") from error

    @cached_property
    def layers(self) -> LayerMap:
        """The layers of the model."""
        return self.network()[1]

    @cached_property
    def stack(self) -> ClientStack:
        return ClientStack(self.methods)

    @cached_property
    def draws_globally(self) -> bool:
        """Whether some of a client's work may draw from any global generator."""
        scored = (metric.sums for metric in self.task.metrics)
        return any(
            map(
                may_draw,
                (*self.methods, *self.upload, *self.attacks, *self.probes, self.task, self.build_model, *scored),
            )
        )

    def seed_generators(self, seed: int, device: torch.device) -> None:
        """Put the global generators from which a client's work may draw at the start of the stream `seed`. Python's and
        NumPy's take as long as 2 % of the smallest client's training, and are left out where all code is raysim's."""
        (seed_globals if self.draws_globally else seed_layers)(seed, device)

    def stateful(self, layers: LayerMap) -> bool:
        """Whether clients keep anything between rounds."""
        stack, settings = self.stack, self.settings
        if stack.keeps_params or stack.personal_layers or settings.persist or settings.local_buffers:
            return True
        return any(method.new_state(layers) is not None for method in self.keepers)

    def initial_state(self, value: Tensor) -> dict[str, np.ndarray]:
        """The state of a client that has not taken part yet, of a run that began with the model `value` [S]; copies."""
        state = {"previous": value.numpy().copy()} if self.stack.initial_previous else {}
        return state | ({"buffers": value[self.layers.P :].numpy().copy()} if self.settings.local_buffers else {})

    @property
    def keepers(self) -> tuple[ClientMethod | Transform, ...]:
        """What may keep a state at each client."""
        return *self.methods, *self.upload


@dataclass(frozen=True)
class SumRequest:
    """One tree reduction: where each client stands, and the weights of every piece of the vector."""

    position: Mapping[int, int]  # client -> position among the K that came back
    pieces: Sequence[tree.Piece]  # adjacent: start, stop, float64 weights [K]
    factors: Sequence[float]  # of each piece's sum, applied where all clients are; see `tree.without_factors`
    server_coefficients: Sequence[float]  # of each piece: how much of the server's model is added to the whole sum
    of: str = "model"
    power: int = 1
    planned_early: bool = False  # the hosts have made these sums while they trained

    @property
    def bounds(self) -> tuple[int, int]:
        """(start, stop) of all pieces together."""
        return self.pieces[0][0], self.pieces[-1][1]

    @property
    def sizes(self) -> list[int]:
        """Elements of each piece."""
        return [stop - start for start, stop, _ in self.pieces]

    def compact(self, total: Tensor, sent: Sequence[bool]) -> tree.Partial:
        """The pieces of `total` [all pieces] that were `sent`, one after the other."""
        if all(sent):
            return tree.Partial(total, tuple(sent))
        pieces = compress(total.split(self.sizes), sent)
        return tree.Partial(torch.cat([total[:0], *pieces]), tuple(sent))


class ColumnPiece(NamedTuple):
    """Some coordinates, and where in the cohort the clients are that send them (None: all)."""

    start: int
    stop: int
    senders: tuple[int, ...] | None


@dataclass(frozen=True)
class SumDestination:
    """Where a host's partial sums go: they `stay` under `key`, to be merged there with other hosts' sums, or are sent."""

    key: int
    stay: bool


@dataclass(frozen=True)
class TrainRequest:
    """One host's clients of a round, and where in the accompanying objects their inputs are.

    `early_plan` is the plan of the aggregation where it is known before training. The host then adds the models while it
    trains them and keeps none.
    """

    round_info: RoundInfo  # of the server's round
    clients: tuple[int, ...]
    state_index: Mapping[int, int] = field(default_factory=dict)  # client -> index of its state
    model_index: Mapping[int, int] = field(default_factory=dict)  # client -> index of its last model
    mix: Mapping[int, tuple[tuple[int, float], ...]] | None = (
        None  # client -> (other client, weight)s of what it is sent
    )
    peers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # client -> clients whose models it is sent
    starts: Mapping[int, tuple[RoundInfo, int]] = field(
        default_factory=dict
    )  # client that is sent an older model -> of the round in which that was the newest, and its index
    attacks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # malicious client -> its attacks in the spec
    known_index: Mapping[int, int] = field(default_factory=dict)  # attack -> index of what its clients know
    return_states: bool = False
    return_models: bool = False  # the uploaded ones
    trace: bool = False
    test: bool = False  # test each trained model on its client's test samples
    of_batch: bool = False  # the loss that is asked for is that of a random batch
    early_plan: SumRequest | None = None
    sums_to: SumDestination | None = None  # where the sums of the early plan go; None: they wait to be asked for
    groups: tuple[tuple[int, ...], ...] = ()  # the clients that train together, where any do; each is in one of them

    @property
    def parts(self) -> tuple[str, ...]:
        """The fields of a `ClientResult` that hold arrays, as far as they are asked for."""
        asked = self.return_states, self.return_models, self.trace
        return tuple(compress(("state", "model", "trace"), asked))

    @property
    def objects(self) -> int:
        """How many objects `TrainReply.detach` makes of the reply."""
        return 2 + len(self.parts) * len(self.clients)


@dataclass(frozen=True)
class SparseVector:
    """A vector of `size` elements by those that are there."""

    index: np.ndarray
    values: np.ndarray
    size: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def sum(self) -> Any:
        return self.values.sum()

    @classmethod
    def stack(cls, rows: Sequence[SparseVector]) -> Tensor:
        """[K, size] as a sparse tensor."""
        row = np.repeat(np.arange(len(rows)), [len(r.index) for r in rows])
        index = torch.from_numpy(np.stack([row, np.concatenate([r.index for r in rows])]))
        values = torch.from_numpy(np.concatenate([r.values for r in rows]))
        return entries(index, values, [len(rows), rows[0].size])


@dataclass
class ClientResult:
    """What comes back from one client. Where `status` is not "ok" it says why, and the rest is empty."""

    status: str
    steps: int = 0
    first_loss: float = float("nan")  # mean training loss of the first local epoch
    last_loss: float = float("nan")
    seconds: float = 0.0
    stats: list[np.ndarray] = field(default_factory=list)  # one for each probe
    scalars: dict[str, np.ndarray | SparseVector] = field(default_factory=dict)
    counters: list[float] = field(default_factory=list)  # the model's integer buffers
    # What it sends takes so many bytes, by `raysim.core.message.COSTS` where there are three: each tensor of the model, as far
    # as the plan lets it be sent [3, T + Tb] (None: whole); further vectors [3]; numbers; indices of what is true.
    model_bytes: np.ndarray | None = None
    vector_bytes: tuple[int, ...] = (0, 0, 0)
    scalar_bytes: int = 0
    mask_bytes: int = 0
    notes: list[Note] = field(default_factory=list)
    test: Score | None = None  # of the personal model
    state: Arrays | None = None  # what it keeps until its next round
    model: Arrays | None = None  # {"value": [S]}, what it has uploaded
    trace: Arrays | None = None
    cause: Cause | None = None  # of a status that is not "ok"
    remarks: tuple[str, ...] = ()  # about how it trained, which the run reports once


@dataclass
class TrainReply:
    """What a host answers to a `TrainRequest`."""

    results: dict[int, ClientResult]  # by client
    started: float  # seconds since the epoch
    stopped: float
    sums: Sums = field(default_factory=dict)  # of the early plan, unless they wait on the host

    def detach(self, request: TrainRequest) -> list[Any]:
        """The reply as `request.objects` objects that can travel one by one: itself without sums and arrays, the sums, and
        for each client of the request, in order, the `request.parts` of its result. A failed client has None there."""
        arrays = [getattr(self.results[c], part) for c in request.clients for part in request.parts]
        none: dict[str, Any] = dict.fromkeys(request.parts)
        results = {c: replace(result, **none) for c, result in self.results.items()} if none else self.results
        return [replace(self, results=results, sums={}), self.sums, *arrays]
