"""The folder of a run belongs to one process at a time; what that process must know of it before it goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from raysim.config import Config, ConfigError, differences, fingerprint, load
from raysim.paths import command
from raysim.store.atomic import open_to_append
from raysim.store.documents import read_result
from raysim.store.lock import release, take
from raysim.store.manifest import read_manifest


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the run in `folder`, which is made if need be, and removed where nothing was written. Raises
    `ConfigError` where another process holds it, and `Foreign`."""
    folder.mkdir(parents=True, exist_ok=True)
    here = folder.absolute()  # the working folder may be another at the end
    path = here / ".lock"
    with os.fdopen(open_to_append(path), "a") as lock:
        try:
            take(lock.fileno())
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process uses this run; wait until it has ended.") from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            if here.is_dir() and list(here.iterdir()) == [path]:  # a launch that failed leaves nothing behind
                path.unlink()
                with suppress(OSError):  # another process may have begun there just now
                    here.rmdir()
            with suppress(OSError):  # a file system without locks
                release(lock.fileno())


def finished_result(config: Config, folder: Path) -> dict[str, Any] | None:
    """What a run ended with, and its folder; None where `config` has more rounds to run."""
    result = read_result(folder) or {}
    complete = result.get("rounds") == config.rounds.total
    if result.get("ended"):  # which other settings might not have done
        complete |= read_manifest(folder).get("config_hash") == fingerprint(config)
    return result | {"folder": folder} if complete else None


def without_effect(config: Config, folder: Path) -> list[str]:
    """A sentence on the settings that the complete run in `folder` does not have and cannot take any more, if any."""
    paths = differences(load(folder / "config.yaml"), config)
    have = "has" if len(paths) == 1 else "have"
    way_out = "a larger rounds.total lets it go on with new settings"
    return [f"{folder}: the run is complete, so {', '.join(paths)} {have} no effect; {way_out}"] if paths else []


def how_to_continue(folder: Path) -> str:
    """A sentence for who has stopped the run in `folder`, or whose machines have."""
    resume = command("resume", folder)
    if any((folder / "checkpoints").glob("*.json")):
        return f"{resume} continues."
    started = (folder / "config.yaml").exists()
    return (
        f"There is no checkpoint yet: {resume} starts at round 1."
        if started
        else "Nothing was written; start it again."
    )
