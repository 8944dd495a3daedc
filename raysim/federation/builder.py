"""From a configuration to everything that a run is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from raysim import machine
from raysim.clock import CLOCK, Clock
from raysim.config import STACKS, Config, ConfigError
from raysim.config.schema import UntilConfig
from raysim.core.aggregator import Aggregator
from raysim.core.arrays import tensor_of
from raysim.core.attack import Attackers
from raysim.core.broadcast import Broadcast
from raysim.core.hooks import misused
from raysim.core.layers import GroupingError, LayerMap
from raysim.core.local_run import LocalSettings
from raysim.core.method import Method
from raysim.core.optim import OptimizerSpec
from raysim.core.rates import scheduled
from raysim.core.rng import SERVER, preserved, seeded_for, stream_seed
from raysim.core.server import DownlinkRule, Memory, Population, ProxyData, RoundScratch, Server, held_out
from raysim.data import Dataset, Partition, make_partition
from raysim.data.encoded import Encoded
from raysim.engine.base import Engine
from raysim.federation.initial import initial_value, read_initial, with_frozen
from raysim.federation.learned import class_weights, misfits, task
from raysim.federation.trial import trial_result, tried, unscored, unsendable
from raysim.federation.versions import Versions
from raysim.host.device import needs_gpu
from raysim.host.messages import ClientResult, HostSpec
from raysim.lazy import Tensor, nn, torch
from raysim.models import Inputs, builder
from raysim.registry import settle

SCATTERED = 8  # times a client's samples, that are read for it
SCATTERED_CLIENTS = 100  # at most, whose rows are looked at
SENT_BYTES = 1 << 38  # of models in a round, where a method does not limit how many are sent

MakeEngine = Callable[[Config, HostSpec, Dataset, Partition, int], Engine]  # the last one: clients in a cohort


@dataclass(frozen=True)
class RunParts:
    """What a run is made of. The server and the engine change with every round."""

    config: Config
    data: Dataset
    partition: Partition
    cohort_size: int
    spec: HostSpec
    aggregator: Aggregator
    broadcast: Broadcast
    attackers: Attackers
    server: Server
    engine: Engine
    versions: Versions

    @cached_property
    def message(self) -> ClientResult:
        """What a client sends, in bytes: that of a trial before the first round, which `resume` repeats."""
        server = replace(self.server, scratch=RoundScratch(lr=learning_rate(self.config, 0)))
        start(server, initial_value(self.config, self.spec), self.aggregator, self.broadcast)
        return trial_result(self.spec, self.data, self.partition, server)

    def evaluates(self, t: int) -> bool:
        """Whether models are tested in round t."""
        return (t + 1) % self.config.rounds.evaluate_every == 0 or t + 1 == self.server.rounds


def build(
    config: Config, make_engine: MakeEngine | None, data: Dataset, partition: Partition, clock: Clock = CLOCK
) -> RunParts:
    """Everything of a run before its first round; `make_engine` replaces the configuration's own. Raises what `check_network`
    raises, and `PlacementError` for what only the cluster knows."""
    spec, value = check_network(config, data, partition)
    if clock is not CLOCK:  # a copy builds the network again
        spec = replace(spec, clock=clock)
    server = Server(
        value, spec.layers, config.seed, config.rounds.total,
        Population(tensor_of(partition.sizes), lambda: torch.from_numpy(partition.label_counts(data))),
        proxy=ProxyData(partition.proxy, data.labels[partition.proxy], config.data.proxy.balanced_sampling),
    )  # fmt: skip
    steps, broadcast = aggregator(config, spec), Broadcast(config.download, spec.stack.personal_layers)
    start(server, value, steps, broadcast)
    cohort_size = config.rounds.cohort_size(partition.clients)
    engine = (make_engine or config.engine.make)(config, spec, data, partition, cohort_size)
    engine.begin(server.value)
    versions = Versions(engine, partial(learning_rate, config))
    attackers = Attackers.of(config.attack, np.flatnonzero(partition.sizes).tolist(), config.seed)
    return RunParts(config, data, partition, cohort_size, spec, steps, broadcast, attackers, server, engine, versions)


def learning_rate(config: Config, t: int) -> float:
    """The clients' learning rate in round t; after the last one that of the last, where schedules end with it."""
    local, total = config.local, config.rounds.total
    t = min(t, total - 1) if any(schedule.total_rounds for schedule in local.lr_schedule) else t
    return scheduled(local.lr * local.lr_decay**t, local.lr_schedule, t, total)


