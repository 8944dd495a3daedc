"""`raysim run` and `raysim resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysim.api.errors import reported
from raysim.api.terminal import run_in_terminal
from raysim.cli.options import AcceptChangedCode, Address, Changes, ConfigName, OtherSettings, Overrides
from raysim.printable import printable


def run(
    config: ConfigName,
    changes: Changes = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: in record.dir.")] = None,
    address: Address = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="The same as engine.ray.dashboard=true.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run: settings, clients, model, traffic; start nothing.")
    ] = False,
) -> None:
    """Simulate the federation that CONFIG describes."""
    from raysim.api.folder import new_folder
    from raysim.config import load
    from raysim.config.shipped import find

    with reported():
        shown = ["engine.ray.dashboard=true"] if dashboard else []
        settings = load(find(config), [*(overrides or ()), *(changes or ()), *shown])
        if dry_run:
            from raysim.api.preview import preview
            from raysim.config.identity import to_annotated_yaml

            print(printable(f"{preview(settings, address)}\n\n{to_annotated_yaml(settings)}", lines=True))
            return
        folder = new_folder(out, Path(settings.record.dir), settings.name)
        status = run_in_terminal(settings, folder, address, resume=False)
    raise typer.Exit(status)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that was stopped or is complete.")],
    changes: Changes = None,
    overrides: OtherSettings = None,
    accept_changed_code: AcceptChangedCode = False,
    address: Address = None,
) -> None:
    """Continue a run from its last checkpoint, to the same bits as if it had not stopped.

    With --set it goes on for more rounds, or with other settings on which no bit depends, such as those of evaluate and record.
    """
    from raysim.federation.code import saved_config

    with reported():
        config = saved_config(folder, [*(overrides or ()), *(changes or ())])
        status = run_in_terminal(config, folder, address, resume=True, accept_changed_code=accept_changed_code)
    raise typer.Exit(status)
