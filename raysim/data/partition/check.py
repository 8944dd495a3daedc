"""What a scheme returns, checked: it may be a user's."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from raysim.data.errors import DataError
from raysim.data.partition.base import NOTHING, require
from raysim.data.partition.shards import Shards


def shards_of(split: Any, allowed: np.ndarray, scheme: str, way: str) -> Shards:
    """What `scheme` gives each client: disjoint positions, of those that are `allowed` [n] bool. Raises DataError with the
    client; `way` says what an array must hold."""
    if isinstance(split, Shards):
        shards = split
    else:
        listed = isinstance(split, Iterable) and not isinstance(split, Mapping)
        made = "None" if split is None else f"a {type(split).__name__}"
        require(listed, f"{scheme}: it returned {made}; return a list with an array of {way} for each client")
        shards = Shards.of(_positions(share, f"{scheme}: client {client}", way) for client, share in enumerate(split))
    rows, owners = shards.rows, shards.owners
    wrong = (rows < 0) | (rows >= len(allowed))
    wrong[~wrong] = ~allowed[rows[~wrong]]
    if wrong.any():
        first = np.argmax(wrong)
        raise DataError(f"{scheme}: client {owners[first]} gets {rows[first]}; give it {way}")
    if (given := np.bincount(rows)).max(initial=0) > 1:
        row = np.argmax(given > 1)
        holders = " and ".join(f"client {owner}" for owner in owners[rows == row][:2])
        raise DataError(f"{scheme}: {row} is given to {holders}; give each to one client, once")
    return shards


def _positions(share: Any, place: str, way: str) -> np.ndarray:
    """The array that a client is given, which is empty also as an empty list."""
    try:
        rows = np.asarray(share)
    except ValueError:
        raise DataError(f"{place} gets what is no array; give it an array [m] of {way}") from None
    if rows.shape == (0,):
        return NOTHING
    if rows.dtype == bool:
        way += ", as np.flatnonzero makes them"
    fits = rows.ndim == 1 and rows.dtype.kind in "iu"
    require(fits, f"{place} gets an array {[*rows.shape]} of {rows.dtype}; give it an array [m] of {way}")
    return rows


def checked_rows(rows: Any, samples: int, scheme: str) -> np.ndarray:
    """The `rows` [n] that a scheme partitions, of a data set of so many samples."""
    made: np.ndarray = np.asarray(rows)
    if made.ndim != 1 or made.dtype.kind not in "iu" or made.min(initial=0) < 0 or made.max(initial=0) >= samples:
        raise DataError(f"{scheme}: rows must return an array [n] of rows in 0..{samples - 1}")
    return made


def check_label_map(label_map: Any, clients: int, classes: int, scheme: str) -> None:
    """That a scheme says for each client and class, which class the client sees."""
    fits = isinstance(label_map, np.ndarray) and label_map.shape == (clients, classes) and label_map.dtype.kind in "iu"
    if not fits or label_map.min(initial=0) < 0 or label_map.max(initial=0) >= classes:
        form = f"an array [{clients}, {classes}] of classes in 0..{classes - 1}"
        raise DataError(f"{scheme}: label_map must return {form}, or None")
