"""Many clients as few blocks of neighbours, so that figures are readable and pages small however many clients there are."""

from __future__ import annotations

import numpy as np

ONE_BY_ONE = 2000  # so many clients are shown each for itself
BLOCKS = 400


def edges(clients: int) -> np.ndarray:
    """[b + 1] the first client of each block, and `clients`; up to ONE_BY_ONE clients, each is a block."""
    if clients <= ONE_BY_ONE:
        return np.arange(clients + 1)
    return np.linspace(0, clients, BLOCKS + 1).astype(int)


def block_of(clients: int) -> np.ndarray:
    """[clients] the block of each."""
    return np.repeat(np.arange(len(edges(clients)) - 1), np.diff(edges(clients)))


def means(values: np.ndarray) -> np.ndarray:
    """[b, ...] mean of `values` [clients, ...] over the clients of each block."""
    ends = edges(len(values))
    sizes = np.diff(ends).reshape(-1, *(1,) * (values.ndim - 1))
    return np.asarray(np.add.reduceat(values, ends[:-1], axis=0) / sizes)


def names(clients: np.ndarray) -> list[str]:
    """What each block of these clients is called: `17`, or `1000–1249`."""
    ends = edges(len(clients))
    first, last = clients[ends[:-1]].tolist(), clients[ends[1:] - 1].tolist()
    return [str(a) if a == b else f"{a}–{b}" for a, b in zip(first, last, strict=True)]


def cells(places: tuple[np.ndarray, ...], values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An array of that shape with the mean of the `values` [n] at each of the `places` (arrays [n]), NaN where there is
    none."""
    flat = np.ravel_multi_index(places, shape)
    present = ~np.isnan(values)
    size = int(np.prod(shape))
    count = np.bincount(flat[present], minlength=size)
    with np.errstate(invalid="ignore"):
        found = np.bincount(flat[present], values[present], minlength=size) / count
    return np.asarray(found.reshape(shape))
