"""What every simulator is given: the clients' samples and the model that all begin with.

It is imported in environments without raysim, and so needs nothing but PyTorch and NumPy.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Work:
    """One local epoch of SGD a round. The samples lie client by client, the same number for each."""

    clients: int
    cohort: int
    samples: int  # a client
    batch: int
    lr: float
    processes: int
    seed: int
    x: Tensor  # [clients * samples, ...]
    y: Tensor  # [clients * samples]
    model: nn.Module

    def shuffled(self, client: int, t: int) -> tuple[Tensor, Tensor]:
        """The client's samples in its order of round t, wherever it trains, to be cut into batches."""
        generator = torch.Generator().manual_seed((1_000_003 * self.seed + t) * self.clients + client)
        rows = client * self.samples + torch.randperm(self.samples, generator=generator)
        return self.x[rows], self.y[rows]


@cache
def given() -> Work:
    """What the benchmark has laid into this simulator's folder; each process reads it once.

    The samples are mapped into memory, so that processes share it.
    """
    folder = Path(os.environ["PEERS_FOLDER"])
    x, y = (torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in "xy")
    model = torch.load(folder / "model.pt", weights_only=False)  # the benchmark's own file
    return Work(x=x, y=y, model=model, **json.loads((folder / "work.json").read_text()))
