"""A simulator's turns. Without PyTorch, which the process of raysim's script does not import, either."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

import numpy as np


class Turns:
    """A simulator runs its rounds in turns with the others, as the benchmark says."""

    def __init__(self) -> None:
        self.rounds = int(os.environ["PEERS_ROUNDS"])
        self.ran = 0
        self._line = Connection(int(os.environ["PEERS_LINE"]))

    def after(self, ran: int, parameters: Callable[[], Iterable[np.ndarray]]) -> None:
        """Tell that so many rounds have been run, and return when the next may begin; after the last one, tell
        what it left of the model."""
        self.ran = ran
        if ran < self.rounds:
            self._line.send(None)
            self._line.recv()
        else:
            self._line.send(list(parameters()))
