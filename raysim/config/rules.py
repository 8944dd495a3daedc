"""What no single field can know: settings that do not go together."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic.errors import PydanticUserError

from raysim.config.build import build
from raysim.config.fields import STACKS
from raysim.config.messages import Faults, nearest
from raysim.config.schema import Config
from raysim.core.client import EXCLUSIVE, overrides
from raysim.core.facts import RunFacts
from raysim.core.optim import OptimizerSpec
from raysim.data.partition import Natural
from raysim.data.sources import Torchvision
from raysim.models import option_types, torchvision
from raysim.registry import REGISTRY, name_in
from raysim.store.documents import TORCH_SUFFIXES

Found = Iterator[tuple[str, str]]  # path and message of each fault


def _check_cohort(config: Config) -> Found:
    share = config.rounds.participation
    if share > 1:
        clients = config.clients
        of = f" of the federation's {clients}" if clients else ""
        count = f"{share * clients:g} clients{of}" if clients else f"{share:g} times the federation"
        yield "rounds.participation", f"{share:g} asks for a cohort of {count}. It is a fraction: 0.1 draws a tenth."


def _check_min_clients(config: Config) -> Found:
    least, cohort = config.rounds.min_clients, config.cohort_size
    if cohort is not None and least > cohort:
        yield "rounds.min_clients", f"is {least}, but a round draws {cohort} clients."
    selection = config.rounds.selection
    if selection.asynchronous and least > 1 and selection.closes(0.0) < math.inf:
        way = "Set it to 1, or leave out the period."
        yield "rounds.min_clients", f"is {least}, but with {selection.name} a period may end with one update. {way}"


def _check_until(config: Config) -> Found:
    until, evaluate = config.rounds.until, config.evaluate
    wanted = {
        f"rounds.until.{name}": getattr(until, name) is not None
        for name in ("accuracy", "seconds", "sim_seconds", "patience")
    }
    for path, asked in (wanted | {"record.keep_best": config.record.keep_best}).items():
        if asked and not (evaluate.global_ or evaluate.personal):
            yield path, "needs evaluations: set evaluate.global or evaluate.personal."
    if until.sim_seconds is not None and not config.clock.runs:
        yield "rounds.until.sim_seconds", "needs a clock. Set a speed, a bandwidth or a latency under clock."
    if until.loss is not None and not evaluate.global_:
        yield "rounds.until.loss", "is of the global model, which is not evaluated: evaluate.global is false."


def _check_data(config: Config) -> Found:
    data = config.data
    own = data.partition.test_frac
    if data.client_test_frac and own is not None and own != data.client_test_frac:
        message = f"is {data.client_test_frac}, but the partition holds out {own}. Set its test_frac instead."
        yield "data.client_test_frac", message
    if data.cache is not None and data.storage == "stream":
        yield "data.cache", "decodes all samples, which data.storage: stream is there to avoid. Leave one of them out."
    try:
        problem = data.name.check(data.folder)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        problem = f"{error.strerror}: {str(error.filename)[:200]}"
    if problem:
        where = f"data.root is {data.root}" if data.root else f"RAYSIM_DATA is {data.folder}"
        yield "data.name", f"{problem} ({where if data.folder else 'neither data.root nor RAYSIM_DATA is set'})"


def _check_written(config: Config) -> Found:
    """A file that a run writes must not count as one of its data, which would change from run to run."""
    data = config.data
    if isinstance(data.name, Torchvision) and (data.cache is not None or data.storage == "stream"):
        folder = data.name.folder(data.folder)
        for path, written in (("data.cache", data.cache), ("record.dir", config.record.dir)):
            if written and Path(written).resolve().is_relative_to(folder.resolve()):
                counts = f"{written} lies in {folder}, where every file counts as data of {data.name.name}."
                yield path, f"{counts} Set data.root to a folder that holds only data."


def _check_task(config: Config) -> Found:
    tasks, metrics = REGISTRY.table("task"), REGISTRY.table("metric")
    if config.data.task is not None and config.data.task not in tasks:
        yield "data.task", f"there is no task {config.data.task!r}.{nearest(config.data.task, tasks)}"
    for i, name in enumerate(config.evaluate.metrics):
        if name in config.evaluate.metrics[:i]:
            yield (
                "evaluate.metrics",
                f'{name!r} is listed twice. Name objects, as in metrics={{"one": ..., "other": ...}}.',
            )
        if name not in metrics:
            known = (
                nearest(name, metrics)
                if metrics
                else " None is registered: decorate a function with @raysim.metric() (docs/howto/model.md)."
            )
            yield "evaluate.metrics", f"there is no metric {name!r}.{known}"


def _check_model(config: Config) -> Found:
    model, models = config.model, REGISTRY.table("model")
    builder = models.get(model.name)
    if builder is None and model.name.removeprefix("torchvision.") not in torchvision.architectures():
        near = nearest(model.name, [*models, *torchvision.architectures()], listed=False)
        yield "model.name", f"there is no model {model.name!r}.{near} `raysim list models` shows all."
    known = list(inspect.signature(builder).parameters)[1:] if builder else []
    if builder or model.name.startswith("torchvision."):
        takes = f"{model.name} takes {', '.join(known)}." if known else f"{model.name} takes no options."
        for option in model.options:
            if option not in known:
                yield f"model.options.{option}", f"unknown option.{nearest(option, known, listed=False)} {takes}"
    for option, hint in (option_types(builder) if builder else {}).items():
        if option in model.options:
            faults = Faults("")
            with suppress(PydanticUserError):  # an annotation that no value of a file has
                build(hint, model.options[option], "", faults)
            yield from ((f"model.options.{option}", message) for message in faults.lines)


def _check_model_settings(config: Config) -> Found:
    model = config.model
    if model.blocks and model.layer_by != "block":
        yield "model.blocks", f"goes with layer_by: block, but layer_by is {model.layer_by}. [] overrules a preset's."
    if not model.blocks and model.layer_by == "block":
        yield "model.blocks", "is empty, but layer_by: block needs one regular expression for each layer."
    for i, pattern in enumerate(model.blocks):
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"model.blocks.{i}", f"{pattern!r} is not a regular expression: {error}."
    if model.init and not os.path.isfile(model.init):  # which a name that no file can have does not upset
        yield "model.init", f"there is no file {model.init[:200]}."
    elif model.init and (problem := _unreadable(Path(model.init))):
        yield "model.init", problem
    if model.init_except and not model.init:
        yield "model.init_except", "says what not to take from model.init, which is null."
    if model.bn_stats in ("proxy", "recalibrate") and not config.data.proxy.samples:
        yield "model.bn_stats", f"{model.bn_stats} needs proxy data, but data.proxy.samples is 0."
    elif model.bn_stats == "proxy" and not any(m.needs.proxy for _, _, m in _methods(config, "weighting", "server")):
        message = "proxy statistics follow a method that learns on proxy data, and there is none."
        yield "model.bn_stats", f"{message} recalibrate goes with any."


def _unreadable(path: Path) -> str | None:
    """Why a safetensors file cannot be read, by its first bytes, which describe each tensor. One of torch is
    looked at when it is read."""
    from safetensors import safe_open

    if path.suffix in TORCH_SUFFIXES:
        return None
    try:
        with safe_open(path, "numpy") as file:
            file.keys()
    except Exception as error:  # of the file system, or the library's own
        return f"{path} cannot be read as safetensors: {error}."
    return None


def _check_optimizer(config: Config) -> Found:
    local = config.local
    if local.optimizer != "sgd" and local.momentum:
        yield "local.momentum", f"{local.momentum} belongs to sgd; {local.optimizer} has betas."
    if local.nesterov and not (local.optimizer == "sgd" and local.momentum):
        yield "local.nesterov", "needs optimizer sgd with a momentum above 0."


def _methods(config: Config, *stacks: str) -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of every method in `stacks`."""
    for stack in stacks:
        for i, method in enumerate(getattr(config, stack)):
            yield f"{stack}.{i}", method.name, method


