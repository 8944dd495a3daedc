"""Measured devices and traces of availability, as the tables that `clock` reads: those of FedScale (Lai et al., 2022) and of
FLASH (Yang et al., Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale Smartphone Data, 2021)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from raysim.data.errors import DataError
from raysim.data.pickles import read_arrays

TRAINING = 3.0  # times as long as inference
KBIT = 1024 / 8  # bytes
EPOCH = datetime(2020, 1, 2)  # FLASH's second 0
CHANGES = {
    "battery_charged_on": ("charging", True), "battery_charged_off": ("charging", False),
    "screen_lock": ("locked", True), "screen_unlock": ("locked", False),
    "wifi": ("wifi", True), **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False)),
}  # fmt: skip
"""What FLASH writes of a phone, as far as it decides whether the phone is available."""

Row = dict[str, float]


def read_devices(file: Path) -> dict[str, np.ndarray]:
    """The columns [rows] of a table for `clock`, sorted by client, from FedScale's `client_device_capacity` (`client`, `speed` in
    samples a second, `up` and `down` in bytes a second), or from its `client_behave_trace` or FLASH's `state_traces` (`client`,
    `start`, `stop` and `period` in seconds). Raises `DataError`."""
    rows: list[Row] = []
    for client, entry in sorted(_held(file).items(), key=lambda item: str(item[0]).zfill(12)):
        try:
            reader = next(reader for key, reader in READERS.items() if key in entry)
            rows += [{"client": float(client), **row} for row in reader(entry)]
        except StopIteration:
            raise DataError(f"{file}: client {client} has neither of {', '.join(READERS)}; fetch it again") from None
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise DataError(f"{file}: client {client} cannot be read ({error!r}); fetch it again") from None
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise DataError(f"{file}: holds no devices and no traces, or some of both")
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _held(file: Path) -> dict[Any, Any]:
    """What FedScale says of each client in a pickle, or FLASH in JSON, whose clients are numbered in their order."""
    with suppress(OSError), open(file, "rb") as start:
        if start.read(1) == b"{":
            try:
                return dict(enumerate(json.loads(file.read_text(encoding="utf-8")).values()))
            except ValueError as error:
                raise DataError(f"{file}: is no JSON ({error}); fetch it again") from None
    return read_arrays(file)


def _device(entry: dict[str, Any]) -> Iterator[Row]:
    """`computation` is milliseconds of inference a sample, `communication` kbit a second, both ways."""
    rate = float(entry["communication"]) * KBIT
    yield {"speed": 1000 / (TRAINING * float(entry["computation"])), "up": rate, "down": rate}


def _trace(entry: dict[str, Any]) -> Iterator[Row]:
    """Available from `active[i]` to `inactive[i]`, both included, and again every `finish_time` seconds."""
    period = float(entry["finish_time"])
    for active, inactive in zip(entry["active"], entry["inactive"], strict=True):
        start, stop = float(active), min(float(inactive), period)
        if start <= stop:  # else it never is
            yield {"start": start, "stop": stop, "period": period}


def _state_changes(entry: dict[str, Any]) -> Iterator[Row]:
    """Available while the phone charges, is locked and has Wi-Fi, both ends included, and again every time as long as it was
    watched. `messages` has a line for each change: date, tab, state."""
    dated = [line.split("\t") for line in entry["messages"].splitlines() if line.strip()]
    changes = [((datetime.fromisoformat(date.strip()) - EPOCH).total_seconds(), state) for date, state in dated]
    period = changes[-1][0] - changes[0][0] if changes else 0.0
    now, since = dict.fromkeys(("charging", "locked", "wifi"), False), None
    for at, state in [*changes, (changes[-1][0], "unknown")] if period else ():
        now |= [CHANGES[known]] if (known := state.strip().lower()) in CHANGES else []
        if all(now.values()):
            since = at if since is None else since
        elif since is not None:
            start, stop = since % period, since % period + at - since
            yield {"start": start, "stop": min(stop, period), "period": period}
            if stop > period:  # the spell goes on where the period begins again
                yield {"start": 0.0, "stop": stop - period, "period": period}
            since = None


READERS: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "computation": _device, "active": _trace, "messages": _state_changes,
}  # fmt: skip
