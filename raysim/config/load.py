"""Reading a configuration: YAML, `--set`, presets, and all faults at once, before anything is started or read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import yaml

from raysim.config.build import build, canonical, read_fields
from raysim.config.fields import STACKS, catalogue_of, fields_of, is_section
from raysim.config.messages import Faults, match, nearest, show
from raysim.config.presets import PRESETS
from raysim.config.rules import check
from raysim.config.schema import Config
from raysim.errors import ConfigError
from raysim.paths import LONGEST, command, slug
from raysim.registry import REGISTRY, Catalogue
from raysim.store.documents import LEVELS, DamagedFile, parse_yaml, read_yaml

Override = str | tuple[str, Any]
"""A change of a configuration: `path=value` as in a shell, or a path and a value from Python."""


def load(path: str | Path, overrides: Sequence[Override] = (), beside: Collection[str] = ("table",)) -> Config:
    """Read a YAML file, apply `overrides`, and check the whole; raises `ConfigError` with every fault.

    Top-level keys in `beside` are left to others: `table` is what `raysim reproduce` makes of the file.
    """
    return loader(path, beside)(overrides=overrides)


def loader(path: str | Path, beside: Collection[str] = ("table",)) -> Callable[..., Config]:
    """`load` of a file that is read now, for any number of `overrides`."""
    raw = {key: value for key, value in _read(Path(path)).items() if key not in beside}
    if "methods" in raw:
        way = f"{command('sweep', path, '--out', 'DIR')} runs and compares them"
        raise ConfigError(f"{path}: methods: lists several, but one run is asked for. {way}.")
    return partial(from_dict, {"name": slug(Path(path).stem)} | raw, str(path))


def read_entry(catalogue: Catalogue, name: str, overrides: Sequence[str] = ()) -> Any:
    """One entry of a catalogue, with `field=value` for its fields; raises `ConfigError` with every fault."""
    faults = Faults("")
    fields: dict[str, Any] = {}
    for text in overrides:
        try:
            fields = _override(fields, *_parsed(text))
        except _OverrideFault as fault:
            faults.add(f"--set {text[:200]}", str(fault))
    entry = build(Annotated[Any, catalogue], {name: fields}, catalogue.role, faults)
    faults.report()
    return entry


def from_dict(raw: Mapping[str, Any], source: str = "configuration", overrides: Sequence[Override] = ()) -> Config:
    """Build and check a configuration from nested mappings over its preset, changed by `overrides`; `source` names it in
    the faults. What its settings have wrong together is looked for once each can be read."""
    wrong, changed, raw = [], {}, _renamed(canonical(Config, dict(raw)))
    for change in overrides:
        written = change[:200] if isinstance(change, str) else change[0]
        try:
            path, value = _parsed(change) if isinstance(change, str) else change
            if path in ("data", "model") and isinstance(value, str):
                path += ".name"  # the section's other settings stay
            raw = _renamed(_override(canonical(Config, raw), path, value))
            changed[path] = written
        except _OverrideFault as fault:
            wrong.append(f"{written}: {fault}")
    faults = Faults(source, changed)
    faults.lines += wrong
    preset = raw.get("preset", "raysim")
    known = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    if isinstance(preset, str) and preset not in PRESETS:
        faults.add("preset", f"there is no preset {preset!r}.{nearest(preset, PRESETS)}")
    values = read_fields(Config, _over_preset(known, canonical(Config, raw)), "", faults)
    faults.report()
    config = Config(**values)
    check(config, faults)
    return config


def _renamed(raw: dict[str, Any]) -> dict[str, Any]:
    """Canonical `raw` with the names of today for keys of the last release."""
    record = raw.get("record")
    if not isinstance(record, dict) or "trace" not in record:
        return raw
    before = record["trace"]
    now = [t + 1 if type(t) is int else t for t in before] if isinstance(before, list | tuple) else before
    if now:
        note = f"record.trace is now record.traces, where rounds count from 1: write record.traces={now} for {before}"
        warnings.warn(note, FutureWarning, stacklevel=2)
    return raw | {"record": {key: value for key, value in record.items() if key != "trace"} | {"traces": now}}


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = read_yaml(path)
    except FileNotFoundError:
        near = match(path.name, (p.name for p in path.parent.glob("*.y*ml")))
        raise ConfigError(f"{path}: no such file.{f' Did you mean {path.parent / near}?' if near else ''}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except DamagedFile as error:
        raise ConfigError(str(error)) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold the sections {', '.join(fields_of(Config))}, but holds {show(raw)}.")
    return raw


class _OverrideFault(Exception):
    pass


def _parsed(text: str) -> tuple[str, Any]:
    """The path and the value of `path=value`."""
    path, equals, value = text.partition("=")
    if text.startswith("-"):
        raise _OverrideFault(f"there is no such option; a setting is written {path.lstrip('-')}={value or 'VALUE'}.")
    if not equals or not path:
        raise _OverrideFault("write it as path=value, for instance rounds.total=5.")
    try:
        return path, parse_yaml(value)
    except yaml.YAMLError:
        raise _OverrideFault(f"{value[:60]!r} is not valid YAML.") from None


def _override(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Set a value in a canonical mapping; segments of its path are keys, method names and list indices."""
    keys, node = path.split("."), copy.deepcopy(raw)
    if len(keys) > LEVELS or any(len(key) > LONGEST for key in keys):
        raise _OverrideFault(f"a path has at most {LEVELS} parts of {LONGEST} characters each.")
    raw = node
    for depth, key in enumerate(keys):
        here, last = ".".join(keys[:depth]), depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) > len(node):
                raise _OverrideFault(_place_in(here, node, keys[depth:], value))
            if int(key) == len(node):
                node.append(None)
            key = int(key)
        elif not isinstance(node, dict):
            raise _OverrideFault(f"{here} is {show(node)}, which has no {key!r} in it.")
        if last:
            node[key] = _kept(node[key], value) if path == "data.partition" and key in node else value
        elif isinstance(node, list) or node.get(key) is not None:
            node[key] = {} if node[key] is None else node[key]
        else:
            node[key] = [] if keys[depth + 1] == "0" or ".".join(keys[: depth + 1]) in STACKS else {}
        node = node[key]
    return raw


