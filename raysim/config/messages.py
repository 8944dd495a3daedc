"""Words for people: what is wrong, what a value may be, what was perhaps meant."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import yaml

from raysim.config.fields import catalogue_of, fields_of, is_section
from raysim.errors import ConfigError


@dataclass
class Faults:
    """What has been found wrong so far, one line each."""

    source: str
    """Named at the beginning of every line, such as the file; may be empty."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Paths that were changed after the source was read, and how the change was written: named in place of the source."""
    lines: list[str] = field(default_factory=list)

    def add(self, path: str, message: str) -> None:
        changed = max((one for one in self.changes if _overlap(one, path)), key=len, default=None)
        written = None if changed is None else self.changes[changed]
        where = (
            (self.source, path) if written is None else (written, "" if f"{written}=".startswith(f"{path}=") else path)
        )
        value = (written or "").partition("=")[2]
        if "," in value and value[0] not in "[{'\"":
            message += f" A list is written '[{value[:60]}]'; `raysim sweep` runs each of several values."
        self.lines.append(": ".join(part for part in (*where, message) if part))

    def report(self) -> None:
        """Raise `ConfigError` where anything has been found."""
        if self.lines:
            raise ConfigError(self.lines)


def _overlap(one: str, other: str) -> bool:
    """Whether one of two paths leads to the other."""
    shorter, longer = sorted((one, other), key=len)
    return f"{longer}.".startswith(f"{shorter}.")


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


def words_of(annotation: Any) -> list[str]:
    """The words that a value may be."""
    if typing.get_origin(annotation) is Literal:
        return [arg for arg in typing.get_args(annotation) if isinstance(arg, str)]
    return [word for arg in typing.get_args(annotation) for word in words_of(arg)]


def _options(annotation: Any) -> list[str]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return [str(arg) for arg in args]
    if origin in (typing.Union, UnionType):
        return [option for arg in args for option in _options(arg)]
    return [describe(annotation)]


def match(word: object, words: Iterable[str]) -> str | None:
    """The most similar of `words`, if one is similar at all; the shortest that begins with `word` comes first."""
    by_lower, begun = {w.lower(): w for w in words}, str(word)[:60].lower()
    near = difflib.get_close_matches(begun, by_lower, n=len(by_lower) + 1)
    longer = [w for w in by_lower if w in near and w.startswith(begun)]
    best = min(longer, key=len) if longer else near[0] if near else None
    return by_lower[best] if best else None


def nearest(word: object, words: Collection[str], listed: bool = True) -> str:
    """A question for the most similar of `words`, and all of them where they are to be `listed`."""
    near = match(word, words)
    choice = f" There are {', '.join(words)}." if listed and words else ""
    return (f" Did you mean {near!r}?" if near else "") + choice


def show(value: Any) -> str:
    """`value` as it is written in YAML, shortened."""
    if isinstance(value, str):
        looks_otherwise = re.fullmatch(r"[-+.\d\s]+|true|false|null", value, re.IGNORECASE)
        return f"{value[:60]!r}" + (" (text)" if looks_otherwise else "")
    text = yaml.safe_dump(json.loads(as_json(value)), default_flow_style=True, width=10_000, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_json(raw: Any) -> str:
    """A value of a configuration as JSON; NumPy's numbers and arrays are numbers and lists, a path is text."""
    return json.dumps(raw, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
