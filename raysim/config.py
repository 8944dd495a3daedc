"""YAML to frozen dataclasses, checked whole: every fault is found before anything is started or any data is read.

A section of the file is a dataclass. An entry of a catalogue (data set, partition, method, engine) is written `name`,
`{name: {field: value}}`, or `{name: value}` for its first field, and becomes an instance of the catalogue's dataclass.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import os
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard

import yaml
from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from raysim.analysis import INSTRUMENTS
from raysim.core.bounds import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt
from raysim.core.client import exclusive_hooks
from raysim.data import PARTITIONS, SOURCES, Proxy
from raysim.data.partition import Natural
from raysim.methods import CLIENTS, STEPS, WEIGHTINGS
from raysim.models import MODELS, torchvision
from raysim.store.manifest import DamagedManifest, read_manifest
from raysim.store.sinks import SINKS

# Applied before the file, whose keys win: mappings are merged, lists and values replaced. Besides sections a preset may
# say what `fields` a method has, and which sections hold in a run `with` a method.
PRESETS: dict[str, dict[str, Any]] = {
    "raysim": {},
    "paper": {
        "data": {"client_val_frac": 0.0},
        "model": {"layer_by": "unit"},
        "local": {"state": "reset"},
        "fields": {
            "feddisco": {"normalize_kl": False},
            "fedlaw": {"swa_order": "gamma_first"},
            "fedlws": {"tau_clamp": None},
        },
    },
    "official_000": {  # the released code of FedLWS
        "data": {"partition": {"dirichlet_counts": {"min_size": 0}}, "client_val_frac": 0.3},
        "model": {"layer_by": "bias_group"},
        "local": {"batch_size": 128, "state": "persist"},
        "fields": {
            "feddisco": {"a": 0.1, "b": 0.1},
            "fedlws": {"beta": 0.03, "tau_clamp": [0.01, 0.2], "lws_stats": "all", "shrink_buffers": True},
        },
    },
    "official_001": {  # the released code of FedALA; its scores are those of the best round
        "data": {"client_test_frac": 0.25},
        "model": {"bn_stats": "local"},
        "local": {"batch_size": 10, "drop_last": True},
        "evaluate": {"global": False, "personal": "after_init"},
        "fields": {"fedala": {"tensors": 2, "window": True, "clients": "all", "threshold": 0.1}},
    },
    "official_003": {  # the released code of FedLAW
        "data": {"client_val_frac": 0.3},
        "local": {"state": "persist"},
        "fields": {
            "fedprox": {"official_sgd": True},
            "feddyn": {"unsquared": True},
            "server_ft": {"server_ft_official": True},
            "feddf": {"server_ft_official": True},
            "fedbe": {"server_ft_official": True},
        },
        "with": {
            "feddyn": {"weighting": [{"fedavg": {"weights": "size"}}]},
            "fedlaw": {"model": {"bn_stats": "proxy"}},
            "attentive_law": {"model": {"bn_stats": "proxy"}},
            "adaptive_gws": {"model": {"bn_stats": "proxy"}},
        },
    },
}


class ConfigError(Exception):
    """A configuration that cannot run. `faults` has one line each: `FILE: path.to.field: what is wrong.`"""

    def __init__(self, faults: str | Sequence[str]):
        self.faults = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__(self.faults)  # the argument as given: it must survive pickling between Ray processes

    def __str__(self) -> str:
        return "\n".join(self.faults)


@dataclass(frozen=True)
class Catalogue:
    """Marks a field whose value is one entry of a catalogue of dataclasses."""

    role: str
    entries: Mapping[str, type]

    def __str__(self) -> str:
        return f"{'an' if self.role[0] in 'aeiou' else 'a'} {self.role}"


def name_in(entries: Mapping[str, type], value: object) -> str:
    """The word for `value` in a configuration."""
    known = (name for name, cls in entries.items() if cls is type(value))
    return next(known, type(value).__name__.lower())  # an actor need not know of an entry made in somebody's script


# ---------------------------------------------------------------------------------------------------- the sections


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig:
    """All clients one after another in this process: nothing is started, handy for debugging."""

    threads: PositiveInt = 1
    """Threads of one PyTorch operation. Part of the result's bits, so never measured, always set."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the first visible GPU, or the CPU where there is none."""
    gather_bytes: NonNegativeInt = 2 << 30
    """Bytes of client models that one process may hold at once. Where they are more, FedLAW learns its weights with the
    models left where they were trained: slower, and the same result to rounding."""
    state_bytes: NonNegativeInt = 4 << 30
    """Bytes of client states and peers' models kept in memory between rounds. What is more rests in temporary files."""


