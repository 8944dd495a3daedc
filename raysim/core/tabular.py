"""Tables of numbers that a user brings: measured devices and when they were available."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from raysim.lazy import pq


class OfFiles:
    """Settings that may name files. A resumed run reads the files that it began with, or stops."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it reads."""
        return ()

    def check(self) -> str | None:
        """What is wrong with them."""
        return None


def columns_of(file: str) -> dict[str, np.ndarray]:
    """The columns of a Parquet or CSV file, float64 [rows]. Raises ValueError, which names it."""
    return _read(file, changed(file))


def changed(file: str) -> int:
    """When the file was written last, for those who remember what it holds. Raises ValueError where it cannot be read."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from None


@lru_cache(8)
def _read(file: str, written: int) -> dict[str, np.ndarray]:
    try:
        if Path(file).suffix == ".parquet":
            table = pq.read_table(file)
            return {name: table[name].to_numpy().astype(np.float64) for name in table.column_names}
        made: Any = np.atleast_1d(np.genfromtxt(file, np.float64, delimiter=",", names=True))
        return {name: made[name] for name in made.dtype.names or ()}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is no table of numbers (Parquet, or CSV with names in its first line): {error}"
        ) from None
