"""The sections of a configuration, as its reader meets them. The string below a field is its description."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from raysim.config.build import canonical, read_fields
from raysim.config.fields import OWN, STACKS
from raysim.config.messages import Faults
from raysim.core.bounds import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt, Seed
from raysim.core.rates import Schedules
from raysim.core.selection import UniformSelection
from raysim.core.simulated import SimulatedClock
from raysim.data import Dataset, Proxy, Storage, load
from raysim.data.augment import AUGMENTATIONS
from raysim.engine.settings import ENGINES, EngineConfig, RayEngineConfig
from raysim.registry import REGISTRY, Catalogue

DEVICES = " The device is engine.local.device, or engine.ray.gpu_per_client."


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the clients hold."""

    name: Annotated[Any, Catalogue("data set", REGISTRY.table("dataset"))]
    """The source, an entry of `raysim list datasets`."""
    root: str | None = None
    """Folder of all data sets; null: the environment variable RAYSIM_DATA, else the source's own default."""
    storage: Storage = "memory"
    """Where samples are: `memory` reads and decodes all of them before the first round; `stream` only those of the clients
    that a process trains, while the client before trains. Parquet, Hugging Face and image folders can be streamed."""
    stream_bytes: NonNegativeInt = 256 << 20
    """With `stream`: bytes, as they are in the files, that each process keeps of the parts of files that it read last."""
    cache: str | None = None
    """Folder for decoded samples as files, which later runs and all processes of a machine map; null: none.
    They are decoded again where settings or files have changed."""
    partition: Annotated[Any, Catalogue("partition", REGISTRY.table("partition"))]
    """How samples are partitioned over the clients, an entry of `raysim list partitions`."""
    augment: tuple[Annotated[Any, Catalogue("augmentation", AUGMENTATIONS)], ...] = ()
    """Random changes of the training images, in order, drawn in every epoch from a stream of the client's: random_crop,
    horizontal_flip, vertical_flip, random_rotation, random_erasing."""
    client_test_frac: Fraction = 0.0
    """Share of each client's training samples held out to test its personal model."""
    client_val_frac: Fraction = 0.0
    """Share of what the test leaves of each client's training samples, held out of training and testing."""
    task: str | None = None
    """What is learned: classification, multilabel, regression, next_token or one of your own; null: the data set's task."""
    allow_empty_clients: bool = False
    """Whether clients may have no training samples; they are left out of the rounds that draw them."""
    proxy: Proxy = field(default_factory=lambda: Proxy(samples=0))
    """Samples that the server owns, for methods that learn on the server."""

    @property
    def folder(self) -> Path | None:
        """What a source's `check` and `load` take."""
        root = self.root or os.environ.get("RAYSIM_DATA")
        return Path(root) if root else None

    def load(self) -> Dataset:
        """Read the data set. Raises `DataError`."""
        cache = None if self.cache is None else Path(self.cache)
        return load(self.name, self.folder, self.storage, self.stream_bytes, cache)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained."""

    name: str
    """An entry of `raysim list models`, or the name of a torchvision classification model."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's builder."""
    layer_by: Literal["unit", "module", "tensor", "block", "model", "bias_group"] = "unit"
    """What a layer is, for methods that work layer by layer."""
    blocks: tuple[str, ...] = ()
    """With `layer_by: block`: one regular expression a layer, matched against tensor names."""
    bn_stats: Literal["average", "local", "first", "proxy", "recalibrate"] = "average"
    """BatchNorm's running statistics: averaged over clients, left with each client, the first client's, or (`proxy`)
    left with each client while the server's follow what it learns on proxy data; `recalibrate` measures the new model's
    in one sweep over the proxy data."""
    init: str | None = None
    """A file with the initial parameters, safetensors or a state_dict saved by torch (.pt, .pth); null: drawn from the
    seed."""
    init_except: tuple[str, ...] = ()
    """Tensors, or modules with all their tensors, that are not taken from `init` but drawn, such as `fc`."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of images and convolutions; `auto` is channels_last where samples are images, on every device. It is part of
    the result's bits and of a checkpoint, so never measured."""


