"""FedScale's measured devices and traces of availability, as the tables that `clock` reads (Lai et al., FedScale, 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raysim.data.errors import DataError
from raysim.data.pickles import read_arrays

TRAINING = 3.0  # times as long as inference
KBIT = 1024 / 8  # bytes

Row = dict[str, float]


def read_devices(file: Path) -> dict[str, np.ndarray]:
    """The columns [rows] of a table for `clock`, sorted by client, from FedScale's `client_device_capacity` (`client`, `speed` in
    samples a second, `up` and `down` in bytes a second) or `client_behave_trace` (`client`, `start`, `stop` and `period` in
    seconds). Raises `DataError`."""
    rows: list[Row] = []
    for client, entry in sorted(read_arrays(file).items(), key=lambda item: str(item[0]).zfill(12)):
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


READERS: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {"computation": _device, "active": _trace}
