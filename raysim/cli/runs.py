"""`raysim runs`, `compare`, `tag`, `note` and `rm`: living with many runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysim.api.errors import reported
from raysim.api.lines import aligned, percent, scored
from raysim.paths import natural
from raysim.printable import printable

if TYPE_CHECKING:
    from raysim.report.runs import Run


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Folders that are or hold runs; default: runs.")
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Only runs with this tag.")] = None,
) -> None:
    """List runs: name, methods, data, seed, rounds, score, age, state, tags and the first line of the note."""
    from raysim.report.runs import find

    with reported():
        found = sorted(find(folders or [Path("runs")]), key=lambda run: natural(run.folder))
        found = [run for run in found if tag is None or tag in run.tags]
        rows = [("run", "methods", "data", "seed", "round", "score", "age", "state", "")]
        rows += [
            (
                *(str(run.folder), run.stack, str(run.settings["data.name"]), str(run.seed)),
                *(f"{run.rounds_done}/{run.rounds}", last_score(run), age(run), run.state),
                "  ".join(filter(None, (" ".join(f"#{one}" for one in run.tags), run.note.partition("\n")[0]))),
            )
            for run in found
        ]
        print("\n".join(aligned(rows)))


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of two or more runs.")],
) -> None:
    """Show in what runs differ: settings, scores, hashes."""
    from raysim.config import ConfigError, show
    from raysim.report.groups import differences
    from raysim.report.runs import find

    with reported():
        found = find(folders)
        if len(found) < 2:
            raise ConfigError("raysim compare: name two runs or more, or a folder that holds them.")
        settings = [run.settings for run in found]
        paths = differences(found) + ["seed"] * (len({run.seed for run in found}) > 1)
        rows = [("", *(str(run.folder) for run in found))]
        rows += [(path, *(show(own[path]) if path in own else "-" for own in settings)) for path in paths]
        rows += [("rounds", *(f"{run.rounds_done}/{run.rounds}" for run in found)), ("score", *map(last_score, found))]
        hashes = [run.result["sha256"] if run.result else None for run in found]
        rows.append(("sha256", *(one[:16] if one else "-" for one in hashes)))
        print("\n".join(aligned(rows)))
        if None not in hashes:
            print("\nThe same bits." if len(set(hashes)) == 1 else "\nNot the same bits.")


def tag(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Without: show those it has.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take these tags away.")] = False,
) -> None:
    """Put tags on a run, by which `raysim runs --tag` finds it."""
    from raysim.report.runs import Run

    with reported():
        run = Run(folder)
        if tags:
            run.label(remove=tags) if remove else run.label(add=tags)
        print(printable(" ".join(run.tags)))


def note(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="Without: show what has been noted.")] = None,
) -> None:
    """Note something about a run, in place of what was noted before."""
    from raysim.report.runs import Run

    with reported():
        run = Run(folder)
        if text is not None:
            run.label(note=text)
        print(printable(run.note, lines=True))


def rm(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove runs with all they have written. Folders that are no run, and runs in progress, are left alone."""
    from raysim.federation.lock import run_lock
    from raysim.report import ReportError
    from raysim.report.runs import Run

    with reported():
        found = [
            Run(folder) for folder in {folder.resolve(): folder for folder in folders}.values()
        ]  # raises if no run
        _check_idle(found)
        names = printable(", ".join(str(run.folder) for run in found))
        if not yes and not typer.confirm(f"Remove {names}?"):
            return
        for run in found:
            with run_lock(run.folder):  # it may have been taken up meanwhile
                try:
                    shutil.rmtree(run.folder)
                except OSError as error:  # before Python 3.12 it has the last part of a path alone
                    raise ReportError(f"{run.folder} cannot be removed: {error.strerror or error}.") from None
            print(printable(f"removed {run.folder}"))


def _check_idle(found: Sequence[Run]) -> None:
    """Raises `ConfigError` where one of these runs is in progress."""
    from raysim.config import ConfigError

    if active := [str(run.folder) for run in found if run.state == "running"]:
        raise ConfigError(f"{', '.join(active)}: run in progress; stop it first (Ctrl-C).")


def last_score(run: Run) -> str:
    """The score by which the run is judged, as the last evaluation has it; `-` before the first."""
    from raysim.report.summary import METRIC, PERSONAL, final, judged_by, metric_names

    if judged_by([run]) == PERSONAL:
        return f"{percent(final(run, PERSONAL))} (personal)"
    if (result := run.result) and result["final"] is not None:
        return scored(result.get("headline") or "accuracy", result["final"])
    tested = {"accuracy": final(run, "accuracy")} | {name: final(run, f"{METRIC}{name}") for name in metric_names(run)}
    name = next((name for name, value in tested.items() if value is not None), "accuracy")  # the task's first
    return scored(name, tested[name]) + (" (personal)" if name.startswith("personal_") else "")


def age(run: Run) -> str:
    """Time since the run began, in the largest unit that fits: 5 min, 3 h, 2 d."""
    seconds = max(0.0, time.time() - (run.folder / "config.yaml").stat().st_mtime)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