@dataclass(frozen=True, kw_only=True)
class UntilConfig:
    """What ends a run before its last round: the first of these that an evaluation finds."""

    accuracy: Fraction | None = None
    """The accuracy is at least this: the global model's or, with `evaluate.personal`, that of the clients' own."""
    loss: NonNegative | None = None
    """The global model's loss on the test set is at most this."""
    seconds: Positive | None = None
    """The run has trained for so long, all its parts together where it was resumed."""
    sim_seconds: Positive | None = None
    """So many simulated seconds of `clock` have passed."""
    patience: PositiveInt | None = None
    """So many evaluations in a row have brought no better score."""


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """How long the run is and who takes part."""

    total: PositiveInt
    """Rounds, unless `until` ends the run before."""
    until: UntilConfig = UntilConfig()
    """What ends the run earlier."""
    participation: Positive = 1.0
    """Fraction of the clients drawn each round, in (0, 1]."""
    selection: Annotated[Any, Catalogue("selection", REGISTRY.table("selection"), OWN)] = UniformSelection()
    """Who takes part in a round: `uniform`, `poisson`, `by_size` and `round_robin` draw among all clients; `fedbuff` and
    `fedasync` take those whose asynchronous updates come in first."""
    evaluate_every: PositiveInt = 1
    """Rounds between evaluations; the last round is always evaluated."""
    checkpoint_every: PositiveInt = 10
    """Rounds between checkpoints."""
    min_clients: PositiveInt = 1
    """Fewest clients whose models make a round: with fewer the run stops. Rounds that draw no client with samples do not
    count."""
    on_client_failure: Literal["drop", "retry", "stop"] = "drop"
    """What becomes of a client that fails for a reason of its own (its model is not finite, its data make no sense): left
    out of the round, or trained again up to twice and then left out; or the run stops. An error in the code always stops
    the run; a client that fails for its machine's reasons is tried elsewhere, and after three attempts the run stops."""

    def cohort_size(self, clients: int) -> int:
        """Clients that take part in a round of a federation of `clients`: at least one."""
        asked: int = self.selection.asked(self.participation, clients)
        return asked


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """How a client trains."""

    epochs: PositiveInt = 1
    """Passes over the client's training samples in a round."""
    batch_size: PositiveInt
    """Samples per training step, or per pass where `accumulate` is more than 1."""
    accumulate: PositiveInt = 1
    """Passes that make a step: its gradient is that of `accumulate` times `batch_size` samples, in the memory of
    `batch_size`. BatchNorm sees one pass at a time."""
    drop_last: bool = False
    """Leave out an epoch's last step if its samples are not complete."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """The clients' optimiser."""
    lr: Positive
    """Learning rate in the first round."""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the learning rate after every round."""
    lr_schedule: Schedules = ()
    """Factors on the learning rate from round to round, multiplied with one another; empty: 1."""
    momentum: Fraction = 0.0
    """Momentum of sgd."""
    nesterov: bool = False
    """Nesterov's form of the momentum."""
    weight_decay: NonNegative = 0.0
    """Of sgd and adam the L2 coefficient, added to the gradient; of adamw the decoupled decay, times the learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Averaging factors of gradient and squared gradient in adam and adamw."""
    grad_clip: Positive | None = None
    """Greatest L2 norm of a step's gradient; null: no limit."""
    class_weights: Literal["balanced"] | tuple[Positive, ...] = ()
    """Weight of each class in the training loss, as `weight` of PyTorch's cross-entropy; `balanced`: n / (C nᶜ), where nᶜ of
    the n samples that all clients train on are of the class; empty: 1. Tests have the plain loss."""
    label_smoothing: Fraction = 0.0
    """Share of a label that is spread evenly over all classes in the training loss, as in PyTorch's cross-entropy. Tests
    have the plain loss."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """In what numbers a training step computes. `bf16`: convolutions and linear maps, forward and backward, in bfloat16, on
    CPUs and GPUs that have it; parameters, gradients, losses, updates and all that methods measure or learn stay fp32. `fp16`:
    the same in float16 on GPUs, for those without bfloat16; the loss is scaled so that small gradients do not vanish."""
    state: Literal["reset", "persist"] = "reset"
    """Whether a client's optimiser starts empty every round (`reset`) or goes on from the state in which its last round ended
    (`persist`): momentum, Adam's averages and its count of steps."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is measured, every `rounds.evaluate_every` rounds."""

    global_: bool = True
    """Test the global model on the test set."""
    personal: Literal["after_init", "before_train", "after_train"] | None = None
    """Test clients' own models on their own test samples: all clients as each would start the next round, or those who take
    part in a round as they start it, or as they end it; null: none."""
    clients: PositiveInt | None = None
    """With `after_init`: how many clients are tested, drawn each time; null: all."""
    batch_size: PositiveInt = 512
    """Samples per evaluation step."""
    metrics: tuple[str, ...] = ()
    """Further metrics to record, registered with `@raysim.metric`."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What is written beside the results."""

    dir: str = "runs"
    """Folder in which each run makes its own."""
    instruments: tuple[Annotated[Any, Catalogue("instrument", REGISTRY.table("instrument"))], ...] = ()
    """Observers of `raysim list instruments`, which look at every round."""
    sinks: tuple[Annotated[Any, Catalogue("sink", REGISTRY.table("sink"))], ...] = ()
    """Where the numbers of each round go besides the tables: tensorboard, mlflow, wandb, ray_metrics."""
    keep_best: bool = False
    """Keep the global model of the best evaluation, too: `best.safetensors`."""
    pairs: bool = True
    """Whether methods that weigh clients against clients (FedAMP, FedFomo, APPLE) note a number for each pair that meets in a
    round."""
    traces: Literal["rounds"] | tuple[PositiveInt, ...] = ()
    """Rounds (from 1) whose models are all written, so that they can be recomputed by hand; `rounds`: all of them."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. Two equal configurations give the same bits (the documentation, `What is promised`, has the scope).

    Sections and entries may be given as in a file, as nested mappings, or as objects. Wrong values raise `ConfigError`
    with the path of each. Rules between sections are applied by `raysim.config.check`, and a preset's defaults by `load`
    and `from_dict`: here the preset is only recorded.
    """

    preset: str = "raysim"
    """Defaults that the file's own keys override: raysim's, the papers' (paper), or those of the released code of FedLWS
    (official_000), FedALA (official_001) or FedLAW (official_003)."""
    name: Annotated[str, Field(pattern=r"^[\w.+=-]+$")] = "run"
    """Names the run and its folder."""
    seed: Seed = 0
    """All randomness follows from it."""
    data: DataConfig
    model: ModelConfig
    rounds: RoundsConfig
    clock: SimulatedClock = SimulatedClock()
    local: LocalConfig
    client: tuple[Annotated[Any, STACKS["client"]], ...] = ()
    """Local objectives and initialisations; empty: FedAvg."""
    weighting: tuple[Annotated[Any, STACKS["weighting"]], ...] = ()
    """How client models are weighted, in the methods' own order whatever the list's; empty: by training samples."""
    server: tuple[Annotated[Any, STACKS["server"]], ...] = ()
    """What the server does with the weighted mean, in order; empty: nothing."""
    upload: tuple[Annotated[Any, STACKS["upload"]], ...] = ()
    """How clients encode what they send, such as `[error_feedback, {top_k: 0.01}]`, each around the next; empty: as it is."""
    download: tuple[Annotated[Any, STACKS["download"]], ...] = ()
    """How the server encodes the model that it sends, likewise."""
    attack: tuple[Annotated[Any, STACKS["attack"]], ...] = ()
    """What malicious clients send, such as `[{alie: {fraction: 0.2}}]`; empty: all are honest."""
    evaluate: EvaluateConfig = EvaluateConfig()
    engine: Annotated[EngineConfig, Catalogue("engine", ENGINES, DEVICES)] = RayEngineConfig()
    record: RecordConfig = RecordConfig()

    objects: ClassVar[tuple[tuple[str, str, Any], ...]] = ()
    """Kind, name and object of what `read_config` was given in place of names. Another object may get the name later."""

    def __post_init__(self) -> None:
        faults = Faults("configuration")
        values = read_fields(Config, canonical(Config, self), "", faults)
        faults.report()
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def clients(self) -> int | None:
        """Clients in the federation; None where the data decide."""
        clients: int | None = self.data.partition.clients
        return clients

    @property
    def cohort_size(self) -> int | None:
        """Clients drawn each round; None where the data decide."""
        clients = self.clients
        return self.rounds.cohort_size(clients) if clients and clients > 0 else None