def _check_twice(config: Config) -> Found:
    for stack in STACKS:
        names = [name for _, name, _ in _methods(config, stack)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield stack, f"'{name}' is listed {names.count(name)} times; a stack can have it once."


_ONE: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    *(("client", partial(overrides, hook=hook), f"own the hook '{hook}'; a stack can have one") for hook in EXCLUSIVE),
    ("client", lambda m: m.downlink_rule(), "decide what clients are sent; a stack can have one"),
    ("weighting", lambda m: m.stage == "rescale", "rescale the mixture; a run can have one"),
    ("weighting", lambda m: m.combines, "combine the clients' models; a run can have one that does"),
)
"""Of a stack, what one of its methods at most can do."""

_APART: tuple[tuple[Callable[[Any], object], Callable[[Any], object], str], ...] = (
    (
        lambda m: m.needs.peers, lambda m: m.personal_layers,
        "sends clients each other's models, but {!r} keeps part of its model private",
    ),
    (
        lambda m: m.needs.peers == "whole", lambda m: m.needs.global_model,
        "sends clients one another's models, and not the global one that {!r} reads",
    ),
)  # fmt: skip
"""What two client methods cannot do together."""


def _check_together(config: Config) -> Found:
    for stack, does, what in _ONE:
        names = [name for _, name, method in _methods(config, stack) if does(method)]
        if len(set(names)) > 1:
            yield stack, f"{' and '.join(map(repr, names))} both {what}."
    for one, other, what in _APART:
        names, others = ([name for _, name, m in _methods(config, "client") if does(m)] for does in (one, other))
        if names and others:
            yield "client", f"{names[0]!r} {what.format(others[0])}."


