"""Which runs differ only in the seed, and how the others differ."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from raysim.report.folder import STACKS, RunFolder

NEUTRAL = {"preset", "name", "seed", "record", "data.root"}  # settings that do not distinguish methods
HUES = 9  # colours that figures have
SALT = b"50288"  # of 100,000, that by which fewest methods share a colour with one that papers compare them with


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
    """Runs by configuration, in the order given. A group's label is what distinguishes it from the others."""
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        deciding = {path: value for path, value in run.settings.items() if path.partition(".")[0] not in NEUTRAL}
        deciding.pop("data.root", None)
        groups.setdefault(json.dumps(deciding, sort_keys=True), []).append(run)
    firsts = [members[0] for members in groups.values()]
    twins: dict[str, list[RunFolder]] = {}
    for run in firsts:
        twins.setdefault(run.stack, []).append(run)
    varied = {
        stack: _short([path for path in differences(alike) if path not in STACKS]) for stack, alike in twins.items()
    }
    labels = [_label(run, varied[run.stack], alone=len(twins) == 1) for run in firsts]
    for i in reversed(range(len(labels))):  # the settings of an older raysim may differ in being absent
        if (number := labels[: i + 1].count(labels[i])) > 1:
            labels[i] += f" ({number})"
    numbers = _numbers([(run.stack, key) for key, run in zip(groups, firsts, strict=True)])
    return [
        Group(label, tuple(members), number)
        for label, members, number in zip(labels, groups.values(), numbers, strict=True)
    ]


def _label(run: RunFolder, varied: Sequence[tuple[str, str]], alone: bool) -> str:
    """The settings that vary, with the words for them, behind the methods; without these where all runs have the same."""
    parts = [f"{words} {_shown(run.settings[path])}" for path, words in varied if path in run.settings]
    if not alone:
        return ", ".join([run.stack, *parts])
    return ", ".join(parts or [f"{words} -" for _, words in varied] or [run.stack])


def _numbers(keys: Sequence[tuple[str, str]]) -> list[int]:
    """A number for each (methods, settings); modulo HUES it is a colour.

    The colour follows only from the methods' names, whatever they are compared with. Several configurations of one
    colour differ in what else follows from the number: dashes and marks. Where all are of the same methods,
    colours distinguish the settings."""
    alike = len({stack for stack, _ in keys}) == 1
    found: dict[tuple[str, str], int] = {}
    for i, key in enumerate(sorted(keys)):
        hue = (_hue(key[0]) + i * alike) % HUES
        found[key] = next(n for n in itertools.count(hue, HUES) if n not in found.values())
    return [found[key] for key in keys]


def _hue(stack: str) -> int:
    """0 is FedAvg's own."""
    return 0 if stack == "fedavg" else 1 + blake2b(stack.encode(), digest_size=4, salt=SALT).digest()[0] % (HUES - 1)


def runs_of(groups: Sequence[Group]) -> list[RunFolder]:
    """The runs of all groups."""
    return [run for group in groups for run in group.runs]


def differences(runs: Sequence[RunFolder]) -> list[str]:
    """Paths of the settings that differ between runs. A setting that a run lacks does not count for it, since an older raysim
    did not write it, but for an option of its model or data: those are written where they are given."""
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    return [
        path
        for path in paths
        if len(_values(path, runs)) > 1 and path.partition(".")[0] not in NEUTRAL and path not in NEUTRAL
    ]


def _values(path: str, runs: Sequence[RunFolder]) -> set[str | None]:
    """The setting's values as JSON; None where a run has not given this option to what others give it to, such as an mlp."""
    having = [run.settings for run in runs if path in run.settings]
    values: set[str | None] = {json.dumps(settings[path]) for settings in having}
    owner, option, _ = path.partition(".options.")
    if option and len(having) < len(runs):
        takes = {settings.get(f"{owner}.name") for settings in having}
        values |= {None for run in runs if path not in run.settings and run.settings.get(f"{owner}.name") in takes}
    return values


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
