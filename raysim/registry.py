"""Names of all that a configuration can name: methods, models, data sets and so on.

There is one registry. raysim's own packages fill it with what they hold, a script or a notebook adds its own entries
(`register`, or `add` as a decorator), and so do installed packages, by entry points in the groups of `KINDS`:

    [project.entry-points."raysim.methods"]
    signsgd = "my_package.signsgd:SignSGD"

Nothing is imported before a name of its kind is looked up.
"""

from __future__ import annotations

import copyreg
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_type_hints

from raysim.definition import Definition, definition_of, read_now, values_of
from raysim.errors import Explained

T = TypeVar("T")
OwnEntry = tuple[str, str, Any, Definition | None]  # kind, name, entry and its definition


@dataclass(frozen=True)
class Kind:
    """Where the entries of one kind come from."""

    home: str | None
    """The module of raysim that fills the table when it is imported."""
    group: str | None = None
    """The group of entry points in which installed packages name theirs."""


KINDS = {
    "client": Kind("raysim.methods", "raysim.methods"),
    "weighting": Kind("raysim.methods", "raysim.methods"),
    "server": Kind("raysim.methods", "raysim.methods"),
    "transform": Kind("raysim.methods", "raysim.methods"),
    "attack": Kind("raysim.methods", "raysim.methods"),
    "selection": Kind("raysim.methods", "raysim.methods"),
    "model": Kind("raysim.models", "raysim.models"),
    "dataset": Kind("raysim.data", "raysim.datasets"),
    "partition": Kind("raysim.data", "raysim.partitions"),
    "task": Kind("raysim.core.task", "raysim.tasks"),
    "metric": Kind(None, "raysim.metrics"),
    "instrument": Kind("raysim.analysis", "raysim.instruments"),
    "measure": Kind("raysim.analysis"),
    "engine": Kind("raysim.engine.settings"),
    "sink": Kind("raysim.store.sinks"),
    "schedule": Kind("raysim.core.rates", "raysim.schedules"),
    "trait": Kind("raysim.core.simulated", "raysim.traits"),
    "availability": Kind("raysim.core.availability", "raysim.availabilities"),
}


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Marks a field whose value is one entry of a catalogue of dataclasses."""

    role: str
    """What an entry is called in a message: "client method"."""
    entries: Table[type]
    """Its names and classes."""
    hint: str = ""
    """Ends the message on an unknown name."""
    number: str | None = None
    """The entry whose first field a bare number is."""

    def __str__(self) -> str:
        return f"{'an' if self.role[0] in 'aeiou' else 'a'} {self.role}"


class NameTaken(Explained, ValueError):
    """Two entries of one kind want the same name."""


class Table(MutableMapping[str, T], Generic[T]):
    """The entries of one kind by name. The first look at it brings in raysim's own and those of installed packages."""

    def __init__(self, kind: str, registry: Registry):
        self.kind = kind
        self._registry = registry
        self._entries: dict[str, T] = {}
        self._origins: dict[str, str] = {}
        self.own: set[str] = set()  # names that this process's scripts and notebooks have given
        self.given: set[str] = set()  # those of them that stand for objects, which no import of a file brings
        self._definitions: dict[str, Definition | None] = {}  # of entries that another process has defined
        self._values: dict[str, list[str]] = {}  # with which objects were made, as they were when they were registered
        self._names: dict[type, str] = {}  # of classes, by the first name that each was given

    def register(self, name: str, entry: T, origin: str | None = None) -> T:
        """Give `entry` a name and return it. Raises `NameTaken`, unless the same class has been defined once more, as
        in a notebook cell that is run again, or is named twice, as by a decorator and an entry point."""
        origin = origin or origin_of(entry)
        if self._origins.get(name, origin) != origin and self._entries[name] is not entry:
            raise NameTaken(f"the {self.kind} {name!r} of {origin} has the name of that of {self._origins[name]}")
        self._enter(name, entry, origin)
        return entry

    def _enter(self, name: str, entry: T, origin: str) -> None:
        if isinstance(entry, type):
            if "name" in getattr(entry, "__dataclass_fields__", {}) and issubclass(entry, Named):
                way = f"that is what it is registered under, here {name!r}. Call the field something else"
                raise ValueError(f"{origin_of(entry)} has a field `name`, but {way}.")
            if issubclass(entry, Named) and entry.role != self.kind:
                way = f"Register it under {entry.role!r}, not under {self.kind!r}"
                raise TypeError(f"{origin_of(entry)} has the role {entry.role!r}. {way}.")
            self._names.setdefault(entry, name)
        self._entries[name], self._origins[name] = entry, origin
        self._values[name] = values_of(entry)

    def name_of(self, cls: type) -> str:
        """The name of a class; of one that is not in the table, its own in lower case."""
        if cls not in self._names:
            self._registry.complete(self.kind)
        return self._names.get(cls, cls.__name__.lower())

    def fill(self, entries: Mapping[str, T]) -> Table[T]:
        """Register raysim's own entries."""
        for name, entry in entries.items():
            self.register(name, entry)
        return self

    def adopt(self, name: str, entry: T, definition: Definition | None) -> None:
        """Take over an entry that another process has defined."""
        self[name] = entry
        self._definitions[name] = definition

    def definition(self, name: str) -> Definition | None:
        """What defines an entry; None for raysim's own, and for a name that is not in the table."""
        if name in self._definitions:
            return self._definitions[name]
        return definition_of(self[name], name in self.given, self._values[name]) if name in self else None

    # A mapping: a reader sees all entries; an item that is set replaces what was there.

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            self._registry.complete(self.kind)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._registry.complete(self.kind)
        return iter(self._entries)

    def __len__(self) -> int:
        self._registry.complete(self.kind)
        return len(self._entries)

    def __setitem__(self, name: str, entry: T) -> None:
        self._enter(name, entry, origin_of(entry))
        self._definitions.pop(name, None)
        self.own.add(name)
        self.given.add(name)
        read_now(entry)

    def __delitem__(self, name: str) -> None:
        self._names = {cls: word for cls, word in self._names.items() if word != name}
        del self._entries[name], self._origins[name], self._values[name]
        self._definitions.pop(name, None)
        self.own.discard(name)
        self.given.discard(name)

    def __repr__(self) -> str:
        return f"<the registry's {self.kind} table>"

    __hash__ = object.__hash__  # a table is equal only to itself, so that it can stand in an annotation

    def __eq__(self, other: object) -> bool:
        return self is other


