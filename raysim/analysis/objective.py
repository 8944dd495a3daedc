"""What local training does to the clients' objective (FedALA: Zhang et al., 2023, figure 5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.analysis.instrument import Instrument
from raysim.core.local_run import LocalRun
from raysim.core.note import Note
from raysim.core.probe import Probe
from raysim.core.samples import take
from raysim.core.server import Population
from raysim.lazy import Tensor, no_grad, torch

if TYPE_CHECKING:
    from raysim.federation.round import Round

BATCH = 256  # samples of one pass


@dataclass(frozen=True)
class TrainingLoss(Probe):
    """Mean loss on all the client's training samples before and after its local training, in eval mode: [2]."""

    def begin(self, run: LocalRun) -> None:
        run.scratch["objective"] = self._mean(run)

    def end(self, run: LocalRun) -> Tensor:
        return torch.stack([run.scratch["objective"], self._mean(run)])

    @no_grad
    def _mean(self, run: LocalRun) -> Tensor:
        x, y = run.data.train
        total = torch.zeros((), dtype=torch.float64, device=y.device)
        run.flat.model.eval()
        for rows in torch.arange(len(y), device=y.device).split(BATCH):
            total += run.task.total_loss(run.flat.model(take(x, rows)), y[rows])
        run.flat.model.train()
        return total / len(y)


@dataclass(frozen=True)
class Objective(Instrument):
    """Training loss of the clients `before` and `after` local training, weighted by size (FedALA, 2023, figure 5).

    Each client's own model on its own training samples: before it trains, but after its local initialisation. They
    meet where training has converged. Costs two passes over the cohort's samples.
    """

    probes: ClassVar[tuple[Probe, ...]] = (TrainingLoss(),)

    def observe(self, done: Round, population: Population) -> Iterator[Note]:
        (probe,) = self.probes
        losses = done.cohort.stat(probe)  # [K, 2]
        sizes = done.cohort.sizes.double()
        for name, value in zip(("before", "after"), sizes @ losses / sizes.sum(), strict=True):
            yield self.note(name, value)
