"""Which runs differ in the seed alone, and what tells the others apart."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from raysim.report.folder import STACKS, RunFolder

NEUTRAL = {"preset", "name", "seed", "record", "data.root"}  # settings that do not tell two methods apart
HUES = 7  # colours that figures have; a further group differs in its dashes
OWN = (1, 2, 3, 5, 6)  # those a method may have for its own: 0 is FedAvg's, and 4 looks like it


@dataclass(frozen=True)
class Group:
    """Runs of one configuration. Only their seeds differ."""

    label: str
    runs: tuple[RunFolder, ...]
    number: int  # its colour and its dashes, in whatever figure it is

    @property
    def first(self) -> RunFolder:
        return self.runs[0]


def compare(runs: Sequence[RunFolder]) -> list[Group]:
    """Runs by configuration, in the order given. A group's label is what tells it apart from the others."""
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        deciding = {path: value for path, value in run.settings.items() if path.partition(".")[0] not in NEUTRAL}
        deciding.pop("data.root", None)
        groups.setdefault(json.dumps(deciding, sort_keys=True), []).append(run)
    labels: list[str] = []
    firsts = [members[0] for members in groups.values()]
    for run in firsts:
        twins = [other for other in firsts if other.stack == run.stack]
        varied = _short([path for path in differences(twins) if path not in STACKS])
        parts = [f"{words} {_shown(run.settings[path])}" for path, words in varied if path in run.settings]
        label = ", ".join(parts if len(twins) == len(firsts) and parts else [run.stack, *parts])
        labels.append(label)
    for i in reversed(range(len(labels))):  # the settings of an older raysim may differ in being absent
        if (number := labels[: i + 1].count(labels[i])) > 1:
            labels[i] += f" ({number})"
    numbers = _numbers([(run.stack, key) for key, run in zip(groups, firsts, strict=True)])
    return [
        Group(label, tuple(members), number)
        for label, members, number in zip(labels, groups.values(), numbers, strict=True)
    ]


def _numbers(keys: Sequence[tuple[str, str]]) -> list[int]:
    """A number for each (methods, settings). It follows from the names of the methods, in whatever order the runs were
    given and whatever is compared with them, as long as no two of them wish for the same."""
    wishes = {key: 0 if key[0] == "fedavg" else OWN[crc32(key[0].encode()) % len(OWN)] for key in sorted(keys)}
    holders: dict[int, tuple[str, str]] = {}
    for key, wish in wishes.items():
        holders.setdefault(wish, key)
    for key, wish in wishes.items():
        if holders[wish] != key:
            near = ((wish + step) % HUES for step in range(HUES))
            holders[next(n for n in itertools.chain(near, itertools.count()) if n not in holders)] = key
    found = {key: number for number, key in holders.items()}
    return [found[key] for key in keys]


def runs_of(groups: Sequence[Group]) -> list[RunFolder]:
    """The runs of all groups."""
    return [run for group in groups for run in group.runs]


def differences(runs: Sequence[RunFolder]) -> list[str]:
    """Paths of the settings that differ between runs. A setting that a run lacks does not count for it."""
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    values = {path: {json.dumps(run.settings[path]) for run in runs if path in run.settings} for path in paths}
    return [
        path
        for path in paths
        if len(values[path]) > 1 and path.partition(".")[0] not in NEUTRAL and path not in NEUTRAL
    ]


def _short(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Each path with its shortest end that no other path has."""
    short = []
    for path in paths:
        words = path.split(".")
        for count in range(1, len(words) + 1):
            tail = ".".join(words[-count:])
            if sum(other == tail or other.endswith(f".{tail}") for other in paths) == 1:
                break
        short.append((path, tail))
    return short


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
