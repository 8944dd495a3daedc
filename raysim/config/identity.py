"""Which run a configuration describes: written out, hashed, and compared with what a run began with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, get_args

import yaml

from raysim.config.build import plain
from raysim.config.fields import STACKS, catalogue_of, fields_of, is_section, stack_of
from raysim.config.schema import Config
from raysim.core.rates import SCHEDULES
from raysim.errors import ConfigError
from raysim.registry import REGISTRY, Table, name_in
from raysim.store.manifest import DamagedManifest, lost, read_manifest

_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # of compiled code where PyYAML has it: a fifth of the time
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration, every default written out, as nested mappings and lists that `from_dict` reads."""
    written: dict[str, Any] = plain(Config, config)
    return written


def to_yaml(config: Config) -> str:
    """The resolved configuration as a YAML file."""
    return str(yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def to_annotated_yaml(config: Config) -> str:
    """`to_yaml`, in which a comment gives raysim's default wherever the value is another."""
    lines = to_yaml(config).splitlines()
    for line, default in _unusual(Config, config, MISSING, yaml.compose("\n".join(lines), Loader=_Loader)):
        lines[line] += f"  # default: {json.dumps(default)}"
    return "\n".join(lines)


def _unusual(annotation: Any, value: Any, default: Any, node: Any) -> Iterator[tuple[int, Any]]:
    """Line and default of every setting in `value`, written as the YAML `node`, that is not the default."""
    if catalogue_of(annotation):
        annotation, node = type(value), node.value[0][1]
    if entry := stack_of(annotation):
        for made, written in zip(value, node.value, strict=True):
            yield from _unusual(entry, made, MISSING, written)
    elif is_section(annotation):
        places = {key.value: (key.start_mark.line, written) for key, written in node.value}
        for name, (field, hint) in fields_of(annotation).items():
            made, usual = getattr(value, field.name), _usual(field, default, annotation)
            line, written = places[name]
            if isinstance(written, yaml.ScalarNode):
                line = written.end_mark.line  # a long text goes on below its key
            if usual is not MISSING and (shown := _unlike(hint, made, usual)) is not None:
                yield line, shown[0]
            yield from _unusual(hint, made, usual, written)


def _unlike(hint: Any, made: Any, usual: Any) -> tuple[Any] | None:
    """The default, where a value is another; None where it is the same, or where its own fields say it."""
    if is_section(hint):
        return None
    if catalogue := catalogue_of(hint):
        return None if type(made) is type(usual) else (name_in(catalogue.entries, usual),)
    plainly = plain(hint, usual)
    return None if plain(hint, made) == plainly else (plainly,)


def _usual(field: Field[Any], owner: Any, cls: type) -> Any:
    """The default of a field of `cls`: what the section `owner`, itself a default, has; MISSING where there is none."""
    if isinstance(owner, cls):
        return getattr(owner, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def entries_of(config: Config) -> list[tuple[str, str]]:
    """Kinds and names of all that the configuration takes from the registry."""
    named = [("model", config.model.name), *(("metric", name) for name in config.evaluate.metrics)]
    named += [("task", config.data.task)] if config.data.task else []
    return [*_entries(Config, config), *named]


def _entries(annotation: Any, value: Any) -> Iterator[tuple[str, str]]:
    if catalogue := catalogue_of(annotation):
        if isinstance(catalogue.entries, Table):
            yield catalogue.entries.kind, name_in(catalogue.entries, value)
        annotation = type(value)
    if entry := stack_of(annotation):
        for one in value:
            yield from _entries(entry, one)
    elif is_section(annotation):
        for field, hint in fields_of(annotation).values():
            yield from _entries(hint, getattr(value, field.name))


def remember(config: Config) -> Config:
    """The configuration itself, which from now on knows the objects that its names stand for."""
    named = [(kind, name) for kind, name in entries_of(config) if name in REGISTRY.table(kind).given]
    object.__setattr__(config, "objects", tuple((kind, name, REGISTRY.table(kind)[name]) for kind, name in named))
    return config


def recall(config: Config) -> None:
    """Give the names in a configuration back to its objects, where others have got them."""
    for kind, name, entry in config.objects:
        if REGISTRY.table(kind)[name] is not entry:
            REGISTRY.table(kind)[name] = entry


def fingerprint(config: Config) -> str:
    """SHA-256 of the resolved configuration, independent of the order in which it was written."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()


def differences(one: Config, other: Config) -> list[str]:
    """Paths of the settings in which two configurations differ."""
    return list(_differing(to_dict(one), to_dict(other), ""))


def _differing(one: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _differing(one[key], other[key], f"{path}.{key}" if path else key)
    elif one != other:
        yield path


READ = {"rounds.total": "total_rounds", "engine.gather_bytes": "gather_bytes"}
"""Settings on which bits depend only with methods that say so, and which of their `Needs` says so."""


def readers(config: Config, setting: str) -> list[str]:
    """Names of the methods and schedules whose arithmetic depends on a setting of `READ`, as they declare."""
    need = READ[setting]
    methods = [method.name for stack in STACKS for method in getattr(config, stack) if getattr(method.needs, need)]
    schedules = {name for kind, name in entries_of(config) if kind == "schedule"}
    return methods + sorted(name for name in schedules if getattr(SCHEDULES[name], need, False))


def decisive(config: Config) -> dict[str, Any]:
    """The settings on which a run's bits depend, as JSON. Left out are its name, where it runs, how long, and what is
    observed, but for what one of its methods reads."""
    plain: dict[str, Any] = json.loads(json.dumps(to_dict(config)))
    for section in ("preset", "name", "engine", "evaluate", "record"):
        del plain[section]
    for key in ("root", "storage", "stream_bytes", "cache"):
        del plain["data"][key]
    for key in ("total", "until", "evaluate_every", "checkpoint_every", "on_client_failure"):
        del plain["rounds"][key]  # which says when to test, to save, to stop
    if not config.clock.loses:  # with fewer such a run stops, and may go on with fewer
        del plain["rounds"]["min_clients"]
    # Sums inside an operation follow its threads, and the models that it works on; `fast_math` is about recorded steps.
    bits = ("threads", "batch_clients", "fast_math", *["tape"] * config.engine.fast_math)
    plain["engine"] = {key: getattr(config.engine, key) for key in bits}
    if readers(config, "rounds.total"):
        plain["rounds"]["total"] = config.rounds.total
    if readers(config, "engine.gather_bytes"):
        plain["engine"]["gather_bytes"] = config.engine.gather_bytes
    return plain


def _default(section: str, key: str) -> Any:
    """Of a field of a section of the configuration, as JSON; None where it has none."""
    _, annotation = fields_of(Config)[section]
    annotation = get_args(annotation)[0] if catalogue_of(annotation) else annotation
    field, hint = fields_of(annotation).get(key, (None, None)) if is_section(annotation) else (None, None)
    return None if field is None or field.default is MISSING else plain(hint, field.default)


def check_unchanged(config: Config, folder: Path) -> None:
    """Raises `ConfigError` where the run in `folder` began with settings that make other bits, or does not say."""
    faults = []
    try:
        settings = read_manifest(folder).get("settings")
    except DamagedManifest as error:
        raise ConfigError(str(error)) from None
    if not isinstance(settings, dict):
        if not (folder / "manifest.json").exists() and not any((folder / "checkpoints").glob("*.json")):
            return  # stopped before it was described, and so before its first round
        raise ConfigError(lost(folder))
    for section, now in decisive(config).items():
        was = settings.get(section, now)
        both = isinstance(was, dict) and isinstance(now, dict)
        if both:  # a setting that raysim did not have then had what is its default now
            pairs = {f"{section}.{key}": (was.get(key, _default(section, key)), now[key]) for key in now}
        else:
            pairs = {section: (was, now)}
        changed = {key: before for key, (before, after) in pairs.items() if before != after}
        for key, before in changed.items():
            who = " and ".join(readers(config, key)) if key in READ else ""
            why = f", and {who} computes with it" if who else ""
            faults.append(f"{key} was {json.dumps(before)} when the run began{why}")
    saved = (re.fullmatch(r"round-(\d+)", file.stem) for file in (folder / "checkpoints").glob("round-*.json"))
    done = max((int(name[1]) for name in saved if name), default=0)
    if done > config.rounds.total:
        faults.append(f"rounds.total is {config.rounds.total}, but {done} rounds are done")
    if faults:
        where = folder / "config.yaml"
        raise ConfigError([f"{where}: {fault}. Put it back, or start another run." for fault in faults])
