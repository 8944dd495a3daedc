"""Rounds in which the machine had its cores for itself. The host of a virtual machine gives them to others now and then;
the kernel counts that as stolen time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

QUIET = 0.02  # of the cores' time may be stolen in a round
MOST = 4  # times as many rounds as wanted are run


@dataclass(frozen=True)
class Turns:
    kept: list[int]  # the calls that lost least, counted from 0
    stolen: list[float]  # the share of the cores that was stolen in every call, those not kept among them

    def recorded(self) -> dict[str, float]:
        kept = statistics.mean(self.stolen[turn] for turn in self.kept)
        return {"rounds": len(self.stolen), "stolen": statistics.mean(self.stolen), "stolen_in_those_kept": kept}


def undisturbed(turn: Callable[[], object], wanted: int) -> Turns:
    """Call `turn` until so many of its calls were undisturbed, or `MOST` times as many have been made."""
    stolen: list[float] = []
    while len(stolen) < MOST * wanted and sum(share <= QUIET for share in stolen) < wanted:
        before, began = psutil.cpu_times().steal, time.perf_counter()
        turn()
        cores = (time.perf_counter() - began) * psutil.cpu_count()
        stolen.append((psutil.cpu_times().steal - before) / cores)
    return Turns(sorted(sorted(range(len(stolen)), key=stolen.__getitem__)[:wanted]), stolen)