def start(server: Server, value: Tensor, aggregator: Aggregator, broadcast: Broadcast) -> None:
    """Bring the server to where it is before the first round, with the initial model `value` [S]."""
    server.value, server.shared, server.memory = value, {}, Memory()
    aggregator.prepare(server)
    broadcast.prepare(server)


def partitioned(config: Config) -> tuple[Dataset, Partition]:
    """Read the data and partition them. Raises `DataError`."""
    section = config.data
    with seeded_for(section.name, stream_seed(config.seed, 0, SERVER, "data set")):
        data = section.load()
    partition = make_partition(
        data, section.partition, seed=config.seed, client_test_frac=section.client_test_frac,
        client_val_frac=section.client_val_frac, proxy=section.proxy if section.proxy.samples else None,
    )  # fmt: skip
    return data, partition


def prepare(config: Config) -> tuple[Dataset, Partition]:
    """`checked_data`, and find what the network has against it. Raises `ConfigError`, `DataError` and `ModelError`."""
    data, partition = checked_data(config)
    check_network(config, data, partition)
    return data, partition


def checked_data(config: Config) -> tuple[Dataset, Partition]:
    """`partitioned`, and find the faults that only the data show, before anything else is started and
    without PyTorch. Raises `ConfigError` and `DataError`."""
    data, partition = partitioned(config)
    faults = []
    empty = np.flatnonzero(partition.sizes == 0)
    if len(empty) == partition.clients:
        faults.append("data.partition: no client has a training sample")
    elif len(empty) and not config.data.allow_empty_clients:
        names = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        faults.append(
            f"data.partition: {len(empty)} clients have no training samples ({names}). Ask for fewer clients or proxy samples "
            "or, where the partition has it, a min_size; data.allow_empty_clients: true leaves them out of their rounds"
        )
    if config.evaluate.personal and not len(partition.test.rows):
        faults.append(
            "evaluate.personal: no client has test samples; set data.client_test_frac, or name clients in the test rows as well"
        )
    if config.evaluate.global_ and not config.evaluate.personal and not len(partition.server_test):
        untested = "evaluate.global: there are no samples to test a model on. Bring test samples, or set it to false"
        if config.record.keep_best or config.rounds.until != UntilConfig():
            faults.append(f"{untested}, and do without rounds.until and record.keep_best")
        else:
            warnings.warn(untested, stacklevel=2)
    faults += misfits(config, data)
    faults += config.clock.problems()
    if config.local.precision == "bf16" and not (torch.cuda.is_available() or machine.computes_bf16()):
        faults.append("local.precision: this CPU only emulates bf16, which is slower than fp32; leave it at fp32")
    if getattr(config.engine, "device", "auto") == "cuda" and not torch.cuda.is_available():
        faults.append("engine.local.device: cuda, but PyTorch finds no GPU on this machine. Set it to auto or cpu")
    elif config.engine.only_cpus() and (problem := needs_gpu(config.local.precision, config.engine.cuda_graphs)):
        faults.append(problem)
    faults += [f"record.sinks: {sink.missing}" for sink in config.record.sinks if sink.missing]
    if faults:
        raise ConfigError(faults)
    _warn_of_scattered(data, partition)
    return data, partition


