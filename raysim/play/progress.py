"""How a run shows its rounds: a line for each, or one line with a bar that is written over."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

from raysim.play.lines import scored

if TYPE_CHECKING:
    from raysim.play.simulation import PlayedRound


def progress() -> Bar | Lines:
    """A bar where the standard output can show one, else lines."""
    return Bar() if can_show_bar() else Lines()


def can_show_bar() -> bool:
    """Whether the standard output is a terminal that can write over a line, or a notebook's."""
    in_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return in_terminal or hasattr(shell, "kernel")


class Lines:
    """A line for each round."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, round: PlayedRound) -> None:
        print(round_line(round), flush=True)


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

    def show(self, round: PlayedRound) -> None:
        done, total = round.number, round.rounds
        if self._task is None:  # a resumed run does not begin at 0
            self._task = self._progress.add_task("", total=total, completed=done - 1)
        self._progress.update(self._task, completed=done, description="   ".join((position(round), *scores(round))))
        if sys.stdout.isatty():  # a notebook's cell would fill up
            self._progress.console.out(round_line(round), highlight=False)


def round_line(round: PlayedRound) -> str:
    """One line on a round."""
    clients = f"clients {round.clients_ok} ok, {round.clients_failed} failed"
    return "   ".join((position(round), *scores(round), clients, f"{round.seconds:.2f} s"))


def position(round: PlayedRound) -> str:
    """`round  5/20`: people count from 1."""
    return f"round {round.number:>{len(str(round.rounds))}}/{round.rounds}"


def scores(round: PlayedRound) -> list[str]:
    """The headline of the global model and of the clients' own, whichever were tested, and the loss."""
    name, score, tested = round.headline, round.score, round.loss is not None
    personal = round.metrics.get("personal_accuracy_micro" if name == "accuracy" else f"personal_{name}")
    loss = round.loss if tested else round.train_loss
    return [
        *([f"{name} {scored(name, score):>7}"] if name and (personal is None or score is not None) else []),
        *([f"personal {scored(name, personal):>7}"] if name and personal is not None else []),
        f"{'test' if tested else 'train'} loss {'-' if loss is None else format(loss, '.4f'):>7}".rjust(18),
    ]
