"""FedNova: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization (Wang et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.local_run import LocalRun
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe
from raysim.core.server import Server, Weighting
from raysim.lazy import Tensor, torch
from raysim.methods.sgdm import SGDM


@dataclass(frozen=True)
class Normaliser(Probe):
    """A_k = ‖a_k‖₁, the gradients that the client's steps have applied, and with a proximal term the number of steps,
    which is then what it adds to τ_eff: [1] or [2]. Where a method steps without the optimiser, A_k is that number. Steps
    of layers that stay with the client do not count.
    """

    def end(self, run: LocalRun) -> Tensor:
        steps = run.steps - run.optimizer.private_steps
        applied = run.optimizer.normaliser or float(steps)
        return torch.tensor([applied, steps] if run.optimizer.proximal else [applied], dtype=torch.float64)


@dataclass(frozen=True)
class FedNova(Weighting):
    """Mean direction times mean number of steps (FedNova, Wang et al., 2020): w + τ_eff Σ p_k Δ_k / A_k.

    A_k comes from counted steps, momentum and proximal term; of Adam, which has no closed form, steps are counted. Its
    optional server momentum is `server: [fedavgm: {scale_by_lr: true}]`. Buffers are averaged with p. Where p does not
    sum to one, as L-DAWA's, its sum is the factor of w.

    Wrong choice where all clients take the same number of steps: it is then FedAvg.
    """

    stage: ClassVar[str] = "rescale"

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (Normaliser(),)

    def check(self, facts: RunFacts) -> str | None:
        own = [method for method in facts.client if isinstance(method, SGDM)]
        carried = facts.persist or any(method.reading == "mfl" for method in own)
        if carried and (facts.optimizer.momentum or own):
            return "momentum must start empty each round, but local.state is persist or sgdm's reading is mfl."
        return None

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        measured = cohort.stat(Normaliser())
        applied, effective = measured[:, 0].numpy(), measured[:, -1].numpy()  # [K]
        tau = effective @ prior.base.numpy()[:, : server.layers.T]  # τ_eff over the uploaders of each tensor  [T]
        inverse = np.divide(1.0, applied, out=np.zeros_like(applied), where=applied > 0)
        shrunk = (prior.base.numpy()[:, : server.layers.T] - prior.weights.numpy()).sum(0)  # 0 where p sums to one  [T]
        anchor = 1 - shrunk - tau * (inverse @ prior.weights.numpy())
        server.note(self, "normaliser", measured[:, 0], "client")
        server.note(self, "tau_eff", prior.shares @ measured[:, -1])
        return prior.scaled(torch.from_numpy(np.outer(inverse, tau)), torch.from_numpy(anchor))