def _warn_of_scattered(data: Dataset, partition: Partition) -> None:
    """Streamed files are read by the part, such as a row group, a client may need a few rows of each."""
    if isinstance(data.x, Encoded) and len(data.x):
        clients = np.unique(np.linspace(0, partition.clients - 1, SCATTERED_CLIENTS).astype(int))
        needed = sum(len(partition.train[client]) for client in clients)
        read = sum(data.x.files.reach(partition.train[client]) for client in clients)
        if read > SCATTERED * needed:
            warnings.warn(
                f"data.storage: stream reads {read / needed:.0f} times the samples that a client has: they are scattered over "
                "the files. Set data.cache instead, or write files whose row groups are of one client each.",
                stacklevel=2,
            )


def check_network(config: Config, data: Dataset, partition: Partition) -> tuple[HostSpec, Tensor]:
    """What hosts are made from, and the initial model [S]. Raises `ModelError`, and `ConfigError` where layers or methods do
    not go with the network, the data or how they are partitioned."""
    spec = host_spec(config, data, partition)
    try:
        spec = with_frozen(config, spec)
        model, layers = spec.network()
    except GroupingError as error:
        raise ConfigError(str(error)) from None
    value = layers.flatten(model.state_dict())  # before the model is tried out, which moves its running statistics
    learned = task(config, data)
    faults = [f"data.task: {learned.name} {problem}" for problem in [learned.check(data.y, data.outputs)] if problem]
    for stack in STACKS:
        for i, method in enumerate(getattr(config, stack)):
            if method.needs.classes and not data.has_classes:
                faults.append(
                    f"{stack}.{i}.{method.name}: needs one class for each sample, which {data.name} does not have."
                )
            if fault := _head_fault(method, layers, config.model.name):
                faults.append(f"{stack}.{i}.{method.name}: {fault}")
            elif problem := method.fits(model, layers, data.num_classes):
                faults.append(f"{stack}.{i}.{method.name}: {problem}")
    clients, cohort = partition.clients, config.rounds.cohort_size(partition.clients)
    for i, attack in enumerate(config.attack):
        if absent := sorted(client for client in attack.clients if client >= clients):
            faults.append(f"attack.{i}.{attack.name}: client {absent[0]} is none of the {clients}, which count from 0.")
    for i, method in enumerate(config.client):
        if method.sends_all and (sent := 4 * layers.S * cohort * clients) > SENT_BYTES:
            faults.append(
                f"client.{i}.{method.name}: models is null: each of {cohort} clients is sent "
                f"the models of all {clients}, {sent / 2**30:.0f} GiB a round, and up to {SENT_BYTES >> 30} GiB are allowed. "
                "Say how many a client is sent, as in models: 10."
            )
    if config.data.augment and len(data.sample_shape) != 3:
        faults.append(
            f"data.augment: changes images [C, H, W], but samples of {data.name} are {list(data.sample_shape)}."
        )
    if not faults:
        faults += tried(spec, model, learned, data) or unscored(spec, learned, config.evaluate.metrics, data)
        faults += unsendable(spec, value, config.download)
    if not faults:
        faults += _single_samples(config, model, tensor_of(spec.samples[:1]), partition)
    if faults:
        raise ConfigError(faults)
    _settle_states(spec, layers)
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in model.modules()):
        _warn_of_statistics(config)
    _warn_of_own_models(config)
    return spec, read_initial(config, layers, value) if config.model.init else value


def _head_fault(method: Method, layers: LayerMap, model: str) -> str | None:
    """Why a method cannot have what it takes of the head of the `model` of that name."""
    if method.needs.head and layers.head is None:
        return (
            f"needs {method.needs.head} of the model's head, and the forward of {model} does not return the output of an "
            'nn.Linear. If it has a head, name it: @raysim.model(head="fc")'
        )
    if method.needs.head == "its parameters" and layers.head_is_shared:
        one, other = next((name, first) for name, (_, first) in layers.tied.items())
        return (
            f"needs the parameters of the model's head apart from the others, and {one} is also {other}. Give the head a tensor "
            "of its own."
        )
    if method.needs.head == "its parameters" and not layers.trains(layers.head):
        return f"needs the parameters of the model's head, {layers.head}, and they are frozen"
    return None


