"""Tables of numbers that a user brings: measured devices and when they were available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raysim.lazy import pq


def columns_of(file: str) -> dict[str, np.ndarray]:
    """The columns of a Parquet or CSV file, float64 [rows]. Raises OSError and ValueError, which name it."""
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}.")
    try:
        if Path(file).suffix == ".parquet":
            table = pq.read_table(file)
            return {name: table[name].to_numpy().astype(np.float64) for name in table.column_names}
        made: Any = np.atleast_1d(np.genfromtxt(file, np.float64, delimiter=",", names=True))
        return {name: made[name] for name in made.dtype.names or ()}
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file} is no table of numbers (Parquet, or CSV with names in its first line): {error}"
        ) from None