class Registry:
    """All tables."""

    def __init__(self) -> None:
        self._tables: dict[str, Table[Any]] = {kind: Table(kind, self) for kind in KINDS}
        self._loaded: set[str] = set()  # groups of entry points

    def table(self, kind: str) -> Table[Any]:
        """The entries of a kind, one of `KINDS`."""
        return self._tables[kind]

    def register(self, kind: str, name: str, entry: T, origin: str | None = None) -> T:
        """Give `entry` a name in the table of `kind` and return it; `origin` says where it was defined, if it is made of
        something. Raises `NameTaken`."""
        if kind not in self._tables:
            raise ValueError(f"there is no kind {kind!r}; there are {', '.join(self._tables)}")
        self._load_home(kind)  # raysim's own names are taken first
        self._tables[kind].register(name, entry, origin)
        self._tables[kind].own.add(name)
        self._tables[kind].given.discard(name)
        read_now(entry)
        return entry

    def add(self, kind: str, name: str | None = None) -> Callable[[T], T]:
        """A decorator that registers a class or function, under its own name in lower case where none is given."""
        return lambda entry: self.register(kind, name or getattr(entry, "__name__").lower(), entry)  # noqa: B009

    def own(self) -> list[OwnEntry]:
        """What scripts and notebooks have added, to be pickled: neither raysim's own nor what installed packages name."""
        _pickle_torchs_modules()
        _settle_dataclasses({table[name].__module__ for table in self._tables.values() for name in table.own})
        return [
            (kind, name, table[name], table.definition(name))
            for kind, table in self._tables.items()
            for name in sorted(table.own)
        ]

    def adopt(self, entries: Iterable[OwnEntry]) -> None:
        """Take over the `own` entries of another process."""
        _pickle_torchs_modules()
        for kind, name, entry, definition in entries:
            self._load_home(kind)
            self._tables[kind].adopt(name, entry, definition)

    def complete(self, kind: str) -> None:
        """Bring in all entries of a kind: raysim's own, then those of installed packages."""
        self._load_home(kind)
        group = KINDS[kind].group
        if group and group not in self._loaded:
            self._loaded.add(group)
            for point in entry_points(group=group):
                self._load(point, [kind for kind, of in KINDS.items() if of.group == group])

    def _load_home(self, kind: str) -> None:
        if home := KINDS[kind].home:
            import_module(home)  # the second time this is a look into sys.modules

    def _load(self, point: EntryPoint, kinds: list[str]) -> None:
        """Register what an installed package names. One that cannot be loaded costs a warning and nothing else."""
        package = point.dist.name if point.dist else "an installed package"
        try:
            entry = point.load()
            kind = kinds[0] if len(kinds) == 1 else entry.role  # a method says on which side it stands
            if kind not in kinds:
                raise ValueError(f"its role is {kind!r}, which is none of {', '.join(kinds)}")
            self._tables[kind].register(point.name, entry, f"{point.value} ({package})")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"the plugin {point.name} = {point.value} of {package} is left out: {reason}", stacklevel=2)


