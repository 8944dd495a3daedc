"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from raysim.cli import complete

ConfigName = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="YAML file, or the name of a configuration that comes with raysim: quickstart.",
        autocompletion=complete.configurations,
    ),
]


def _overrides(metavar: str, words: str) -> Any:
    """`--set`."""
    return typer.Option("--set", metavar=metavar, help=words, autocompletion=complete.settings)


def _changes(metavar: str) -> Any:
    """The same without `--set`."""
    return typer.Argument(metavar=metavar, help="The same as --set.", autocompletion=complete.settings)


Words = list[str] | None
Overrides = Annotated[Words, _overrides("PATH=VALUE", "Override a setting: rounds.total=5, server.0.fedlws.beta=0.2.")]
OtherSettings = Annotated[Words, _overrides("PATH=VALUE", "Change a setting, e.g. rounds.total=200 to train longer.")]
Varied = Annotated[Words, _overrides("PATH=V,V,...", "Vary a setting: server.0.fedlws.beta=0.01,0.1.")]
Changes = Annotated[Words, _changes("[PATH=VALUE]...")]
VariedChanges = Annotated[Words, _changes("[PATH=V,V,...]...")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="Ray cluster to join; default: RAY_ADDRESS, or what `raysim up` keeps, or a new one."
    ),
]
RunPaths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that contain runs.")]
Target = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Accuracy to reach, a fraction; default: a whole percentage that every run reached."
    ),
]
AcceptChangedCode = Annotated[
    bool,
    typer.Option(
        "--accept-changed-code",
        help="Go on although a model, method, data set or metric of an installed package is not what it was.",
    ),
]
Seeds = Annotated[str, typer.Option(metavar="SEED,SEED,...", help="Run everything with each of these seeds.")]
Parallel = Annotated[
    str,
    typer.Option(
        metavar="N|auto", help="Runs at a time, each a process of its own; auto: as many as the machine holds."
    ),
]


class Format(StrEnum):
    """How a table is written for a paper."""

    latex = "latex"
    csv = "csv"
    markdown = "markdown"
    html = "html"


TableFormat = Annotated[
    Format | None,
    typer.Option("--format", help="Also the table, for a paper: best bold, second underlined, marks of significance."),
]


def seed_numbers(seeds: str) -> list[int]:
    """`8,9,10` as a list. Raises `ConfigError`."""
    from raysim.config import ConfigError

    try:
        return [int(seed) for seed in seeds.split(",") if seed]
    except ValueError:
        raise ConfigError(f"--seeds {seeds}: must be whole numbers between commas, such as 8,9,10.") from None


def runs_at_once(parallel: str) -> int | None:
    """`--parallel` as a number; None: as many as the machine holds. Raises `ConfigError`."""
    from raysim.config import ConfigError

    if parallel != "auto" and not (parallel.isdecimal() and int(parallel)):
        raise ConfigError(f"--parallel {parallel}: must be a whole number > 0, or auto.")
    return None if parallel == "auto" else int(parallel)
