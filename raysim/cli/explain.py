"""What a configuration may say: its sections and their settings, and the options of all that it names.

Everything is taken from the classes that read the configuration: annotation, default, and the docstring of each field.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cached_property, partial
from typing import Any

from raysim.config import (
    PRESETS,
    STACKS,
    Config,
    ConfigError,
    catalogue_of,
    describe,
    docs_of,
    fields_of,
    is_section,
    name_in,
    nearest,
    plain,
    show,
    stack_of,
)
from raysim.data.augment import AUGMENTATIONS
from raysim.models import torchvision
from raysim.registry import REGISTRY, Catalogue

ENTRIES: Mapping[str, Mapping[str, type]] = {
    **{catalogue.role: catalogue.entries for catalogue in STACKS.values()},
    "data set": REGISTRY.table("dataset"),
    "partition": REGISTRY.table("partition"),
    "augmentation": AUGMENTATIONS,
    "schedule": REGISTRY.table("schedule"),
    "selection": REGISTRY.table("selection"),
    "trait": REGISTRY.table("trait"),
    "availability": REGISTRY.table("availability"),
    "engine": REGISTRY.table("engine"),
    "observer": REGISTRY.table("instrument"),
    "measure": REGISTRY.table("measure"),
    "sink": REGISTRY.table("sink"),
}


@dataclass(frozen=True)
class Row:
    """One setting."""

    key: str
    default: str
    about: str


@dataclass(frozen=True)
class Topic:
    """Something that has a name in a configuration."""

    name: str
    kind: str
    about: str
    read: Callable[[], Iterable[Row]]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(self.read())

    def option(self, row: Row) -> Topic:
        kind = "setting" if self.kind == "section" else f"option of this {self.kind}"
        return Topic(f"{self.name}.{row.key}".lstrip("."), kind, "", lambda: [row])

    def __str__(self) -> str:
        width = max(60, min(120, shutil.get_terminal_size().columns))
        lines = [f"{self.name} ({self.kind})" if self.name else "A configuration"]
        lines += [textwrap.fill(" ".join(part.split()), width) for part in self.about.split("\n\n") if part]
        keys = max((len(row.key) for row in self.rows), default=0)
        defaults = max((len(row.default) for row in self.rows), default=0)
        for row in self.rows:
            begin = f"  {row.key:{keys}}  {row.default:{defaults}}  "
            wrapped = textwrap.wrap(row.about, width, initial_indent=begin, subsequent_indent=" " * len(begin))
            lines += wrapped or [begin.rstrip()]
        return "\n".join(lines)


def explain(name: str | None = None) -> str:
    """All sections; or what has `name`: a section, a setting (`local.lr` or just `lr`), a method or another entry, an
    option of it (`fedlws.beta`), a model, a preset. Raises `ConfigError` where there is nothing of that name."""
    sections = list(_sections())
    if name is None:
        return "\n\n".join(map(str, sections))
    name, kind = _without_place(name)
    every = [topic for topic in topics() if kind in (None, topic.kind)]
    last = [topic for topic in sections if topic.name.rpartition(".")[2] == name]
    if found := [topic for topic in every if topic.name == name] or last:
        return "\n\n".join(map(str, found))
    settings = [topic.option(row) for topic in every for row in topic.rows]
    found = [setting for setting in settings if setting.name == name]
    found = found or [setting for setting in settings if setting.rows[0].key == name]
    if not found and name.removeprefix("torchvision.") in torchvision.architectures():
        found = [Topic(name, "model", "A classification model of torchvision, randomly initialised; no options.", list)]
    if not found:
        near = nearest(name, [topic.name for topic in (*every, *settings)], listed=False)
        raise ConfigError(f"raysim explain: nothing is named {name!r}.{near} Without a name it shows all settings.")
    return "\n\n".join(map(str, found))


def topics() -> list[Topic]:
    """All that has a name: sections, methods and other entries, models, presets."""
    return [*_sections(), *_entries(), *_models(), *_presets()]


def _without_place(name: str) -> tuple[str, str | None]:
    """The entry's name and kind of a name that says where it stands: `server.0.fedlws`, `engine.ray`, `data.name.digits`."""
    for path, catalogue in _places(Config):
        if (inside := re.match(rf"{re.escape(path)}\.(\d+\.)?(?=.)", name)) is not None:
            return name[inside.end() :], next(kind for kind, of in ENTRIES.items() if of is catalogue.entries)
    return name, None


def _places(cls: type, path: str = "") -> Iterator[tuple[str, Catalogue]]:
    for key, (_, annotation) in fields_of(cls).items():
        whole = f"{path}.{key}".lstrip(".")
        if catalogue := catalogue_of(annotation) or catalogue_of(stack_of(annotation)):
            yield whole, catalogue
        elif is_section(annotation):
            yield from _places(annotation, whole)


def _sections(cls: type = Config, path: str = "") -> Iterator[Topic]:
    below = {k: f"{path}.{k}".lstrip(".") for k, (_, annotation) in fields_of(cls).items() if is_section(annotation)}
    rows = (Row(r.key, "", f"section `{below[r.key]}`") if r.key in below else r for r in _rows(cls))
    yield Topic(path, "section", _doc(cls), lambda: rows)
    for key, whole in below.items():
        yield from _sections(fields_of(cls)[key][1], whole)


def _entries() -> Iterator[Topic]:
    for kind, entries in ENTRIES.items():
        for name, cls in entries.items():
            yield Topic(name, kind, _doc(cls), partial(_rows, cls))


def _models() -> Iterator[Topic]:
    for name, builder in REGISTRY.table("model").items():
        options = list(inspect.signature(builder).parameters.values())[1:]
        rows = [Row(o.name, "required" if o.default is o.empty else _shown(o.default), "") for o in options]
        yield Topic(name, "model", _doc(builder), rows.copy)


def _presets() -> Iterator[Topic]:
    for name, settings in PRESETS.items():
        general = {s: own for s, own in settings.items() if s not in ("fields", "with")} | settings.get("fields", {})
        rows = [Row(f"{of}.{key}", _shown(value), "") for of, own in general.items() for key, value in own.items()]
        for method, own in settings.get("with", {}).items():
            rows += [Row(key, _shown(value), f"where the run has {method}") for key, value in own.items()]
        about = f"Defaults under `preset: {name}`, which the file's own keys override."
        yield Topic(name, "preset", about if rows else "All defaults as they are.", rows.copy)


def _rows(cls: type) -> Iterator[Row]:
    docs = docs_of(cls)
    for key, (field, annotation) in fields_of(cls).items():
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if default is MISSING:
            shown = "required"
        elif catalogue := catalogue_of(annotation):
            shown = name_in(catalogue.entries, default)
        else:
            shown = _shown(plain(annotation, default))
        yield Row(key, shown, " — ".join(filter(None, (describe(annotation), docs.get(field.name, "")))))


def _doc(entry: Any) -> str:
    return inspect.getdoc(entry) or ""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