@dataclass(frozen=True, kw_only=True)
class RayEngineConfig:
    """Clients as Ray actors, on this machine or a cluster. Client states and peers' models rest in Ray's object store;
    what it does not hold Ray spills to disk."""

    clients_per_actor: Literal["auto"] | PositiveInt = "auto"
    """Clients of a round that share an actor. 1: each has its own; `auto`: as many as the cluster carries."""
    gpu_per_client: Literal["auto"] | NonNegative = "auto"
    """Fraction of one GPU that an actor reserves for a client; 0 trains on CPUs."""
    fan_in: Annotated[int, Field(ge=2)] = 4
    """Partial sums that one node of the aggregation tree adds. Never changes the result."""
    threads: PositiveInt = 1
    """Threads of one PyTorch operation in every actor."""
    gather_bytes: NonNegativeInt = 2 << 30
    """Bytes of client models that one process may hold at once. Where they are more, FedLAW learns its weights with the
    models left where they were trained: slower, and the same result to rounding."""
    state_bytes: Annotated[int, Field(ge=75 << 20)] | None = None
    """Memory of the object store of a cluster that raysim starts, for client states, peers' models and messages; null:
    30 % of the machine's. A cluster that is joined has its own."""


ENGINES: dict[str, type] = {"local": LocalEngineConfig, "ray": RayEngineConfig}

