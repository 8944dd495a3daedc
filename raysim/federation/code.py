"""The code of a user that a run uses: which it is, and whether a saved run may go on with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raysim.config import Config, ConfigError, entries_of, load
from raysim.config.load import Override
from raysim.core.task import Task
from raysim.definition import Definition
from raysim.registry import REGISTRY
from raysim.store.code import Changes, changes, recorded, unregistered
from raysim.store.manifest import DamagedManifest

ACCEPT = "--accept-changed-code"
WAYS = f"Put it back, start another run, or go on with it as it is now: {ACCEPT}, in Python accept_changed_code=True"


def definitions_of(config: Config, task: str | Task | None) -> dict[tuple[str, str], Definition]:
    """By kind and name, what defines all that a run takes from the registry and that is not raysim's own; `task` is what its
    data set learns where the configuration does not say it."""
    named = entries_of(config)
    if config.data.task is None and isinstance(task, str):
        named.append(("task", task))
    found = {(kind, name): REGISTRY.table(kind).definition(name) for kind, name in named}
    return {key: definition for key, definition in found.items() if definition is not None}


def definitions_in(config: Config, folder: Path) -> dict[tuple[str, str], Definition]:
    """`definitions_of` a saved run that may go on, whose data have not been read: it names the task."""
    task = next((name for kind, name in recorded(folder) or () if kind == "task"), None)
    return definitions_of(config, task)


def check_code(config: Config, folder: Path, accept: bool) -> Changes:
    """How the user's code has changed since the run in `folder` began. Raises `ConfigError` where it has, unless
    `accept`."""
    found = changes(folder, definitions_in(config, folder))
    if found.changed and not accept:
        raise ConfigError([*found.changed, f"{WAYS}."])
    return found


def saved_config(folder: Path, overrides: Sequence[Override] = ()) -> Config:
    """The configuration of the run in `folder`, changed by `overrides`. Raises `ConfigError`, which says of the user's code
    that is not registered here what brings it."""
    path = folder / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{folder}: holds no config.yaml, so it is not the folder of a run.")
    try:
        return load(path, overrides)
    except ConfigError as error:
        try:
            missing = unregistered(folder)
        except DamagedManifest:
            raise error from None
        if missing:
            others = [fault for fault in error.faults if not any(repr(name) in fault for _, name in missing)]
            raise ConfigError([*missing.values(), *others]) from None
        raise
