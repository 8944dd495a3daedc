"""The folder that a new run gets."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryFile

from raysim.config import ConfigError
from raysim.paths import below, command


def _left_by_launch(name: str) -> bool:
    return name == ".lock" or (name.startswith(".") and name.endswith(".tmp"))


def make_out(out: Path) -> None:
    """Make the folder `out`, if need be, and try to write in it. Raises `ConfigError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"out: {out} cannot be written: {error.strerror}.") from None


def new_folder(out: Path | None, parent: Path, name: str) -> Path:
    """Make the run's folder: `out`, or NAME-DATE-TIME in `parent`. Refuses a folder that holds anything but what a launch
    that was killed has left."""
    if out is not None:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"out: {out} is a file; name a folder.")
        if out.is_dir() and not all(_left_by_launch(path.name) for path in out.iterdir()):
            is_run = (out / "config.yaml").exists()
            way_out = f", or continue with {command('resume', out)}" if is_run else ""
            raise ConfigError(f"out: {out} is not empty. Name a new or empty folder{way_out}.")
        make_out(out)
        return out
    stem, number = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        folder = below(parent, stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run of that name began in the same second
            number += 1
        except OSError as error:
            raise ConfigError(f"record.dir: {folder} cannot be made: {error.strerror}.") from None