def _place_in(stack: str, entries: Sequence[Any], keys: Sequence[str], value: Any) -> str:
    """What to write where `keys` do not begin with a place in the list `stack`: a method's name, or one of its fields."""
    fault = f"{stack} is a list of {len(entries)}; {keys[0]!r} is not a place in it."
    known = STACKS[stack].entries if stack in STACKS else {}
    named = [next(iter(entry)) for entry in entries if isinstance(entry, dict)]
    if keys[0] in known:
        inner = ".".join(keys)
        wanted = {keys[0]: dict([(keys[1], value)] if len(keys) == 2 else [])}
        ways = [f"{stack}.{i}.{inner}={show(value)}" for i, name in enumerate(named) if name == keys[0]]
    else:
        having = [name for name in known if keys[0] in fields_of(known[name])]
        chosen = [(i, name) for i, name in enumerate(named) if name in known]
        ways = [f"{stack}.{i}.{name}.{keys[0]}={show(value)}" for i, name in chosen if name in having]
        wanted = {having[0]: {keys[0]: value}} if having else {}
        if chosen and not ways:
            fault += "".join(f" {name} takes {', '.join(fields_of(known[name])) or 'no fields'}." for _, name in chosen)
            ways = [f"{stack}.{i}.{name}.FIELD={show(value)}" for i, name in chosen if fields_of(known[name])]
        elif len(having) > 1 and not ways:
            fault += f" {', '.join(having)} have it."
    if not ways and wanted:
        ways = [f"{stack}='[{show(wanted)}]'"]
    return f"{fault} Write {' or '.join(ways)}." if ways else fault


def _kept(before: Any, name: Any) -> Any:
    """Another partition, by its bare `name`, with what `before` says and it can take, such as `clients`; but not what its
    data decide where nothing is set."""
    entries = REGISTRY.table("partition")
    if not isinstance(name, str) or name not in entries or not isinstance(before, dict) or len(before) != 1:
        return name
    ((_, settings),) = before.items()
    needed = {key for key, (field, _) in fields_of(entries[name]).items() if field.default is not None}
    return {
        name: {key: settings[key] for key in sorted(needed & settings.keys())} if isinstance(settings, dict) else {}
    }


def _over_preset(preset: Mapping[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Canonical `raw` over a preset's sections, those that go with the run's model and methods, and its fields of
    methods."""
    preset = dict(preset)
    fields, beside = preset.pop("fields", {}), preset.pop("with", {})

    def methods(config: dict[str, Any]) -> list[dict[str, Any]]:
        stacks = [config.get(stack) for stack in STACKS]
        entries = [entry for stack in stacks if isinstance(stack, list) for entry in stack]
        return [entry for entry in entries if isinstance(entry, dict) and len(entry) == 1]

    base = canonical(Config, preset)
    whole = _merge(Config, base, raw)
    model = whole.get("model")
    named = [model.get("name")] if isinstance(model, dict) else []
    for name in named + [next(iter(entry)) for entry in methods(whole)]:
        if isinstance(name, str):
            base = _merge(Config, base, canonical(Config, beside.get(name, {})))
    merged: dict[str, Any] = _merge(Config, base, raw)
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
    merged: dict[str, Any] = base | {key: _merge(hints.get(key), base.get(key), value) for key, value in over.items()}
    return merged
