"""How a run shows its rounds: a line for each or for each minute, a bar that is written over, or a notebook's cell."""

from __future__ import annotations

import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.api.lines import scored
from raysim.clock import CLOCK, Clock

if TYPE_CHECKING:
    from raysim.api.simulation import RoundResult

MINUTE = 60.0
# Seconds after which a notebook's line and its curve are new; tables are up to five seconds old.
ANNOUNCED, REDRAWN = 0.5, 5.0


def progress() -> Bar | Lines:
    """What a command shows: a bar where the standard output can show one, else lines."""
    return Bar() if in_terminal() else Lines()


def progress_of_script(folder: Path, wanted: bool | None) -> Bar | Cell | Minutes | nullcontext[None]:
    """What a script or a notebook shows of the run in `folder`, if it is `wanted`; None: minutes where there is no bar."""
    if wanted is False:
        return nullcontext()
    if in_notebook():
        return Cell(folder)
    return Bar() if wanted or in_terminal() else Minutes(folder)


def in_terminal() -> bool:
    """Whether the standard output is a terminal that can write over a line."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


class Lines:
    """A line for each round."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, round: RoundResult) -> None:
        print(round_line(round), flush=True)


class Minutes:
    """Where the run lies, then the last round once a minute, on the standard error: the output is the script's."""

    def __init__(self, folder: Path, clock: Clock = CLOCK):
        self._folder, self._clock = folder, clock

    def __enter__(self) -> Minutes:
        print(f"raysim: the run is in {self._folder}", file=sys.stderr, flush=True)
        self._announced = self._clock.now()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, round: RoundResult) -> None:
        if (now := self._clock.now()) - self._announced >= MINUTE:
            self._announced = now
            print(round_line(round), file=sys.stderr, flush=True)


class Cell:
    """A bar and the last round below a notebook's cell, above what `Run` shows of the run so far."""

    def __init__(self, folder: Path, clock: Clock = CLOCK):
        self._folder, self._clock = folder, clock

    def __enter__(self) -> Cell:
        self._line, self._bar, self._run = "starting", "<progress></progress>", ""
        self._announced = self._drawn = self._clock.now()
        display = sys.modules["IPython"].display.display  # IPython is there, or this would be no notebook
        self._handle: Any = display(self._shown(), raw=True, display_id=True)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._draw()
        self._handle.update(self._shown(), raw=True)

    def show(self, round: RoundResult) -> None:
        self._line = round_line(round)
        self._bar = f'<progress value="{round.number}" max="{round.rounds}"></progress>'
        now = self._clock.now()
        if now - self._drawn >= REDRAWN:
            self._drawn = now
            self._draw()
        if now - self._announced >= ANNOUNCED:
            self._announced = now
            self._handle.update(self._shown(), raw=True)

    def _draw(self) -> None:
        from raysim.report.runs import Run

        self._run = Run(self._folder)._repr_html_()

    def _shown(self) -> dict[str, str]:
        line = f'<div>{self._bar} <code style="white-space: pre">{self._line}</code></div>'
        return {"text/plain": self._line, "text/html": line + self._run}


class Bar:
    """The last round and the time left, in the bottom line of a terminal, below a line for each round and other output."""

    def __enter__(self) -> Bar:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn(), TextColumn("left"),
            refresh_per_second=2,
            redirect_stderr=sys.stderr.isatty(),
            speed_estimate_period=math.inf,  # a round may take minutes, longer than the usual window
        )  # fmt: skip
        self._progress.start()
        self._task: Any = None
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, round: RoundResult) -> None:
        done, total = round.number, round.rounds
        if self._task is None:  # a resumed run does not begin at 0
            self._task = self._progress.add_task("", total=total, completed=done - 1)
        row = "   ".join((position(round), *scores(round)))
        self._progress.update(
            self._task, completed=done, description=row, refresh=True
        )  # before the line moves it down
        if sys.stdout.isatty():
            self._progress.console.out(round_line(round), highlight=False)


def round_line(round: RoundResult) -> str:
    """One line on a round."""
    clients = f"clients {round.clients_ok} ok, {round.clients_failed} failed"
    return "   ".join((position(round), *scores(round), clients, f"{round.seconds:.2f} s"))


def position(round: RoundResult) -> str:
    """`round  5/20`: people count from 1."""
    return f"round {round.number:>{len(str(round.rounds))}}/{round.rounds}"


def scores(round: RoundResult) -> list[str]:
    """The headline of the global model and of the clients' own, whichever were tested, and the loss."""
    name, score, tested = round.headline, round.score, round.loss is not None
    personal = round.metrics.get("personal_accuracy_micro" if name == "accuracy" else f"personal_{name}")
    loss = round.loss if tested else round.train_loss
    return [
        *([f"{name} {scored(name, score):>7}"] if name and (personal is None or score is not None) else []),
        *([f"personal {scored(name, personal):>7}"] if name and personal is not None else []),
        f"{'test' if tested else 'train'} loss {'-' if loss is None else format(loss, '.4f'):>7}".rjust(18),
    ]