def _pickle_torchs_modules() -> None:
    """Code that says `torch` and `classes` takes the module torch.classes along, which pickle does not know by itself."""
    for module in filter(None, map(sys.modules.get, ("torch.classes", "torch.ops"))):
        copyreg.pickle(type(module), _by_name)


def _settle_dataclasses(modules: Iterable[str]) -> None:
    """Of modules that hold entries, whose classes may travel without them: one of these dataclasses may be a method's state."""
    for name in modules:
        for one in [*vars(sys.modules.get(name, object)).values()]:
            if isinstance(one, type) and one.__module__ == name and is_dataclass(one):
                with suppress(Exception):  # where it is a state, the run says what is wrong
                    settle(one)


def settle(kind: Any) -> None:
    """Put types in the place of annotations that are text, in the dataclass `kind` and those in it: another process, to which a
    class of a script has travelled, does not know the names of that script. Raises what `get_type_hints` raises."""
    for inner in get_args(kind):
        settle(inner)
    if is_dataclass(kind) and any(isinstance(field.type, str) for field in fields(kind)):
        kind.__annotations__ = get_type_hints(kind)
        for field in fields(kind):
            field.type = kind.__annotations__[field.name]
        for field in fields(kind):
            settle(field.type)


def _by_name(module: ModuleType) -> tuple[Callable[[str], ModuleType], tuple[str]]:
    return import_module, (module.__name__,)


def origin_of(entry: object) -> str:
    """Where a class or function is defined."""
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', repr(entry))}"


def name_in(entries: Mapping[str, type], value: object) -> str:
    """The name of the class of `value`; for a class without one, its own in lower case."""
    known = (name for name, cls in entries.items() if cls is type(value))
    return next(known, type(value).__name__.lower())


REGISTRY = Registry()


class _Name:
    """Looked up in the registry, unless a copy in another process has brought its name along."""

    def __get__(self, one: Named | None, cls: type[Named]) -> str:
        return REGISTRY.table(cls.role).name_of(cls)


class Named:
    """A class whose objects a configuration names: a method or an instrument."""

    role: ClassVar[str]
    """The kind under which it is registered."""
    name: ClassVar[str] = _Name()  # type: ignore[assignment]
    """The one word for it, in configurations, tables, messages and memory: what it is registered under."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "name": self.name}  # an actor need not know of an entry made in a user's script
