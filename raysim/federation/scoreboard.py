"""The evaluations of a run so far: which was the best, and whether they end the run (`rounds.until`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysim.config import Config
from raysim.core.task import Task
from raysim.federation.scores import judged_by

Row = Mapping[str, Any]  # of the table `rounds`


@dataclass
class Scoreboard:
    """Nothing is evaluated yet; `add` takes in a round."""

    config: Config
    task: Task
    best: tuple[int, float] | None = None  # round and score
    since_best: int = 0  # evaluations after the best of those that count
    ended: str | None = None  # why the run ends with the last round that was added
    _to_beat: float | None = None  # the best score of those that count

    def add(self, t: int, row: Row, wall: float, counts: bool = True) -> bool:
        """Take in round t, which ended after so many seconds of the run; returns whether its score is the best so far.
        Where it does not count, the end of the run does not depend on it."""
        column, higher_is_better = judged_by(self.config, self.task)
        score: float | None = row.get(column)
        if score is None:  # not evaluated
            return False

        def beats(other: float | None) -> bool:
            if other is None:
                return not math.isnan(score)
            return score > other if higher_is_better else score < other

        better = beats(self.best and self.best[1])
        if better:
            self.best = (t, score)
        if counts:
            if beats(self._to_beat):
                self._to_beat, self.since_best = score, 0
            else:
                self.since_best += 1
            self.ended = self._why(score, row, wall)
        return better

    def _why(self, score: float, row: Row, wall: float) -> str | None:
        until, loss, clock = self.config.rounds.until, row.get("loss"), row.get("sim_clock")
        if until.accuracy is not None and score >= until.accuracy:
            return f"accuracy {score:.4f} has reached {until.accuracy:g}"
        if until.loss is not None and loss is not None and loss <= until.loss:
            return f"loss {loss:.4f} has reached {until.loss:g}"
        if until.seconds is not None and wall >= until.seconds:
            return f"{until.seconds:g} seconds are over"
        if until.sim_seconds is not None and clock is not None and clock >= until.sim_seconds:
            return f"{until.sim_seconds:g} simulated seconds are over"
        if until.patience is not None and self.since_best >= until.patience:
            return f"no evaluation of the last {until.patience} was the best"
        return None