STACKS = {
    "client": Catalogue("client method", CLIENTS),
    "weighting": Catalogue("weighting", WEIGHTINGS),
    "server": Catalogue("server step", STEPS),
}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the clients hold."""

    name: Annotated[Any, Catalogue("data set", SOURCES)]
    """The source, an entry of `raysim list datasets`."""
    root: str | None = None
    """Folder of all data sets; null: the environment variable RAYSIM_DATA, else the source's own default."""
    partition: Annotated[Any, Catalogue("partition", PARTITIONS)]
    """How samples are dealt to clients, an entry of `raysim list partitions`."""
    client_test_frac: Fraction = 0.0
    """Share of each client's samples kept for testing its personal model."""
    client_val_frac: Fraction = 0.0
    """Share of each client's samples held out of training and testing."""
    allow_empty_clients: bool = False
    """Whether clients may be left without training samples; in their rounds they are left out."""
    proxy: Proxy = field(default_factory=lambda: Proxy(samples=0))
    """Samples that the server owns, for methods that learn on the server."""

    @property
    def folder(self) -> Path | None:
        """What a source's `check` and `load` take."""
        root = self.root or os.environ.get("RAYSIM_DATA")
        return Path(root) if root else None


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
    """A safetensors file with the initial parameters; null: drawn from the seed."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Layout of images and convolutions; `auto` picks by model and device, never by measurement."""


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """How long the run is and who takes part."""

    total: PositiveInt
    """Rounds."""
    participation: Positive = 1.0
    """Fraction of the clients drawn each round, in (0, 1]."""
    evaluate_every: PositiveInt = 1
    """Rounds between evaluations; the last round is always evaluated."""
    checkpoint_every: PositiveInt = 10
    """Rounds between checkpoints."""

    def cohort_size(self, clients: int) -> int:
        """Clients that take part in a round of a federation of `clients`: at least one."""
        return max(1, int(self.participation * clients + 1e-9))  # 0.29 * 100 is 28.999...


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """How a client trains."""

    epochs: PositiveInt = 1
    """Passes over the client's training samples in a round."""
    batch_size: PositiveInt
    """Samples."""
    drop_last: bool = False
    """Leave out an epoch's last batch where it is not full."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive
    """Learning rate of round 0."""
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the learning rate after every round."""
    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    """L2 coefficient, added to the gradient."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam's averaging factors of gradient and squared gradient."""
    grad_clip: Positive | None = None
    """Greatest L2 norm of a step's gradient; null: no limit."""
    state: Literal["reset", "persist"] = "reset"
    """Whether a client's optimizer starts every round anew or keeps its momentum."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is measured, every `rounds.evaluate_every` rounds."""

    global_: bool = True
    """Test the global model on the test set."""
    personal: Literal["after_init", "after_train"] | None = None
    """Test each client's own model on its own test samples: as it would start a round, or as it ends one."""
    clients: PositiveInt | None = None
    """With `after_init`: how many clients, drawn anew each time, are tested; null: all."""
    batch_size: PositiveInt = 512
    """Samples."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What is written beside the results."""

    dir: str = "runs"
    """Folder in which each run makes its own."""
    instruments: tuple[Annotated[Any, Catalogue("instrument", INSTRUMENTS)], ...] = ()
    """Observers of `raysim list instruments`, which look at every round."""
    sinks: tuple[Annotated[Any, Catalogue("sink", SINKS)], ...] = ()
    """Where the numbers of each round go besides the tables: tensorboard, mlflow, wandb."""
    trace: Literal["rounds"] | tuple[NonNegativeInt, ...] = ()
    """Rounds (from 0) whose every model is kept, to be recomputed by hand; `rounds`: all of them."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. Two equal configurations give the same bits (see README for the scope)."""

    preset: str = "raysim"
    """Defaults that the file's own keys override."""
    name: Annotated[str, Field(pattern=r"^[\w.+=-]+$")] = "run"
    """Names the run and its folder."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """All randomness follows from it."""
    data: DataConfig
    model: ModelConfig
    rounds: RoundsConfig
    local: LocalConfig
    client: tuple[Annotated[Any, STACKS["client"]], ...] = ()
    """Local objectives and initialisations; empty: FedAvg."""
    weighting: tuple[Annotated[Any, STACKS["weighting"]], ...] = ()
    """How client models are weighted, in the methods' own order whatever the list's; empty: by training samples."""
    server: tuple[Annotated[Any, STACKS["server"]], ...] = ()
    """What the server does with the weighted mean, in order; empty: nothing."""
    evaluate: EvaluateConfig = EvaluateConfig()
    engine: Annotated[LocalEngineConfig | RayEngineConfig, Catalogue("engine", ENGINES)] = RayEngineConfig()
    record: RecordConfig = RecordConfig()

    @property
    def clients(self) -> int | None:
        """In the federation; None where the data alone tell."""
        return getattr(self.data.partition, "clients", None)

    @property
    def cohort_size(self) -> int | None:
        """Clients drawn each round; None where the data alone tell."""
        clients = self.clients
        return self.rounds.cohort_size(clients) if clients and clients > 0 else None


# -------------------------------------------------------------------------------------------------------- reading


def load(path: str | Path, overrides: Sequence[str] = (), beside: Collection[str] = ("table",)) -> Config:
    """Read a YAML file, apply `path=value` overrides, and check the whole; raises `ConfigError` with every fault.

    Top-level keys in `beside` are for somebody else: `table` is what `raysim reproduce` makes of the file.
    """
    raw = {key: value for key, value in _read(Path(path)).items() if key not in beside}
    if "methods" in raw:
        way = f"`raysim sweep {path} --out DIR` plays and compares them"
        raise ConfigError(f"{path}: methods: lists several, and this is about one run. {way}.")
    faults = []
    for text in overrides:
        try:
            raw = _override(_canonical(Config, raw), text)
        except _OverrideFault as fault:
            faults.append(f"--set {text}: {fault}")
    raw.setdefault("name", Path(path).stem)
    try:
        config = from_dict(raw, str(path))
    except ConfigError as error:
        raise ConfigError([*faults, *error.faults]) from None
    if faults:
        raise ConfigError(faults)
    return config


def read_entry(catalogue: Catalogue, name: str, overrides: Sequence[str] = ()) -> Any:
    """One entry of a catalogue, with `field=value` for its fields; raises `ConfigError` with every fault."""
    faults = _Faults("")
    fields: dict[str, Any] = {}
    for text in overrides:
        try:
            fields = _override(fields, text)
        except _OverrideFault as fault:
            faults.add(f"--set {text}", str(fault))
    entry = _build(Annotated[Any, catalogue], {name: fields}, catalogue.role, faults)
    if faults.lines:
        raise ConfigError(faults.lines)
    return entry


def from_dict(raw: Mapping[str, Any], source: str = "configuration") -> Config:
    """Build and check a configuration from nested mappings; `source` names it in the faults."""
    faults = _Faults(source)
    preset = raw.get("preset", "raysim")
    if not isinstance(preset, str) or preset not in PRESETS:
        faults.add("preset", f"there is no preset {preset!r}.{nearest(preset, PRESETS)}")
        preset = "raysim"
    merged = _over_preset(PRESETS[preset], _canonical(Config, dict(raw)))
    config = _build(Config, merged, "", faults)
    for check in _CHECKS:
        try:
            for path, message in check(config):
                faults.add(path, message)
        except Exception:
            if not faults.lines:  # else the check stumbled over a part that has a fault of its own
                raise
    if faults.lines:
        raise ConfigError(faults.lines)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration, every default written out, as nested mappings and lists that `from_dict` reads."""
    return plain(Config, config)


