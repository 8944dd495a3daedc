"""FedRep: Exploiting Shared Representations for Personalized Federated Learning (Collins et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.core.bounds import NonNegativeInt
from raysim.core.client import ClientMethod, LocalRun, Passes
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.lazy import nn


@dataclass(frozen=True)
class FedRep(ClientMethod):
    """A shared body under each client's own head (FedRep, Collins et al., 2021): the head is trained, then the body.

    `head_epochs` with the body frozen (its BatchNorm statistics go on moving), then `local.epochs` with the head
    frozen; only the body is sent. A personal model is the received body under the client's head.

    At a rate that suits FedAvg the body of one client can explode and, through the mean, spoil that of all. Then lower
    `local.lr`, or set `local.grad_clip`.

    Wrong choice at FedAvg's best rate: at 0.1 the training of a client exploded with every seed (docs/papers/fedala.md).
    """

    head_epochs: NonNegativeInt = 5
    """Passes that train the head, before `local.epochs` train the body."""
    personal_layers: ClassVar[str | None] = "head"
    needs: ClassVar[Needs] = Needs(head="its parameters")

    def fits(self, model: nn.Module, layers: LayerMap, classes: int) -> str | None:
        of_head = {spec.stage == layers.stages - 1 for spec in layers.tensors[: layers.T]}
        return None if len(of_head) == 2 else "trains the head, then the body, and this model has frozen one of them."

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray:
        return self.head_epochs * passes.epoch(samples)

    def train(self, run: LocalRun) -> None:
        run.fit(self.head_epochs, only="head", purpose="head")
        run.fit(only="body")
