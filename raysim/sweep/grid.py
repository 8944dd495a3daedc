"""A grid of runs: every value of every varied setting, every method of a list, every seed; each run in its own folder.

A configuration may list `methods:` to compare, by name, each with the settings that make it:

    methods:
      fedavg: {}
      fedprox: {client: [{fedprox: {mu: 0.01}}]}
      fedlws: {server: [fedlws], local.lr: 0.05}

With one seed, all of them have one partition, one initial model and one sequence of cohorts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raysim.config import Config, ConfigError, load, to_dict
from raysim.config.fields import STACKS
from raysim.config.load import loader
from raysim.config.messages import nearest
from raysim.paths import UnsafeName, below, digits, slug
from raysim.store.documents import DamagedFile, parse_yaml, read_yaml

CATALOGUES = (*STACKS, "data", "model", "partition", "engine")  # settings whose values are names
Choice = tuple[str, list[str]]  # how it is called in the folder's name, if it is, and its overrides
OPTION = re.compile(rf"({'|'.join(STACKS)})\.\d+\.(\w+)(.*)", re.S)  # server.0.fedlws.beta=0.2


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str  # of its folder: beta0.01-seed8
    config: Config
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").exists()

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return any((self.folder / "checkpoints").glob("*.json"))


def grid(base: Path, changes: Sequence[str], seeds: Sequence[int], out: Path) -> list[Point]:
    """The runs of the grid, all configurations of a seed before those of the next, so that a comparison comes early.

    `changes` are `path=value,value,...`, where a value may be any YAML in one line. Raises `ConfigError` with the
    faults of all configurations, and where a folder of the grid holds a run of another configuration.
    """
    last = [seeded(seed) for seed in seeds] or [("", [])]
    methods, values = _methods(base), [axis for axis in map(_values, changes) if axis]
    if not methods:
        return runs(base, [(*others, seed) for seed, *others in itertools.product(last, *values)], out)
    cells, named, matched = [], set[tuple[str, ...]](), MatchedOverrides()
    for seed, method, *others in itertools.product(last, methods, *values):
        texts = matched.by(base, (method, seed), [text for _, texts in others for text in texts])
        reaching = [[new for text in old for new in texts[text]] for _, old in others]
        words = [name if new else "" for (name, _), new in zip(others, reaching, strict=True)]
        names = (method[0], *words, seed[0])
        if all(reaching) or names not in named:  # values that do not reach a method make one run of it
            cells.append((method, *zip(words, reaching, strict=True), seed))
        named.add(names)
    matched.check()
    return runs(base, cells, out)


class MatchedOverrides:
    """Changes of all runs of a comparison, and whether each has matched one.

    An option of a method, such as `server.0.fedlws.beta=0.2`, reaches the runs that have this method, at whatever place. In
    the others it would put the method, and the baseline would be none.
    """

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()

    def by(self, base: Path, chosen: Sequence[Choice], changes: Sequence[str]) -> dict[str, list[str]]:
        """What each of `changes` is in the run of the choices `chosen`."""
        found = {text: [text] for text in changes}
        if options := {text: match for text in changes if (match := OPTION.fullmatch(text))}:
            others = [text for _, texts in chosen for text in texts] + [text for text in changes if text not in options]
            config = load(base, others, beside=("methods", "table"))
            for text, match in options.items():
                stack, method, rest = match.groups()
                names = [entry.name for entry in getattr(config, stack)]
                found[text] = [f"{stack}.{i}.{method}{rest}" for i, name in enumerate(names) if name == method]
        self._times.update({text: len(texts) for text, texts in found.items()})
        return found

    def check(self) -> None:
        """Raises `ConfigError` where a change has matched no run."""
        faults = []
        for text, times in self._times.items():
            if not times and (match := OPTION.fullmatch(text)):
                stack, method, _ = match.groups()
                known = STACKS[stack].entries
                near = "" if method in known else nearest(method, known, listed=False)
                faults.append(f"--set {text[:200]}: no run has {method} in its {stack}.{near}")
        if faults:
            raise ConfigError(faults)


def runs(base: Path, cells: Iterable[Sequence[Choice]], out: Path) -> list[Point]:
    """A run for each cell of a grid, which is a choice of each axis. Raises as `grid` does."""
    points: list[Point] = []
    faults: list[str] = []
    configured = loader(base, beside=("methods", "table"))
    for chosen in cells:
        name = "-".join(part for part, _ in chosen if part) or slug(base.stem)
        changes = [text for _, texts in chosen for text in texts]
        try:
            folder = below(out, name)
            config = configured(overrides=[*changes, f"name={json.dumps(name)}"])
        except UnsafeName as error:
            faults.append(f"{base}: the name of a run becomes that of its folder: {error}.")
            continue
        except ConfigError as error:
            faults += error.faults
            continue
        point = Point(name, config, folder)
        faults += _other(point)
        points.append(point)
    names = [point.name for point in points]
    faults += [f"{base}: two runs would be called {name}." for name, times in Counter(names).items() if times > 1]
    faults += _alike(base, points)
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return points


def _alike(base: Path, points: Sequence[Point]) -> Iterator[str]:
    """A fault for all runs that are one but for their names: labels would lie, and means would count a run twice."""
    same: dict[str, dict[str, None]] = defaultdict(dict)  # names in their order
    for point in points:
        same[json.dumps(to_dict(point.config) | {"name": ""}, sort_keys=True)][point.name] = None
    for names in same.values():
        if len(names) > 1:
            which = " and ".join(names)
            yield f"{base}: {which} are the same run: they differ in nothing, or a later setting overrides it."


def choices(axis: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Choice]:
    """The choices of an axis, which says `name: {path: value}` for each. No two are called the same."""
    called = _called_apart({name: name for name in axis})
    return {name: (called[name], overrides(settings)) for name, settings in axis.items()}


def overrides(settings: Mapping[str, Any] | None) -> list[str]:
    """`{path: value}` as `path=value`."""
    return [f"{path}={json.dumps(value)}" for path, value in (settings or {}).items()]


def seeded(seed: int) -> Choice:
    """The choice of a seed."""
    return f"seed{seed}", [f"seed={seed}"]


def _methods(base: Path) -> list[Choice]:
    try:
        raw = read_yaml(base)
    except (OSError, DamagedFile):
        return []  # `load` says what is wrong
    methods = raw.get("methods") if isinstance(raw, dict) else None
    if methods is None:
        return []
    if not isinstance(methods, dict) or not all(isinstance(m, Mapping | None) for m in methods.values()):
        raise ConfigError(f"{base}: methods: must be a mapping of names to settings, each {{path: value}}.")
    return list(choices({str(name): settings for name, settings in methods.items()}).values())


def _values(change: str) -> list[Choice]:
    """The choices that `path=value,value` gives; a single value is no part of a folder's name."""
    path, equals, text = change.partition("=")
    values = _split(text)
    if not equals or len(values) == 1:
        return [("", [change])]
    called = _called_apart({value: _called(path, value) for value in values})
    return [(called[value], [f"{path}={value}"]) for value in values]