def to_yaml(config: Config) -> str:
    """The resolved configuration as a YAML file."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def fingerprint(config: Config) -> str:
    """SHA-256 of the resolved configuration, independent of the order in which it was written."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()


def decisive(config: Config) -> dict[str, Any]:
    """The settings on which a run's bits depend, as JSON: not what it is called, where it is played, how long, and what
    is looked at."""
    plain: dict[str, Any] = json.loads(json.dumps(to_dict(config)))
    for section in ("preset", "name", "engine", "evaluate", "record"):
        del plain[section]
    for section, keys in {"data": ["root"], "rounds": ["total", "evaluate_every", "checkpoint_every"]}.items():
        plain[section] = {key: value for key, value in plain[section].items() if key not in keys}
    return plain


def check_unchanged(config: Config, folder: Path) -> None:
    """Raises `ConfigError` where the run in `folder` was begun with settings that make other bits, or does not say."""
    faults = []
    try:
        settings = read_manifest(folder).get("settings")
    except DamagedManifest:
        settings = None
    if not isinstance(settings, dict):
        if not (folder / "manifest.json").exists() and not any((folder / "checkpoints").glob("*.json")):
            return  # stopped before it was described, and so before its first round
        raise ConfigError(
            f"{folder / 'manifest.json'} is missing or damaged: it says with what settings the run began. Put it back, "
            "or start another run."
        )
    for section, now in decisive(config).items():
        was = settings.get(section, now)
        both = isinstance(was, dict) and isinstance(now, dict)
        pairs = {f"{section}.{key}": (was.get(key), now[key]) for key in now} if both else {section: (was, now)}
        changed = {key: before for key, (before, after) in pairs.items() if before != after}
        faults += [f"{key} was {json.dumps(before)} when the run began" for key, before in changed.items()]
    saved = (re.fullmatch(r"round-(\d+)", file.stem) for file in (folder / "checkpoints").glob("round-*.json"))
    played = max((int(name[1]) for name in saved if name), default=0)
    if played > config.rounds.total:
        faults.append(f"rounds.total is {config.rounds.total}, but {played} rounds have been played")
    if faults:
        where = folder / "config.yaml"
        raise ConfigError([f"{where}: {fault}. Put it back, or start another run." for fault in faults])


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, of which YAML keeps the last; leaves dates as the text they are."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"'{key.value}' is written twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        raise ConfigError(f"{path}: no such file.{f' Did you mean {path.parent / near[0]}?' if near else ''}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {where}not valid YAML: {problem or error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold the sections {', '.join(fields_of(Config))}, but holds {show(raw)}.")
    return raw


class _OverrideFault(Exception):
    pass


def _override(raw: dict[str, Any], text: str) -> dict[str, Any]:
    """Set `path=value` in a canonical mapping; segments are keys, method names and list indices."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise _OverrideFault("write it as path=value, for instance rounds.total=5.")
    try:
        parsed = yaml.load(value, _Loader)
    except yaml.YAMLError:
        raise _OverrideFault(f"{value!r} is not valid YAML.") from None
    raw = copy.deepcopy(raw)
    keys, node = path.split("."), raw
    for depth, key in enumerate(keys):
        here, last = ".".join(keys[:depth]), depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) > len(node):
                raise _OverrideFault(f"{here} is a list of {len(node)}; {key!r} is not a place in it.")
            if int(key) == len(node):
                node.append(None)
            key = int(key)
        elif not isinstance(node, dict):
            raise _OverrideFault(f"{here} is {show(node)}, which has no {key!r} in it.")
        if last:
            node[key] = parsed
        elif isinstance(node, list) or node.get(key) is not None:
            node[key] = {} if node[key] is None else node[key]
        else:
            node[key] = [] if keys[depth + 1] == "0" else {}
        node = node[key]
    return raw


def _over_preset(preset: Mapping[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Canonical `raw` over a preset's sections, those that go with the run's methods, and its fields of methods."""
    preset = dict(preset)
    fields, beside = preset.pop("fields", {}), preset.pop("with", {})

    def methods(config: dict[str, Any]) -> list[dict[str, Any]]:
        stacks = [config.get(stack) for stack in STACKS]
        entries = [entry for stack in stacks if isinstance(stack, list) for entry in stack]
        return [entry for entry in entries if isinstance(entry, dict) and len(entry) == 1]

    base = _canonical(Config, preset)
    for entry in methods(_merge(Config, base, raw)):
        base = _merge(Config, base, _canonical(Config, beside.get(next(iter(entry)), {})))
    merged = _merge(Config, base, raw)
    for entry in methods(merged):
        ((name, values),) = entry.items()
        if name in fields and isinstance(values, dict):
            entry[name] = fields[name] | values
    return merged


