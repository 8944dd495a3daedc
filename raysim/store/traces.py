"""Traces: every tensor of chosen rounds, so that a round can be recomputed by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from raysim.paths import below
from raysim.store.atomic import subfolder, write_tensors
from raysim.store.documents import read_tensors

if TYPE_CHECKING:
    from torch import Tensor


class Trace:
    """Writes the tensors of chosen rounds to `traces/round-0003/<name>.safetensors`, of the third round, in the run folder.

    `rounds` is 'rounds' for all of them, or the numbers of some, from 1. Names are such as before, after, client-0007,
    client-0007.init, client-0007.state.before. Raises ValueError for any other text.
    """

    def __init__(self, folder: Path, rounds: Literal["rounds"] | Collection[int] = ()):
        if isinstance(rounds, str) and rounds != "rounds":
            raise ValueError(f"traces: {rounds!r} is neither 'rounds' nor a list of rounds")
        self.folder = Path(folder) / "traces"
        self._rounds = None if isinstance(rounds, str) else frozenset(rounds)

    def wants(self, t: int) -> bool:
        """Whether round `t`, from 0, is traced."""
        return self._rounds is None or t + 1 in self._rounds

    def path(self, t: int, name: str) -> Path:
        """The file for a name in round `t`, from 0."""
        return below(self.folder, f"round-{t + 1:04d}/{name}.safetensors")

    def write(self, t: int, name: str, tensors: Mapping[str, Tensor | np.ndarray]) -> None:
        """Write tensors of round `t`, from 0, under their `state_dict` names."""
        path = self.path(t, name)
        subfolder(self.folder)
        subfolder(path.parent)
        write_tensors(path, tensors)

    def write_arrays(self, t: int, name: str, arrays: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Write integer arrays of unequal lengths, such as the sample indices of every step, for `read_arrays`.

        The file holds `values`, all of them in a row, and `offsets` [n + 1]: array i is
        values[offsets[i]:offsets[i + 1]]. Both are int64.
        """
        parts = [np.asarray(array, dtype=np.int64) for array in arrays]
        values = np.concatenate([np.empty(0, np.int64), *parts])
        offsets = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        self.write(t, name, {"values": values, "offsets": offsets})


def traced(folder: Path) -> dict[int, Path]:
    """The folders of a run's traced rounds, by their numbers from 0. Those of raysim 0.1.0 are in `trace`, and count from 0."""
    names = ("trace", 0), ("traces", 1)
    return {int(path.name[6:]) - first: path for name, first in names for path in (folder / name).glob("round-*")}


def read_arrays(path: Path) -> list[np.ndarray]:
    """The int64 arrays that `Trace.write_arrays` wrote."""
    tensors = {name: tensor.numpy() for name, tensor in read_tensors(path).items()}
    return np.split(tensors["values"], tensors["offsets"][1:-1]) if len(tensors["offsets"]) > 1 else []
