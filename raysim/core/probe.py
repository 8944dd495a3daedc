"""Statistics that a client measures while it trains, so that they cost no further pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.local_run import LocalRun
from raysim.lazy import Tensor, torch


class Probe:
    """A measurement of one client in one round. It is a value: equal probes are measured once.

    A run calls `begin`, then `batch` as often as it steps, then `end`.
    """

    needs_sample_losses: ClassVar[bool] = False
    """Whether it reads `run.sample_losses`."""
    of_received: ClassVar[bool] = False
    """Whether the server makes it of the model that it receives. Where that is encoded, `end` is called again with it."""

    def begin(self, run: LocalRun) -> None:
        """After the local initialisation."""

    def batch(self, run: LocalRun, z: Tensor) -> None:
        """After a training step's backward pass; `z` [B, D] are the latents of its batch."""

    def end(self, run: LocalRun) -> Tensor:
        """The measurement, of one shape for all clients. `cohort.stat(probe)` stacks those of the cohort: [K, ...]."""
        raise NotImplementedError

    @property
    def watches_batches(self) -> bool:
        """Whether `batch` does anything: a run spares the call otherwise."""
        return type(self).batch is not Probe.batch


@dataclass(frozen=True)
class LayerDistance(Probe):
    """‖w_k^l − w_g^l‖ of what is uploaded, for every layer of the run's grouping, [L] (FedLDF's divergence)."""

    buffers: bool = False  # running statistics and counters belong to their layers

    def end(self, run: LocalRun) -> Tensor:
        size = run.layers.S if self.buffers else run.layers.P
        return run.layers.norms(run.uploaded[:size] - run.received[:size])


@dataclass(frozen=True)
class ReceivedDistance(LayerDistance):
    """The same of what the server receives, for which clients are asked nothing."""

    of_received: ClassVar[bool] = True


@dataclass(frozen=True)
class TrainingLoss(Probe):
    """Mean loss of all batches of the local training, by samples, 0-d float64; NaN where no batch was trained on, or only by
    a method's own steps."""

    def end(self, run: LocalRun) -> Tensor:
        batches = [batch for epoch in run.losses for batch in epoch]
        if not batches:
            return torch.tensor(torch.nan, dtype=torch.float64)
        losses = torch.stack([loss for loss, _ in batches]).double()
        samples = losses.new_tensor([n for _, n in batches])
        return (losses * samples).sum() / samples.sum()


@dataclass(frozen=True)
class SampleLosses(Probe):
    """Root of the mean squared loss of the samples in the first local epoch, each before the step that it is part of, 0-d
    float64; NaN where none was trained on, or only by a method's own steps."""

    needs_sample_losses: ClassVar[bool] = True

    def end(self, run: LocalRun) -> Tensor:
        if not run.sample_losses:
            return torch.tensor(torch.nan, dtype=torch.float64)
        return torch.cat(run.sample_losses).double().square().mean().sqrt()