def _check_download(config: Config) -> Found:
    senders = [name for _, name, method in _methods(config, "client") if method.downlink_rule() or method.needs.peers]
    if config.download and senders:
        yield "download", f"encodes one model for all clients, but {senders[0]} sends each of them others."


def _check_selection(config: Config) -> Found:
    selection = config.rounds.selection
    path = f"rounds.selection.{selection.name}"
    if problem := selection.check(facts_of(config)):
        yield path, problem
    if selection.needs_clock and not config.clock.runs:
        yield path, "needs to know how long clients take. Set a speed, a bandwidth or a latency under clock."
    loses = "clients come and go" if config.clock.comes_and_goes else "loses clients"
    if config.clock.loses and not config.clock.runs:
        yield "clock", f"{loses}, but nothing takes time. Set a speed, a bandwidth or a latency."
    waits = [
        name for _, name, method in _methods(config, "weighting") if method.stage == "select" and not method.plans_early
    ]
    if config.clock.loses and waits:
        yield "clock", f"{loses}, but {waits[0]} needs all of them before it knows what they send."
    if not selection.asynchronous:
        return
    if config.clock.loses:
        yield "clock", f"{loses}, but {selection.name} has no round that could do without some."
    if config.download:
        yield "download", f"is encoded once a round, but {selection.name} lets clients train from older models."
    for stack, refused, why in _ASYNCHRONOUS:
        for where, name, method in _methods(config, stack):
            if refused(method):
                yield f"{where}.{name}", f"{why}; with {selection.name} they begin at different ones."
    for instrument in config.record.instruments:
        if instrument.reads_models:
            yield (
                "record.instruments",
                f"{instrument.name} compares models; with {selection.name} they begin at different ones.",
            )


_ASYNCHRONOUS: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    (
        "client",
        lambda m: m.needs.peers or m.downlink_rule(),
        "sends each client another model, made from those of one round",
    ),
    (
        "client",
        lambda m: m.averages_more or any(step.compares_models for step in m.server_steps()),
        "corrects clients that began at one model",
    ),
    ("client", lambda m: m.starts_everyone(), "lets clients start that are not asked"),
    ("weighting", lambda m: m.compares_models, "compares or chooses among clients that began at one model"),
    ("server", lambda m: m.compares_models, "compares models that began at one"),
)
"""What takes for granted that all clients of a round begin at one model."""


def _check_order(config: Config) -> Found:
    refined = None
    for path, name, step in _methods(config, "server"):
        if step.remembers and refined:
            yield path, f"{name} remembers updates, which {refined} before it has changed. List {name} first."
        refined = name if step.refines else refined


def _check_proxy(config: Config) -> Found:
    for path, name, method in _methods(config, "weighting", "server"):
        if method.needs.proxy and not config.data.proxy.samples:
            yield path, f"{name} learns on proxy data, but data.proxy.samples is 0."