def _settle_states(spec: HostSpec, layers: LayerMap) -> None:
    for method in spec.keepers:
        try:
            settle(type(method.new_state(layers)))
        except Exception as error:
            way = "Import it where the module runs, and define the state's class at the top of that module"
            raise misused(method.new_state, f"makes a state whose annotations cannot be read: {error}", way) from None


def _warn_of_statistics(config: Config) -> None:
    """Scaled weights under the running statistics of others cost FedLAW's ResNet8 15 points of accuracy."""
    if config.model.bn_stats == "local" and config.evaluate.global_:
        warnings.warn(
            "evaluate.global: with model.bn_stats: local no client sends BatchNorm's statistics. The global model is "
            "evaluated with its initial ones, so its score means nothing. Set evaluate.global to false, or bn_stats to "
            "recalibrate, with some data.proxy.samples.",
            stacklevel=2,
        )
    for stack in ("weighting", "server") if config.model.bn_stats == "average" else ():
        for i, method in enumerate(getattr(config, stack)):
            if method.scales:
                way = "proxy or recalibrate" if method.needs.proxy else "recalibrate, with some data.proxy.samples"
                warnings.warn(
                    f"{stack}.{i}.{method.name}: scales the weights, but model.bn_stats: average "
                    f"keeps BatchNorm's statistics of the unscaled ones; the model scores far too low. Set it to {way}.",
                    stacklevel=2,
                )


def _warn_of_own_models(config: Config) -> None:
    """Warn of weightings and server steps that no client's model depends on."""
    for i, sender in enumerate(config.client):
        names = [w.name for w in config.weighting if w.stage != "select"]
        names += [step.name for step in config.server]
        if sender.downlink_rule() is not None and names:
            warnings.warn(
                f"client.{i}.{sender.name}: sends each client a model of its own; "
                f"{' and '.join(names)} only affect the global model, which only first-time clients receive.",
                stacklevel=2,
            )


