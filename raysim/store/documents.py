"""Files that others may have written, or damaged: YAML, JSON and tensors. Every fault is a `DamagedFile`, whose
message names the file and what in it is wrong; what is read is bounded before anything is made of it."""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypeVar, cast

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from raysim.errors import Explained
from raysim.paths import command

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

YAML_BYTES, JSON_BYTES = 1 << 20, 1 << 28
NODES, LEVELS = 100_000, 64  # of a YAML document, with every alias counted as what it stands for
DIGITS = 1000  # of a number
TORCH_SUFFIXES = (".pt", ".pth")  # of a state_dict that torch.save has written

OPEN_SHAPE = ConfigDict(strict=True, extra="allow")
"""For shapes of files that may hold more than their readers need, such as what a later raysim adds."""


class DamagedFile(Explained, ValueError):
    """A file is not what it should be. The message is a sentence that names it."""


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """A regular file to read. A folder is refused, and what might block: a pipe, a socket, a device."""
    if not stat.S_ISREG(path.stat().st_mode):  # a socket cannot be opened at all
        raise DamagedFile(f"{path}: is not a regular file.")
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it is another now
            raise DamagedFile(f"{path}: is not a regular file.")
        yield file


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Another is refused."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DamagedFile(f"{path}: is larger than {most >> 20} MiB.")
    return content


# ---------------------------------------------------------------------------------------------------------------- JSON


def read_json(path: Path, shape: type[T]) -> T:
    """A JSON file that must have `shape`, a TypedDict. Raises OSError and `DamagedFile`, which names the key."""
    return checked(path, shape, read_bytes(path, JSON_BYTES))


def checked(path: Path, shape: type[T], content: bytes | str) -> T:
    """JSON text from the file at `path` as `shape`. Raises `DamagedFile`."""
    try:
        found: T = _adapter(cast(Any, shape)).validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(key)[:60] for key in fault["loc"])
        raise DamagedFile(f"{path} is damaged: {place + ': ' if place else ''}{fault['msg']}.") from None
    return found


@functools.cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


class Personal(TypedDict):
    """How the clients' own models ended."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    final: float | None
    best: float | None
    last10: float | None
    evaluations: NotRequired[int]  # that `last10` is the mean of, if they are fewer than ten
    macro: float | None
    std: float | None
    worst10: float | None
    auc: float | None


class Result(TypedDict):
    """What `result.json` holds."""

    __pydantic_config__ = OPEN_SHAPE  # type: ignore[misc]
    headline: NotRequired[str | None]  # the metric whose scores these are; older runs have accuracies
    final: float | None
    best: float | None
    last10: float | None
    evaluations: NotRequired[int]
    personal: Personal | None
    bytes_up: int
    bytes_down: int
    sha256: str
    rounds: int
    ended: NotRequired[str | None]  # why the run ended before its last round
    best_round: NotRequired[int | None]  # the round, from 0, with the best score
    seconds: float


def read_result(folder: Path) -> dict[str, Any] | None:
    """What the run in `folder` ended with; None while it has not. Raises `DamagedFile`."""
    path = folder / "result.json"
    if not path.exists():
        return None
    try:
        return dict(read_json(path, Result))
    except DamagedFile as error:
        raise DamagedFile(f"{error} Remove it; {command('resume', folder)} writes it again.") from None


class Label(TypedDict):
    """What `label.json` holds: what a person has said of a run."""

    tags: list[str]
    note: str


def read_label(folder: Path) -> Label:
    """Tags and note of the run in `folder`; empty where there are none. Raises `DamagedFile`."""
    path = folder / "label.json"
    return read_json(path, Label) if path.exists() else Label(tags=[], note="")


# ---------------------------------------------------------------------------------------------------------------- YAML


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises OSError and `DamagedFile`."""
    try:
        return parse_yaml(read_bytes(path, YAML_BYTES).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path}: cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DamagedFile(f"{path}: {where}not valid YAML: {problem or error}") from None


def parse_yaml(text: str) -> Any:
    """What a YAML text holds: mappings with scalar keys, lists, texts, numbers, true, false and null; a date is text.

    Raises YAMLError for all else, also for a key that is written twice (YAML would take the last).
    """
    return _Loader(text).get_single_data()


