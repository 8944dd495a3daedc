"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.bounds import Positive
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.rates import Schedules, scheduled
from raysim.core.server import Server, ServerStep, Weighting
from raysim.lazy import Tensor


@dataclass(frozen=True)
class FedAvg(Weighting):
    """Weighted mean of client models (McMahan et al., 2017): by training samples, which is the default, or uniform.

    Wrong choice for a model for each client: on their own test samples it reached 49 %, Ditto 88 (docs/papers/fedala.md).
    """

    weights: Literal["size", "uniform"] = "size"
    """Count clients by their training samples, or all alike."""
    rank: ClassVar[int] = -1  # what others refine
    plans_early: ClassVar[bool] = True

    @property
    def unequal(self) -> str | None:
        return "counts their samples. Set weights: uniform" if self.weights == "size" else None

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        return prior.reweighted((cohort.by_size() if self.weights == "size" else cohort.uniform()).lam)


@dataclass(frozen=True)
class StepSize(ServerStep):
    """Server step size (FedLAW, Li et al., 2023, table 10): w + eta (ŵ − w). `adaptive_gws` has its own.

    Wrong choice with eta above 1 where cohorts are small: the noise of the mean grows as much as its signal.
    """

    eta: Positive = 1.0
    """Step size of the server (η); 1 takes the mean of the clients."""
    eta_schedule: Schedules = ()
    """Factors on η from round to round, multiplied with one another; empty: 1."""
    reads_models: ClassVar[bool] = False

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        P, stepped = server.layers.P, target.clone()
        eta = scheduled(self.eta, self.eta_schedule, server.t, server.rounds)
        stepped[:P] = server.params + eta * (target[:P] - server.params)
        return target if eta == 1 else stepped
