"""`raysim run` and `raysim resume`."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from raysim.cli.errors import reported
from raysim.cli.options import Address, ConfigName, Overrides
from raysim.cli.play import play
from raysim.paths import below


def run(
    config: ConfigName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: in record.dir.")] = None,
    address: Address = None,
) -> None:
    """Simulate the federation that CONFIG describes."""
    from raysim.config import load
    from raysim.shipped import find

    with reported():
        settings = load(find(config), overrides or ())
        folder = new_folder(out, Path(settings.record.dir), settings.name)
        try:
            status = play(settings, folder, address, resume=False)
        finally:
            with suppress(OSError):
                folder.rmdir()  # succeeds only while it is empty: a launch that failed leaves nothing behind
    raise typer.Exit(status)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that was stopped or is complete.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Go on with another setting: rounds.total=200 plays more."),
    ] = None,
    address: Address = None,
) -> None:
    """Continue a run from its last checkpoint, to the same bits as if it had not stopped.

    With --set it goes on for more rounds, or with other settings of evaluate, record and engine.
    """
    from raysim.config import ConfigError, load

    with reported():
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{folder}: holds no config.yaml, so it is not the folder of a run.")
        status = play(load(folder / "config.yaml", overrides or ()), folder, address, resume=True)
    raise typer.Exit(status)


def new_folder(out: Path | None, parent: Path, name: str) -> Path:
    """Make the run's folder: `out`, or NAME-DATE-TIME in `parent`. Refuses a folder that holds anything."""
    from raysim.config import ConfigError

    if out is not None:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out}: is a file; name a folder.")
        if out.is_dir() and any(out.iterdir()):
            is_run = (out / "config.yaml").exists()
            way_out = f", or continue with `raysim resume {out}`" if is_run else ""
            raise ConfigError(f"--out {out}: is not empty. Name a new or empty folder{way_out}.")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be made: {error.strerror}.") from None
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
