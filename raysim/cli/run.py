"""`raysim run` and `raysim resume`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from raysim.cli.options import Address, ConfigName, Overrides
from raysim.play.errors import reported
from raysim.play.terminal import play


def run(
    config: ConfigName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: in record.dir.")] = None,
    address: Address = None,
) -> None:
    """Simulate the federation that CONFIG describes."""
    from raysim.config import load
    from raysim.config.shipped import find
    from raysim.play.folder import new_folder

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