def _called_apart(said: Mapping[str, str]) -> dict[str, str]:
    """The part of a folder's name for each; a hash distinguishes those with the same words."""
    plain = {value: slug(words) for value, words in said.items()}
    times = Counter(plain.values())
    return {value: f"{name}-{digits(value)}" if times[name] > 1 else name for value, name in plain.items()}


def _called(path: str, value: str) -> str:
    """What people call `path=value`: beta0.01, fedlws, no-server."""
    word = path.rpartition(".")[2]
    word = path.split(".")[0] if word.isdecimal() or word == "name" else word
    try:
        said = "-".join(_words(parse_yaml(value)))
    except yaml.YAMLError:  # `load` says what is wrong
        said = value
    if not said:
        return f"no-{word}"
    return f"{word}{said}" if said[0].isdecimal() else said if word in CATALOGUES else f"{word}-{said}"


def _words(value: Any) -> list[str]:
    """The names and values in a setting, from the outside in."""
    if isinstance(value, Mapping):
        return [_joined(str(key), _words(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [word for inner in value for word in _words(inner)]
    return [] if value is None else [json.dumps(value).strip('"')]


def _joined(key: str, words: list[str]) -> str:
    said = "-".join(words)
    return f"{key}{said}" if said[:1].isdecimal() else "-".join([key, *words])


def _split(text: str) -> list[str]:
    """Parts between commas that are in no brackets, braces or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _other(point: Point) -> list[str]:
    """A fault where the folder holds a run of another configuration, which must be neither continued nor counted."""
    path = point.folder / "config.yaml"
    if not path.exists():
        return []
    held, wanted = to_dict(load(path)), to_dict(point.config)
    changed = [section for section in wanted if held.get(section) != wanted[section]]
    if not changed:
        return []
    return [f"{point.folder}: holds a run whose {', '.join(changed)} is another. Name another --out, or remove it."]