def _check_evaluation(config: Config) -> Found:
    data = config.data
    natural = isinstance(data.partition, Natural)  # its clients may bring tests of their own
    if config.evaluate.personal and not (data.client_test_frac or data.partition.test_frac or natural):
        message = f"{config.evaluate.personal} needs client tests, but data.client_test_frac is 0. The papers use 0.25."
        yield "evaluate.personal", message
    if config.evaluate.clients and config.evaluate.personal != "after_init":
        yield "evaluate.clients", "is how many clients evaluate.personal: after_init tests, which is not set."
    if 0 < (config.clients or 0) < (config.evaluate.clients or 0):
        yield "evaluate.clients", f"is {config.evaluate.clients}, but there are {config.clients}. null tests all."


def _check_record(config: Config) -> Found:
    if config.record.traces != "rounds":
        for t in config.record.traces:
            if t > config.rounds.total:
                yield "record.traces", f"there is no round {t}; rounds are 1 to {config.rounds.total}."


def _check_sinks(config: Config) -> Found:
    names = [name_in(REGISTRY.table("sink"), sink) for sink in config.record.sinks]
    for i, (name, sink) in enumerate(zip(names, config.record.sinks, strict=True)):
        if name in names[:i]:
            yield f"record.sinks.{i}", f"'{name}' is listed twice; a run can have it once."
        if sink.of_ray and not config.engine.ray:
            yield f"record.sinks.{i}", f"{name} is of a Ray cluster, which this engine does not have. Set engine: ray."


def _check_instruments(config: Config) -> Found:
    known, facts = REGISTRY.table("instrument"), facts_of(config)
    names = [name_in(known, instrument) for instrument in config.record.instruments]
    for i, (name, instrument) in enumerate(zip(names, config.record.instruments, strict=True)):
        if name in names[:i]:
            yield f"record.instruments.{i}", f"'{name}' is listed twice; a run can have it once."
        if problem := instrument.check(facts):
            yield f"record.instruments.{i}.{name}", problem
        if config.engine.fast_math and any(probe.watches_batches for probe in instrument.probes):
            message = "sees the gradient of each step, which engine.fast_math does not make as a whole. Leave one of them out."
            yield f"record.instruments.{i}.{name}", message


def _check_tape(config: Config) -> Found:
    engine, name = config.engine, name_in(REGISTRY.table("engine"), config.engine)
    conflicts = {
        f"engine.{name}.tape": engine.tape == "never",
        f"engine.{name}.batch_clients": engine.batch_clients > 1,
        "local.precision": config.local.precision == "fp16",
    }
    for option in (option for option in ("cuda_graphs", "fast_math") if getattr(engine, option)):
        for path in (path for path, met in conflicts.items() if met):
            yield path, f"leaves no recorded steps, and {option} changes only those. Leave one of them out."


def _check_methods(config: Config) -> Found:
    """What a method itself says of its fields and of the run around it."""
    facts = facts_of(config)
    for path, name, method in _methods(config, *STACKS):
        if problem := method.check(facts):
            yield f"{path}.{name}", problem


def facts_of(config: Config) -> RunFacts:
    """What methods and instruments may know of the run."""
    local = config.local
    return RunFacts(
        rounds=config.rounds.total,
        participation=config.rounds.participation,
        clients=config.clients,
        client_val_frac=config.data.client_val_frac,
        proxy_samples=config.data.proxy.samples,
        lr=local.lr,
        optimizer=OptimizerSpec(local.optimizer, local.momentum, local.nesterov, local.weight_decay, local.betas),
        persist=local.state == "persist",
        selection=config.rounds.selection,
        **{stack: getattr(config, stack) for stack in STACKS},
    )


_CHECKS = (
    _check_cohort, _check_min_clients, _check_until, _check_data, _check_written, _check_task, _check_model,
    _check_model_settings, _check_optimizer, _check_twice, _check_together, _check_download, _check_selection, _check_order,
    _check_proxy, _check_evaluation, _check_record, _check_sinks, _check_instruments, _check_tape, _check_methods,
)  # fmt: skip


def check(config: Config, faults: Faults | None = None) -> None:
    """Apply the rules between settings, each of which can be read; raises `ConfigError` with every fault."""
    faults = faults or Faults("configuration")
    for path, message in itertools.chain.from_iterable(check(config) for check in _CHECKS):
        faults.add(path, message)
    faults.report()
