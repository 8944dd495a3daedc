"""Statistics that a client measures during its training visit, so that they cost no second one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raysim.core.local_run import LocalRun


class Probe:
    """A measurement of one client in one round. It is a value: equal probes are measured once.

    `begin` runs after the local initialisation, `batch` after each training step's backward pass, `end` after training.
    """

    def begin(self, run: LocalRun) -> None: ...

    def batch(self, run: LocalRun, z: Tensor) -> None:
        """`z` [B, D]: the latents of the batch just trained on."""

    def end(self, run: LocalRun) -> Tensor:
        """The measurement, of one shape for all clients; comes back as `cohort.stat(probe)` with a leading dimension."""
        raise NotImplementedError

    @property
    def watches_batches(self) -> bool:
        return type(self).batch is not Probe.batch


@dataclass(frozen=True)
class LayerDistance(Probe):
    """‖w_k^l − w_g^l‖ of what is uploaded, for every layer of the run's grouping, [L] (FedLDF's divergence)."""

    buffers: bool = False  # running statistics and counters belong to their layers

    def end(self, run: LocalRun) -> Tensor:
        size = run.layers.S if self.buffers else run.layers.P
        return run.layers.norms(run.uploaded[:size] - run.received[:size])
