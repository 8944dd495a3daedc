"""From mappings to frozen dataclasses and back, by the annotations of their fields.

A section is a dataclass. An entry of a catalogue is written `name`, `{name: {field: value}}`, or `{name: value}` for its
first field; in canonical form it is `{name: {field: value}}`. Whatever may be written may also be an object that has
been made in Python. pydantic reads single values; the walk from section to section is our own, because a value with a
fault must not hide faults in other values.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from types import NoneType
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from raysim.config.fields import STACKS, catalogue_of, fields_of, is_section, stack_of
from raysim.config.messages import Faults, as_json, describe, match, nearest, show, words_of
from raysim.core.bounds import GREATEST_FLOAT, GREATEST_INT
from raysim.registry import Catalogue, name_in


def canonical(annotation: Any, raw: Any) -> Any:
    """`raw` with objects written out and every catalogue entry as {name: {field: value}}; what is malformed stays."""
    if catalogue := catalogue_of(annotation):
        return _canonical_entry(catalogue, raw)
    if entry := stack_of(annotation):
        alone = isinstance(raw, str | dict | type) or is_section(type(raw))  # one entry may stand without its brackets
        many = [raw] if alone else raw
        return [canonical(entry, one) for one in many] if isinstance(many, list | tuple) else many
    if is_section(annotation):
        if isinstance(raw, annotation):
            raw = {key: getattr(raw, f.name) for key, (f, _) in fields_of(annotation).items()}
        fields = fields_of(annotation)
        if isinstance(raw, str) and "name" in fields:
            raw = {"name": raw}
        if isinstance(raw, dict):
            return {key: canonical(fields[key][1], value) if key in fields else value for key, value in raw.items()}
    return raw


def _canonical_entry(catalogue: Catalogue, raw: Any) -> Any:
    if isinstance(raw, int | float) and catalogue.number and not isinstance(raw, bool):
        raw = {catalogue.number: raw}
    if isinstance(raw, str):
        return {raw: {}}
    if type(raw) in catalogue.entries.values():
        return {name_in(catalogue.entries, raw): canonical(type(raw), raw)}
    if isinstance(raw, dict) and len(raw) == 1:
        ((name, values),) = raw.items()
        if values is None:
            return {name: {}}
        cls = catalogue.entries.get(name)
        first = next(iter(fields_of(cls)), None) if cls else None
        if first and not isinstance(values, dict | cls):
            values = {first: values}
        if cls:
            return {name: canonical(cls, values)}
    return raw


def build(annotation: Any, raw: Any, path: str, faults: Faults) -> Any:
    """The value that `annotation` describes, from canonical `raw`; None where it has faults."""
    if catalogue := catalogue_of(annotation):
        return _build_entry(catalogue, raw, path, faults)
    if entry := stack_of(annotation):
        if isinstance(raw, list):
            return tuple(build(entry, one, f"{path}.{i}", faults) for i, one in enumerate(raw))
        faults.add(path, f"must be a list, each {describe(entry)}, but is {show(raw)}.")
        return None
    if is_section(annotation):
        return _build_section(annotation, raw, path, faults)
    try:
        return _read_value(annotation, raw)
    except ValueError as error:
        near = nearest(raw, words_of(annotation), listed=False)
        limit = "" if isinstance(error, ValidationError) else f" {error}"
        percent = isinstance(raw, int | float) and 1 < raw <= 100 and "< " in describe(annotation)
        if percent and _reads(annotation, raw / 100):
            near = f" It is a fraction: {raw / 100:g}."
        faults.add(path, f"must be {describe(annotation)}{limit}, but is {show(raw)}.{near}")
        return None


def _build_entry(catalogue: Catalogue, raw: Any, path: str, faults: Faults) -> Any:
    if isinstance(raw, type):
        faults.add(path, f"{raw.__name__} is a class. Give an object of it: {raw.__name__}(...).")
        return None
    if is_section(type(raw)):
        others = (stack for stack, one in STACKS.items() if one.entries is not catalogue.entries)
        home = next((stack for stack in others if STACKS[stack].entries.kind == getattr(raw, "role", None)), None)
        way = f"It belongs under '{home}'." if home else "raysim.registry gives it a name."
        faults.add(path, f"{type(raw).__name__} is not registered as {catalogue}. {way}")
        return None
    if not isinstance(raw, dict) or len(raw) != 1:
        message = f"must be the name of {catalogue}, or {{name: {{field: value}}}}, but is {show(raw)}."
        if isinstance(raw, dict) and len(raw) > 1:
            several = all(isinstance(values, dict) for values in raw.values())
            name = next((name for name in raw if name in catalogue.entries), "NAME")
            deeper = [f"{path}.{name}.{key}={show(value)}" for key, value in raw.items() if key != name]
            message += f" {path}=NAME replaces it." if several else f" Fields go one level deeper: {', '.join(deeper)}."
        faults.add(path, message)
        return None
    ((name, values),) = raw.items()
    if name in catalogue.entries:
        return build(catalogue.entries[name], values, f"{path}.{name}", faults)
    home = next((stack for stack in STACKS if name in STACKS[stack].entries), None)
    ending = str(name).rpartition(".")[2]  # of a file
    meant = f" Did you mean {{{ending}: {name}}}?" if ending in catalogue.entries and ending != name else ""
    hint = f" It belongs under '{home}'." if home else meant or f"{nearest(name, catalogue.entries)}{catalogue.hint}"
    faults.add(path, f"there is no {catalogue.role} {show(name)}.{hint}")
    return None


def _build_section(cls: type, raw: Any, path: str, faults: Faults) -> Any:
    before = len(faults.lines)
    values = read_fields(cls, raw, path, faults)
    if len(faults.lines) == before:
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:  # a rule of the dataclass's own, in __post_init__
            faults.add(path, f"{error}".removeprefix(f"{path.rpartition('.')[2]}: "))
    return None


def read_fields(cls: type, raw: Any, path: str, faults: Faults) -> dict[str, Any]:
    """Field → value of canonical `raw`; not all of them where there are faults."""
    fields = fields_of(cls)
    takes = f"It takes {', '.join(fields)}." if fields else "It takes no fields."
    if "__dataclass_fields__" not in vars(cls):  # they are those of a base class
        takes += (
            f" For those of {cls.__name__} itself, write @dataclass(frozen=True) above the class, below its decorator."
        )
    inside = f"{path}." if path else ""
    if not isinstance(raw, dict):
        first = next(iter(fields), None)
        meant = first is not None and not is_section(fields[first][1]) and _reads(fields[first][1], raw)
        way = f"Did you mean {inside}{first}={show(raw)}?" if meant else takes
        faults.add(path, f"must be a mapping of fields, but is {show(raw)}. {way}")
        return {}
    for key in raw:
        if key not in fields:
            near = _elsewhere(cls, raw, key) or nearest(key, fields, listed=False)
            if ":" in str(key):  # {a:1} is one word to YAML
                near = " A space is missing after its colon."
            faults.add(f"{inside}{str(key)[:60]}", f"unknown field (set to {show(raw[key])}).{near} {takes}")
    misspelt = {match(key, fields) for key in raw if key not in fields}
    values: dict[str, Any] = {}
    for key, (f, hint) in fields.items():
        if key in raw:
            values[f.name] = build(hint, raw[key], f"{inside}{key}", faults)
        elif f.default is not MISSING:
            values[f.name] = f.default
        elif f.default_factory is not MISSING:
            values[f.name] = f.default_factory()
        elif key not in misspelt:
            faults.add(f"{inside}{key}", f"is missing; it must be {describe(hint)}.")
    return values


def _elsewhere(cls: type, raw: dict[str, Any], key: str) -> str:
    """A question for the deeper settings of that very name, such as `local.lr` for `lr`; empty where there is none."""
    found = [repr(path) for path in _places(cls, raw, key) if path != key] or [
        repr(f"engine.{name}.{key}") for name, engine in _engines(cls).items() if key in fields_of(engine)
    ]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _engines(cls: type) -> Mapping[str, type]:
    """The engines of a configuration: what a run does not use of them is looked for as well."""
    catalogue = catalogue_of(fields_of(cls)["engine"][1]) if "engine" in fields_of(cls) else None
    return catalogue.entries if catalogue else {}


def _places(annotation: Any, raw: Any, key: str) -> Iterator[str]:
    """Paths to the settings `key` in a section and below it, and in the entries that canonical `raw` names there."""
    if stack_of(annotation):
        held = raw if isinstance(raw, list) else []
        inner = {str(i): (stack_of(annotation), one) for i, one in enumerate(held)}
    elif catalogue := catalogue_of(annotation):
        named = raw if isinstance(raw, dict) else {}
        inner = {name: (catalogue.entries[name], value) for name, value in named.items() if name in catalogue.entries}
    elif is_section(annotation):
        given = raw if isinstance(raw, dict) else {}
        inner = {name: (hint, given.get(name)) for name, (_, hint) in fields_of(annotation).items()}
        yield from [key] if key in inner else []
    else:
        return
    for name, (hint, value) in inner.items():
        yield from (f"{name}.{path}" for path in _places(hint, value, key))


_EXPONENT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+")


def _exponents(raw: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text, for want of a point and a sign."""
    if isinstance(raw, dict):
        return {key: _exponents(value) for key, value in raw.items()}
    if isinstance(raw, list | tuple):
        return [_exponents(value) for value in raw]
    return float(raw) if isinstance(raw, str) and _EXPONENT.fullmatch(raw) else raw


