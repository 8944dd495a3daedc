"""The command `raysim`: every command group mounted. Heavy imports wait inside the commands, so that help comes at once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from raysim.api.errors import shown as sentence
from raysim.cli import catalogue, cluster, doctor, export, look, new, run, runs, sweep

HELP = {"help_option_names": ["-h", "--help"]}
SETTINGS = {"ignore_unknown_options": True}  # `--seed 3` reaches the reader of settings, which says how to write it

app = typer.Typer(
    help="Federated learning simulated with Ray actors and PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug's traceback belongs in a report as Python prints it
    context_settings=HELP,
)
data = typer.Typer(help="Look at data before training on it.", no_args_is_help=True)
new_ = typer.Typer(help="Write the first lines of something of your own.", no_args_is_help=True)

app.command(context_settings=SETTINGS)(run.run)
app.command(context_settings=SETTINGS)(run.resume)
app.command(context_settings=SETTINGS)(sweep.sweep)
app.command()(sweep.reproduce)
app.command()(runs.runs)
app.command()(runs.compare)
app.command()(runs.tag)
app.command()(runs.note)
app.command()(runs.rm)
app.command()(look.report)
app.command()(look.watch)
app.command()(look.plot)
app.command()(look.measure)
app.command()(export.table)
app.command()(export.export)
app.command()(export.schema)
app.command("list")(catalogue.list_)
app.command()(catalogue.explain)
app.add_typer(data, name="data")
data.command("show")(catalogue.data_show)
data.command("devices")(catalogue.data_devices)
app.command()(new.init)
app.add_typer(new_, name="new")
new_.command("method")(new.method)
app.command()(doctor.doctor)
app.command()(cluster.up)
app.command()(cluster.down)


@new_.callback()
@data.callback()
def group() -> None:
    """Keeps a group with one command a group."""


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from raysim.version import __version__

        print(f"raysim {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. A warning of raysim's own is one line; any other is as Python prints it."""
    usual = warnings.formatwarning

    def shown(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        ours = Path(filename).is_relative_to(Path(__file__).parents[1])
        return f"{sentence(f'raysim: {message}')}\n" if ours else usual(message, category, filename, lineno, line)

    warnings.formatwarning = shown
    app(prog_name="raysim")