def _single_samples(config: Config, model: nn.Module, sample: Tensor, partition: Partition) -> list[str]:
    """Where training comes to a batch of one sample, on which BatchNorm may not be able to work."""
    cannot = "one sample, which this model's BatchNorm cannot"
    try:
        with preserved(), torch.no_grad():
            model.train()(sample)
        return []
    except Exception as error:
        if "more than 1 value per channel" not in str(error):  # any other error appears in training as well
            return []
    local, parts = config.local, max((method.batches_per_step for method in config.client), default=1)
    step, faults = local.batch_size * local.accumulate, []
    rest = _last_batches(partition.sizes, step * parts, local.drop_last)
    lone = (rest > 0) & (np.maximum(1, rest // parts) % local.batch_size == 1)  # a last pass of one sample
    short = np.flatnonzero((partition.sizes > 0) & (lone | (local.batch_size == 1)))
    if len(short):
        names = ", ".join(map(str, short[:5])) + (", ..." if len(short) > 5 else "")
        way = "Ask for another batch size"
        if (partition.sizes[short] < 2 * parts).any():
            way = f"Ask for a partition that gives every client {2 * parts} samples or more"
        elif not local.drop_last:
            way = "Set local.drop_last to true, or another batch size"
        faults.append(f"local.batch_size: {len(short)} clients ({names}) would train on a batch of {cannot}. {way}.")
    for i, method in enumerate(config.client):
        if own := method.own_pass(partition.sizes, local.drop_last):
            samples, drop_last = own
            last = _last_batches(samples, step, drop_last) % local.batch_size
            if count := np.count_nonzero((partition.sizes > 0) & (last == 1)):
                where = f"client.{i}.{method.name}"
                faults.append(
                    f"{where}: at {count} clients its own pass would train on a batch of {cannot}. "
                    "Set another local.batch_size."
                )
    for stack, i, method in ((s, i, m) for s in ("weighting", "server") for i, m in enumerate(getattr(config, s))):
        if not method.needs.proxy or not getattr(method, "epochs", 1):
            continue  # it learns on no proxy samples
        batch, samples = getattr(method, "batch_size", 0), len(partition.proxy)
        if getattr(method, "patience", None):
            samples -= held_out(samples, method.validation)
        if batch == 1 or (batch and samples % batch == 1):
            where = f"{stack}.{i}.{method.name}.batch_size"
            faults.append(
                f"{where}: {batch} would train on a batch of {cannot}. Ask for another, or for more proxy samples."
            )
    if config.model.bn_stats == "recalibrate" and len(partition.proxy) == 1:
        faults.append(f"model.bn_stats: recalibrate would train on a batch of {cannot}. Ask for more proxy samples.")
    return faults


def _last_batches(samples: np.ndarray, size: int, drop_last: bool) -> np.ndarray:
    """[N] samples in each client's shorter last batch; 0 where there is none."""
    return np.where(samples >= size, 0 if drop_last else samples % size, samples)


def host_spec(config: Config, data: Dataset, partition: Partition) -> HostSpec:
    """What the hosts need to know of the configuration."""
    local = config.local
    optimizer = OptimizerSpec(local.optimizer, local.momentum, local.nesterov, local.weight_decay, local.betas)
    settings = LocalSettings(
        local.epochs, local.batch_size * local.accumulate, local.drop_last, optimizer, local.grad_clip,
        local.state == "persist", config.model.bn_stats in ("local", "proxy"), local.precision,
        local.batch_size if local.accumulate > 1 else None, class_weights(config, data, partition), local.label_smoothing,
    )  # fmt: skip
    # On CPUs channels-last convolutions are a third faster. Models are stored, and noise for them is drawn, in this
    # layout: it follows only from the configuration and the data, not from where a run computes or goes on.
    channels_last = config.model.memory_format != "contiguous" and len(data.sample_shape) == 3
    companions = [step for method in config.client for step in method.server_steps()]
    watchers = (
        *config.weighting,
        *config.client,
        *config.server,
        *companions,
        *config.record.instruments,
        config.rounds.selection,
    )
    probes = [probe for watcher in watchers for probe in watcher.probes]
    inputs = Inputs(data.sample_shape, data.outputs, data.vocab)
    samples = data.transform(torch.from_numpy(np.array(data.x[: min(2, data.train_rows)]))).numpy()
    return HostSpec(
        config.model.name, builder(config.model.name), inputs, samples, task(config, data), config.model.options,
        config.model.layer_by, config.model.blocks, channels_last, settings, tuple(config.client),
        tuple(dict.fromkeys(probes)), config.evaluate.batch_size, config.engine.threads,
        batch_clients=config.engine.batch_clients, augment=config.data.augment, seed=config.seed, upload=config.upload,
        attacks=config.attack, tape=config.engine.tape, fast_math=config.engine.fast_math,
        cuda_graphs=config.engine.cuda_graphs,
    )  # fmt: skip


def aggregator(config: Config, spec: HostSpec) -> Aggregator:
    """The server's side of the configuration: companions of client methods first, then the configured steps."""
    companions = [step for method in config.client for step in method.server_steps()]
    rules = (method.downlink_rule() for method in config.client)  # at most one is not None
    weightings = (*config.weighting, *config.rounds.selection.weightings())
    weights = next((w.base_weights for w in weightings if w.base_weights), spec.stack.base_weights)
    return Aggregator(
        weights, weightings, (*companions, *config.server), next(filter(None, rules), DownlinkRule()),
        spec.stack.personal_layers, config.model.bn_stats,
    )  # fmt: skip
