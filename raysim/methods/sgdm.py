"""SGDM: Accelerating Federated Learning via Momentum Gradient Descent (Liu et al., 2020), and its local reading."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from raysim.core.bounds import Fraction
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.mixture import Mixture
from raysim.core.optim import OptimizerSpec
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class SGDM(ClientMethod):
    """Clients train with momentum (Zinkevich et al., 2010; MFL, Liu et al., 2020): d ← rho d + ∇F, w ← w − η d.

    `local`: d starts at 0 every round. `mfl`: it starts at the global d, and the server averages the clients' d with
    the weights of their models. The third reading, momentum on the server, is the step `fedavgm`.

    Wrong choice with few batches a round: `local` starts d at 0, and about 1/(1 − rho) steps pass before it has grown.
    """

    reading: Literal["local", "mfl"] = "local"
    """Where the momentum starts each round: at zero, or at the global momentum of MFL."""
    rho: Fraction = 0.9
    """Share of the last direction in the new one (ρ)."""
    batched: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        if facts.optimizer.name != "sgd":
            return f"its momentum is sgd's, but local.optimizer is {facts.optimizer.name}."
        if facts.optimizer.momentum:
            return f"brings its own momentum rho; leave out local.momentum, which is {facts.optimizer.momentum}."
        if any(getattr(method, "official_sgd", False) for method in facts.client):
            return "brings a momentum, and fedprox's official_sgd takes it away. Set official_sgd: false."
        if self.reading == "mfl" and facts.persist:
            return "mfl starts every round at the global momentum; local.state: persist would keep another."
        return None

    @property
    def averages_more(self) -> bool:  # type: ignore[override]
        return self.reading == "mfl" and self.rho > 0

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        return replace(spec, momentum=self.rho)

    def server_steps(self) -> tuple[ServerStep, ...]:
        return (AverageMomentum(),) if self.averages_more else ()

    def begin(self, run: LocalRun) -> None:
        if self.averages_more:
            run.optimizer.load({"momentum": run.shared["sgdm"]})

    def finish(self, run: LocalRun, upload: Upload) -> None:
        if self.averages_more:
            upload.vectors["sgdm"] = run.optimizer.state()["momentum"]


@dataclass(frozen=True)
class AverageMomentum(ServerStep):
    """The server's half of `mfl`: d = Σ_k λ_k d_k, with the weights of the models."""

    only_scales: ClassVar[bool] = True

    def prepare(self, server: Server) -> None:
        server.shared["sgdm"] = torch.zeros(server.layers.P)

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        server.shared["sgdm"] = cohort.reduce(mixture, of="sgdm")
        return target