def _refused(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


_HALF = re.compile("[\ud800-\udfff]")  # of a pair of code units: no file can hold one
_TAGS = {None, "!", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq"))}


def _bounded(events: Iterator[Any]) -> Iterator[Any]:
    """Events of a parser, as long as what they describe is small: an alias counts as all that it stands for."""
    known: dict[str, tuple[int, int]] = {}  # anchor → nodes and levels of what it names
    unfinished: list[list[Any]] = []  # anchor, nodes before it, and levels so far of each open collection
    nodes = 0
    for event in events:
        levels = 0
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before, levels = unfinished.pop()
            levels += 1
            known[anchor] = (nodes - before, levels)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _, _ in unfinished):
                raise _refused(f"the alias *{event.anchor} stands within what it names", event.start_mark)
            size, levels = known.get(event.anchor, (1, 0))  # an unknown one is refused when the nodes are composed
            nodes += size
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            if event.tag not in _TAGS:
                raise _refused(f"the tag {event.tag} is not allowed", event.start_mark)
            if isinstance(event, yaml.ScalarEvent):
                if _HALF.search(event.value):  # which may be written "\\ud800"
                    raise _refused("half a character", event.start_mark)
                known[event.anchor] = (1, 0)
            else:
                unfinished.append([event.anchor, nodes - 1, 0])
        if unfinished:
            unfinished[-1][2] = max(unfinished[-1][2], levels)
        if len(unfinished) + levels > LEVELS:
            raise _refused(f"more than {LEVELS} levels", event.start_mark)
        if nodes > NODES:
            raise _refused(f"more than {NODES:,} values, aliases written out", event.start_mark)
        yield event


class _Loader(yaml.composer.Composer, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):  # type: ignore[misc]
    """PyYAML's composer and constructor, on events that have been bounded."""

    def __init__(self, text: str):
        if _HALF.search(text):  # as an argument of the command line that is not UTF-8 does
            raise yaml.YAMLError("it holds half a character")
        self._events = _bounded(yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
        self._next: Any = None
        for part in (yaml.composer.Composer, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
            part.__init__(self)

    # What the composer expects of a parser.

    def peek_event(self) -> Any:
        if self._next is None:
            self._next = next(self._events, None)
        return self._next

    def get_event(self) -> Any:
        event, self._next = self.peek_event(), None
        return event

    def check_event(self, *kinds: type) -> bool:
        return isinstance(self.peek_event(), kinds)

    def compose_mapping_node(self, anchor: str | None) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refused("a key must be a word or a number", key.start_mark)
            if key.value in seen:
                raise _refused(f"'{key.value[:60]}' is written twice", key.start_mark)
            seen.add(key.value)
        return node


def _scalar(kind: str, construct: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`construct`, which takes it for granted that the text was recognised as its kind, for any text."""

    def constructed(loader: Any, node: Any) -> Any:
        try:
            if len(node.value) > DIGITS:
                raise ValueError
            return construct(loader, node)
        except (ValueError, KeyError, IndexError, OverflowError):
            raise _refused(f"{str(node.value)[:40]!r} is not {kind}", node.start_mark) from None

    return constructed


for _name, _kind, _construct in (
    ("int", "a whole number", _Loader.construct_yaml_int),
    ("float", "a number", _Loader.construct_yaml_float),
    ("bool", "true or false", _Loader.construct_yaml_bool),
):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _scalar(_kind, _construct))
for _name in ("timestamp", "value"):  # a date, and a lone `=`
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _Loader.construct_yaml_str)


# ------------------------------------------------------------------------------------------------------------- tensors


def about_tensors(path: Path) -> dict[str, str]:
    """What the writer of a safetensors file has said of it; nothing where there is no such file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return {}
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata() or {}
    except SafetensorError:  # damaged
        return {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a state_dict that torch has saved. Raises OSError and `DamagedFile`."""
    import torch
    from safetensors.torch import load_file

    if path.exists() and not path.is_file():
        raise DamagedFile(f"{path}: is not a regular file.")
    try:
        if path.suffix in TORCH_SUFFIXES:
            return _of_torch(torch.load(path, map_location="cpu", weights_only=True))  # which runs no pickle's code
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # the library's own error, and what torch makes of shapes and types
        raise DamagedFile(f"{path} is damaged: it does not hold tensors ({error}).") from None


def _of_torch(loaded: Any) -> dict[str, Tensor]:
    """The tensors of a state_dict, or of a checkpoint that has one."""
    import torch

    found = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else loaded
    if not isinstance(found, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise ValueError("it is no state_dict, which has a tensor under each name")
    return dict(found)