def _read_value(annotation: Any, raw: Any) -> Any:
    adapter = _adapter(annotation)
    if Any in get_args(annotation):  # which takes text as well
        raw = _exponents(raw)
    try:
        value = adapter.validate_json(as_json(raw))
    except ValidationError:
        value = adapter.validate_json(as_json(_exponents(raw)))  # only where text did not do
    for number in _numbers(value):
        if isinstance(number, int) and abs(number) > GREATEST_INT:
            raise ValueError("(whole numbers lie within ±2^63)")
        if not abs(number) <= GREATEST_FLOAT:  # also what is no number
            raise ValueError("(numbers lie within ±1e+18)")
    return value


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a value of lists and mappings."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)


def _reads(annotation: Any, raw: Any) -> bool:
    """Whether `raw` is a value, or names an entry, of this annotation."""
    if catalogue := catalogue_of(annotation):
        return isinstance(raw, str) and raw in catalogue.entries
    try:
        _read_value(annotation, raw)
    except ValueError:
        return False
    return True


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    # Strict, and read as JSON: a list is a tuple there, yet '10', 10.0 and true are not the whole number 10 or 1.
    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


def plain(annotation: Any, value: Any) -> Any:
    """A built value as nested mappings and lists, every default written out."""
    if type(value) in (str, int, float, bool, NoneType):
        return value
    if catalogue := catalogue_of(annotation):
        return {name_in(catalogue.entries, value): plain(type(value), value)}
    if entry := stack_of(annotation):
        return [plain(entry, one) for one in value]
    if is_section(annotation):
        return {key: plain(hint, getattr(value, f.name)) for key, (f, hint) in fields_of(annotation).items()}
    return json.loads(as_json(value))
