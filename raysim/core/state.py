"""Typed state as flat tensors, so that it can travel and be saved without pickling.

A name is the path of keys joined by '/', each key escaped in the way of JSON Pointer; then ':scalar' marks a Python
number and ':empty' a dict or dataclass that has no entries.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from raysim.lazy import Tensor, torch

_SCALARS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}
_Path = tuple[str, ...]


def pack(obj: Any) -> dict[str, Tensor]:
    """Flatten nested dataclasses and dicts (string keys) of tensors, bools, ints and floats. None is left out.

    Tensors are not copied.
    Raises TypeError for anything else and ValueError for an int beyond 64 bits, naming the place.
    """
    return dict(_flatten(obj, ()))


def unpack(kind: Any, flat: Mapping[str, Tensor]) -> Any:
    """What `pack` flattened, as `kind`: a dataclass, an annotation such as dict[str, State], or None for nested dicts.

    A field that was None comes back as None, a dict entry that was None does not come back. Raises ValueError, naming
    the field, if one is unknown, missing or of another type.
    """
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        path, _, mark = name.partition(":")
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(_unescape(key), {})
        node[_unescape(last)] = {} if mark == "empty" else tensor.item() if mark == "scalar" else tensor
    return tree if kind is None else _typed(kind, tree, ())


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1").replace(":", "~2")


def _unescape(key: str) -> str:
    return key.replace("~2", ":").replace("~1", "/").replace("~0", "~")


def _names(dataclass: Any) -> list[str]:
    return [field.name for field in fields(dataclass)]


def _join(path: _Path) -> str:
    return "/".join(map(_escape, path))


def _flatten(value: Any, path: _Path) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, torch.Tensor):
        yield _join(path), value
    elif type(value) in _SCALARS:
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise ValueError(f"cannot pack {_join(path)}: {value} does not fit 64 bits")
        yield f"{_join(path)}:scalar", torch.tensor(value, dtype=getattr(torch, _SCALARS[type(value)]))
    elif isinstance(value, dict) or (is_dataclass(value) and not isinstance(value, type)):
        entries = value if isinstance(value, dict) else {name: getattr(value, name) for name in _names(value)}
        if path and all(entry is None for entry in entries.values()):
            yield f"{_join(path)}:empty", torch.empty(0)
        for key, entry in entries.items():
            if not isinstance(key, str):
                raise TypeError(f"cannot pack {_join(path)}: key {key!r} is not a string")
            if entry is not None:
                yield from _flatten(entry, (*path, key))
    else:
        kind = type(value).__name__
        raise TypeError(f"cannot pack {_join(path)}: {kind} is no tensor, bool, int, float, dict or dataclass")


def _typed(kind: Any, value: Any, path: _Path) -> Any:
    """`value` as the annotation `kind` says."""
    if kind in (Any, object):
        return value
    if get_origin(kind) in (Union, types.UnionType):
        *others, last = (arm for arm in get_args(kind) if arm is not types.NoneType)
        for arm in others:
            with suppress(ValueError):
                return _typed(arm, value, path)
        return _typed(last, value, path)
    if is_dataclass(kind) and isinstance(value, dict):
        return _dataclass(kind, value, path)
    origin = get_origin(kind) or kind
    if not isinstance(origin, type):
        raise TypeError(f"{_join(path)}: cannot unpack as {kind}")
    # As in the language, an int serves where a float is declared; a bool, which is an int, does not.
    accepted = (int, float) if origin is float else origin
    if (isinstance(value, bool) and origin is not bool) or not isinstance(value, accepted):
        raise ValueError(f"{_join(path)}: expected {getattr(kind, '__name__', kind)}, found {type(value).__name__}")
    if isinstance(value, dict) and get_args(kind):
        return {key: _typed(get_args(kind)[1], entry, (*path, key)) for key, entry in value.items()}
    return value


def _dataclass(cls: Any, entries: dict[str, Any], path: _Path) -> Any:
    kinds = get_type_hints(cls)
    names = _names(cls)
    for name in entries:
        if name not in names:
            raise ValueError(f"{_join((*path, name))}: unknown field of {cls.__name__}")
    for name in names:
        if name not in entries and not _may_be_none(kinds[name]):
            raise ValueError(f"{_join((*path, name))}: missing field of {cls.__name__}")
    found = {name: _typed(kinds[name], entries[name], (*path, name)) for name in names if name in entries}
    return cls(**(dict.fromkeys(names) | found))


def _may_be_none(kind: Any) -> bool:
    return kind in (Any, object, None, types.NoneType) or types.NoneType in get_args(kind)
