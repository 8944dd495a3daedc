"""How a run shows its rounds: a line for each, or one line with a bar that is written over."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from raysim.cli.lines import percent


def progress() -> Bar | Lines:
    """A bar where the standard output is a terminal that can write over a line, else lines."""
    return Bar() if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else Lines()


class Lines:
    """A line for each round."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, summary: Mapping[str, Any]) -> None:
        print(round_line(summary), flush=True)


class Bar:
    """The last round and the time left, in the bottom line of a terminal; other output appears above it."""

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

    def show(self, summary: Mapping[str, Any]) -> None:
        done, total = summary["round"] + 1, summary["rounds"]
        if self._task is None:  # a resumed run does not begin at 0
            self._task = self._progress.add_task("", total=total, completed=done - 1)
        self._progress.update(self._task, completed=done, description="   ".join((position(summary), *scores(summary))))


def round_line(summary: Mapping[str, Any]) -> str:
    """One line on a round, of what `Federation.step` returns."""
    clients = f"clients {summary['clients_ok']} ok, {summary['clients_failed']} failed"
    return "   ".join((position(summary), *scores(summary), clients, f"{summary['seconds']:.2f} s"))


def position(summary: Mapping[str, Any]) -> str:
    """`round  5/20`: people count from 1."""
    total = str(summary["rounds"])
    return f"round {summary['round'] + 1:>{len(total)}}/{total}"


def scores(summary: Mapping[str, Any]) -> list[str]:
    """Accuracy of the global model and of the clients' own, whichever were tested, and the loss."""
    accuracy, tested = summary["accuracy"], summary["loss"] is not None
    personal = summary.get("personal_accuracy_micro")
    loss = summary["loss"] if tested else summary["train_loss"]
    return [
        *([f"accuracy {percent(accuracy):>7}"] if personal is None or accuracy is not None else []),
        *([f"personal {percent(personal):>7}"] if personal is not None else []),
        f"{'test' if tested else 'train'} loss {'-' if loss is None else format(loss, '.4f'):>7}".rjust(18),
    ]