def _merge(annotation: Any, base: Any, over: Any) -> Any:
    """Canonical `over` over `base`. Mappings are merged, all else is replaced, an entry by another one too."""
    mappings = isinstance(base, dict) and isinstance(over, dict)
    if not mappings or (catalogue_of(annotation) and base.keys() != over.keys()):
        return copy.deepcopy(over)
    hints = {key: hint for key, (_, hint) in fields_of(annotation).items()} if is_section(annotation) else {}
    return base | {key: _merge(hints.get(key), base.get(key), value) for key, value in over.items()}


# ---------------------------------------------------------------------------------------- from mappings to objects


@functools.cache
def fields_of(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Key in the file → field and annotation. A trailing underscore only dodges a Python keyword."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name.rstrip("_"): (f, hints[f.name]) for f in dataclasses.fields(cls) if f.init}


def is_section(annotation: Any) -> TypeGuard[type]:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def catalogue_of(annotation: Any) -> Catalogue | None:
    return next((m for m in getattr(annotation, "__metadata__", ()) if isinstance(m, Catalogue)), None)


def stack_of(annotation: Any) -> Any | None:
    """The annotation of the entries, where it is a tuple of catalogue entries."""
    args = typing.get_args(annotation)
    return args[0] if typing.get_origin(annotation) is tuple and catalogue_of(args[0]) else None


def _canonical(annotation: Any, raw: Any) -> Any:
    """`raw` with every catalogue entry written out as {name: {field: value}}; what is malformed stays as it is."""
    if catalogue := catalogue_of(annotation):
        if isinstance(raw, str):
            return {raw: {}}
        if isinstance(raw, dict) and len(raw) == 1:
            ((name, values),) = raw.items()
            if values is None:
                return {name: {}}
            first = next(iter(fields_of(catalogue.entries[name])), None) if name in catalogue.entries else None
            if first and not isinstance(values, dict):
                return {name: {first: values}}
    elif entry := stack_of(annotation):
        return [_canonical(entry, one) for one in raw] if isinstance(raw, list) else raw
    elif is_section(annotation) and isinstance(raw, dict):
        fields = fields_of(annotation)
        return {key: _canonical(fields[key][1], value) if key in fields else value for key, value in raw.items()}
    return raw


@dataclass
class _Faults:
    source: str
    lines: list[str] = field(default_factory=list)

    def add(self, path: str, message: str) -> None:
        self.lines.append(": ".join(part for part in (self.source, path, message) if part))


class _Unreadable:
    """Stands for a value that has a fault, so that checks of the rest of the configuration can go on without it."""

    def __bool__(self) -> bool:
        raise TypeError("a value that has a fault")

    __eq__ = __bool__  # type: ignore[assignment]


def _build(annotation: Any, raw: Any, path: str, faults: _Faults) -> Any:
    """The value that `annotation` asks for, from canonical `raw`; where it has faults, as much of it as can be read."""
    if catalogue := catalogue_of(annotation):
        return _build_entry(catalogue, raw, path, faults)
    if entry := stack_of(annotation):
        if isinstance(raw, list):
            return tuple(_build(entry, one, f"{path}.{i}", faults) for i, one in enumerate(raw))
        faults.add(path, f"must be a list, each {describe(entry)}, but is {show(raw)}.")
        return _Unreadable()
    if is_section(annotation):
        return _build_dataclass(annotation, raw, path, faults)
    try:
        return _read_value(annotation, raw)
    except ValidationError:
        near = nearest(raw, _words(annotation), listed=False)
        faults.add(path, f"must be {describe(annotation)}, but is {show(raw)}.{near}")
        return _Unreadable()


def _build_entry(catalogue: Catalogue, raw: Any, path: str, faults: _Faults) -> Any:
    if not isinstance(raw, dict) or len(raw) != 1:
        message = f"must be the name of {catalogue}, or {{name: {{field: value}}}}, but is {show(raw)}."
        if isinstance(raw, dict) and len(raw) > 1:
            several = all(isinstance(values, dict) for values in raw.values())
            message += f" --set {path}=NAME replaces it." if several else " Fields go one level deeper than the name."
        faults.add(path, message)
        return _Unreadable()
    ((name, values),) = raw.items()
    if name in catalogue.entries:
        return _build(catalogue.entries[name], values, f"{path}.{name}", faults)
    home = next((stack for stack in STACKS if name in STACKS[stack].entries), None)
    hint = f" It belongs under '{home}'." if home else nearest(name, catalogue.entries)
    faults.add(path, f"there is no {catalogue.role} {name!r}.{hint}")
    return _Unreadable()


def _build_dataclass(cls: type, raw: Any, path: str, faults: _Faults) -> Any:
    fields = fields_of(cls)
    takes = f"It takes {', '.join(fields)}." if fields else "It takes no fields."
    if not isinstance(raw, dict):
        faults.add(path, f"must be a mapping of fields, but is {show(raw)}. {takes}")
        return _Unreadable()
    inside = f"{path}." if path else ""
    before = len(faults.lines)
    for key in raw:
        if key not in fields:
            near = nearest(key, fields, listed=False)
            if ":" in str(key):  # {a:1} is one word to YAML
                near = " A space is missing after its colon."
            faults.add(f"{inside}{key}", f"unknown field (set to {show(raw[key])}).{near} {takes}")
    misspelt = {_match(key, fields) for key in raw if key not in fields}
    values: dict[str, Any] = {}
    for key, (f, hint) in fields.items():
        if key not in raw and key in misspelt:
            values[f.name] = _Unreadable()  # its default is not what was meant
        elif key in raw:
            values[f.name] = _build(hint, raw[key], f"{inside}{key}", faults)
        elif f.default is not MISSING:
            values[f.name] = f.default
        elif f.default_factory is not MISSING:
            values[f.name] = f.default_factory()
        else:
            faults.add(f"{inside}{key}", f"is missing; it must be {describe(hint)}.")
            values[f.name] = _Unreadable()
    if len(faults.lines) == before:
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:  # a rule of the dataclass's own, in __post_init__
            faults.add(path, f"{error}".removeprefix(f"{path.rpartition('.')[2]}: "))
    partial: Any = object.__new__(cls)  # past the dataclass's own rules, which need not hold of half a value
    for name, value in values.items():
        object.__setattr__(partial, name, value)
    return partial


_EXPONENT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+")


def _exponents(raw: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text, for want of a point and a sign."""
    if isinstance(raw, list | tuple):
        return [_exponents(value) for value in raw]
    return float(raw) if isinstance(raw, str) and _EXPONENT.fullmatch(raw) else raw


def _read_value(annotation: Any, raw: Any) -> Any:
    adapter = _adapter(annotation)
    try:
        return adapter.validate_json(_json(raw))
    except ValidationError:
        return adapter.validate_json(_json(_exponents(raw)))  # only where text did not do


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    # Strict, and read as JSON: a list is a tuple there, yet '10', 10.0 and true are not the whole number 10 or 1.
    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


def _json(raw: Any) -> str:
    return json.dumps(raw, default=str)


def plain(annotation: Any, value: Any) -> Any:
    if catalogue := catalogue_of(annotation):
        return {name_in(catalogue.entries, value): plain(type(value), value)}
    if entry := stack_of(annotation):
        return [plain(entry, one) for one in value]
    if is_section(annotation):
        return {key: plain(hint, getattr(value, f.name)) for key, (f, hint) in fields_of(annotation).items()}
    return json.loads(_json(value))


# ------------------------------------------------------------------------------------- what no single field can know

Found = Iterator[tuple[str, str]]  # path and message of each fault


def _check_cohort(config: Config) -> Found:
    asked = config.rounds.participation
    if asked > 1:
        clients = config.clients
        of = f" of the federation's {clients}" if clients else ""
        count = f"{asked * clients:g} clients{of}" if clients else f"{asked:g} times the federation"
        yield "rounds.participation", f"{asked:g} asks for a cohort of {count}. It is a fraction: 0.1 draws a tenth."


def _check_data(config: Config) -> Found:
    data = config.data
    if data.client_test_frac + data.client_val_frac >= 1:
        both = f"{data.client_val_frac} and client_test_frac {data.client_test_frac}"
        yield "data.client_val_frac", f"{both} leave nothing to train on."
    own = data.partition.test_frac
    if data.client_test_frac and own is not None and own != data.client_test_frac:
        message = f"is {data.client_test_frac}, but the partition holds out {own}. Set its test_frac instead."
        yield "data.client_test_frac", message
    if problem := data.name.check(data.folder):
        where = f"data.root is {data.root}" if data.root else f"RAYSIM_DATA is {data.folder}"
        yield "data.name", f"{problem} ({where if data.folder else 'neither data.root nor RAYSIM_DATA is set'})"


def _check_model(config: Config) -> Found:
    model = config.model
    builder = MODELS.get(model.name)
    if builder is None and model.name.removeprefix("torchvision.") not in torchvision.architectures():
        near = nearest(model.name, [*MODELS, *torchvision.architectures()], listed=False)
        yield "model.name", f"there is no model {model.name!r}.{near} `raysim list models` shows all."
    known = list(inspect.signature(builder).parameters)[1:] if builder else []
    if builder or model.name.startswith("torchvision."):
        takes = f"{model.name} takes {', '.join(known)}." if known else f"{model.name} takes no options."
        for option in model.options:
            if option not in known:
                yield f"model.options.{option}", f"unknown option.{nearest(option, known, listed=False)} {takes}"


def _check_model_settings(config: Config) -> Found:
    model = config.model
    if model.blocks and model.layer_by != "block":
        yield "model.blocks", f"goes with layer_by: block, but layer_by is {model.layer_by}."
    if not model.blocks and model.layer_by == "block":
        yield "model.blocks", "is empty, but layer_by: block wants one regular expression a layer."
    for i, pattern in enumerate(model.blocks):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"model.blocks.{i}", f"{pattern!r} is not a regular expression: {error}."
    if model.init and not Path(model.init).is_file():
        yield "model.init", f"there is no file {model.init}."
    if model.bn_stats in ("proxy", "recalibrate") and not config.data.proxy.samples:
        yield "model.bn_stats", f"{model.bn_stats} needs proxy data, but data.proxy.samples is 0."
    elif model.bn_stats == "proxy" and not any(m.needs_proxy for _, _, m in _methods(config, "weighting", "server")):
        message = "proxy statistics follow a method that learns on proxy data, and there is none."
        yield "model.bn_stats", f"{message} recalibrate goes with any."


def _check_optimizer(config: Config) -> Found:
    local = config.local
    if local.optimizer == "adam" and local.momentum:
        yield "local.momentum", f"{local.momentum} belongs to sgd; adam has betas."
    if local.nesterov and not (local.optimizer == "sgd" and local.momentum):
        yield "local.nesterov", "needs optimizer sgd with a momentum above 0."


def _methods(config: Config, *stacks: str) -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of every method in `stacks`."""
    for stack in stacks:
        for i, method in enumerate(getattr(config, stack)):
            if not isinstance(method, _Unreadable):
                yield f"{stack}.{i}", name_in(STACKS[stack].entries, method), method


def _check_twice(config: Config) -> Found:
    for stack in ("client", "weighting", "server"):
        names = [name for _, name, _ in _methods(config, stack)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield stack, f"'{name}' is listed {names.count(name)} times; a stack can have it once."


def _check_hooks(config: Config) -> Found:
    owners: dict[str, list[str]] = {}
    for _, name, method in _methods(config, "client"):
        for hook in exclusive_hooks(method):
            owners.setdefault(hook, []).append(name)
    for hook, names in owners.items():
        if len(set(names)) > 1:
            yield "client", f"{' and '.join(map(repr, names))} both own the hook '{hook}'; a stack can have one."


def _check_rescale(config: Config) -> Found:
    names = [name for _, name, method in _methods(config, "weighting") if method.stage == "rescale"]
    if len(set(names)) > 1:
        yield "weighting", f"{' and '.join(map(repr, names))} both rescale the mixture; a run can have one."


def _check_order(config: Config) -> Found:
    refined = None
    for path, name, step in _methods(config, "server"):
        if step.remembers and refined:
            yield path, f"{name} remembers updates, which {refined} before it has changed. List {name} first."
        refined = name if step.refines else refined


def _check_proxy(config: Config) -> Found:
    for path, name, method in _methods(config, "weighting", "server"):
        if method.needs_proxy and not config.data.proxy.samples:
            yield path, f"{name} learns on proxy data, but data.proxy.samples is 0."


def _check_evaluation(config: Config) -> Found:
    data = config.data
    natural = isinstance(data.partition, Natural)  # its clients may bring tests of their own
    if config.evaluate.personal and not (data.client_test_frac or data.partition.test_frac or natural):
        message = f"{config.evaluate.personal} needs client tests, but data.client_test_frac is 0. The papers use 0.25."
        yield "evaluate.personal", message
    if 0 < (config.clients or 0) < (config.evaluate.clients or 0):
        yield "evaluate.clients", f"is {config.evaluate.clients}, but there are {config.clients}. null tests all."


def _check_record(config: Config) -> Found:
    if config.record.trace != "rounds":
        for t in config.record.trace:
            if t >= config.rounds.total:
                yield "record.trace", f"there is no round {t}; rounds are 0 to {config.rounds.total - 1}."


def _check_instruments(config: Config) -> Found:
    names = [name_in(INSTRUMENTS, instrument) for instrument in config.record.instruments]
    for i, (name, instrument) in enumerate(zip(names, config.record.instruments, strict=True)):
        if name in names[:i]:
            yield f"record.instruments.{i}", f"'{name}' is listed twice; a run can have it once."
        if problem := instrument.check(config):
            yield f"record.instruments.{i}.{name}", problem


def _check_methods(config: Config) -> Found:
    """What a method itself has to say about the configuration as a whole."""
    for path, name, method in _methods(config, "client", "weighting", "server"):
        problem = getattr(method, "check", lambda config: None)(config)
        if problem:
            yield f"{path}.{name}", problem


_CHECKS = (
    *(_check_cohort, _check_data, _check_model, _check_model_settings, _check_optimizer, _check_twice, _check_hooks),
    *(_check_rescale, _check_order, _check_proxy, _check_evaluation, _check_record, _check_instruments, _check_methods),
)


# ------------------------------------------------------------------------------------------------- words for people

_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    dict: "a mapping",
}


def describe(annotation: Any) -> str:
    """What a value may be, as it is written in YAML."""
    if catalogue := catalogue_of(annotation):
        return f"{catalogue} ({', '.join(catalogue.entries)})"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        rules = [rule for m in annotation.__metadata__ for rule in getattr(m, "metadata", [m])]
        limits = [f"{sign} {getattr(rule, name)}" for rule in rules for name, sign in _BOUNDS if hasattr(rule, name)]
        limits += [f"matching {rule.pattern}" for rule in rules if getattr(rule, "pattern", None)]
        return " ".join([describe(args[0]), " and ".join(limits)]).strip()
    if origin in (typing.Union, UnionType, Literal):
        options = _options(annotation)
        return " or ".join(filter(None, [", ".join(options[:-1]), options[-1]]))
    if origin in (tuple, list):
        if args[-1] is not Ellipsis and origin is tuple:
            return f"a list [{', '.join(map(describe, args))}]"
        return f"a list, each {describe(args[0])}"
    if is_section(annotation):
        return f"a mapping of {', '.join(fields_of(annotation))}"
    return _KINDS.get(origin or annotation, str(annotation))


def _words(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [arg for arg in typing.get_args(annotation) if isinstance(arg, str)]
    return [word for arg in typing.get_args(annotation) for word in _words(arg)]


def _options(annotation: Any) -> list[str]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return [str(arg) for arg in args]
    if origin in (typing.Union, UnionType):
        return [option for arg in args for option in _options(arg)]
    return [describe(annotation)]


def _match(word: object, words: Iterable[str]) -> str | None:
    by_lower = {w.lower(): w for w in words}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def nearest(word: object, words: Collection[str], listed: bool = True) -> str:
    near = _match(word, words)
    choice = f" There are {', '.join(words)}." if listed and words else ""
    return (f" Did you mean {near!r}?" if near else "") + choice


def show(value: Any) -> str:
    """`value` as it is written in YAML, shortened."""
    if isinstance(value, str):
        looks_otherwise = re.fullmatch(r"[-+.\d\s]+|true|false|null", value, re.IGNORECASE)
        return f"{value[:60]!r}" + (" (text)" if looks_otherwise else "")
    text = yaml.safe_dump(json.loads(_json(value)), default_flow_style=True, width=10_000, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= 60 else f"{text[:57]}..."
