"""Rounds in which the machine had its cores for itself. The host of a virtual machine gives them to others now and then;
the kernel counts that as stolen time."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

QUIET = 0.02  # of the cores' time may be stolen in a round
MOST = 4  # times as many rounds as wanted are played


def undisturbed(turn: Callable[[], object], wanted: int) -> tuple[list[int], list[float]]:
    """Call `turn` until so many of its calls were undisturbed, or `MOST` times as many have been made. Returns which of them,
    counted from 0, lost least, `wanted` of them, and the share of the cores that was stolen in every call."""
    stolen: list[float] = []
    while len(stolen) < MOST * wanted and sum(share <= QUIET for share in stolen) < wanted:
        before, began = psutil.cpu_times().steal, time.perf_counter()
        turn()
        cores = (time.perf_counter() - began) * psutil.cpu_count()
        stolen.append((psutil.cpu_times().steal - before) / cores)
    return sorted(sorted(range(len(stolen)), key=stolen.__getitem__)[:wanted]), stolen
