"""FedDyn: Federated Learning Based on Dynamic Regularization (Acar et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.bounds import NonNegative
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.cohort import Cohort
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, torch

EPS = 1e-12


@dataclass
class LinearTerm:
    """A client's g_k [P]: its loss gradient at the model it last arrived at, as far as it has been learned."""

    g: Tensor


@dataclass(frozen=True)
class FedDyn(ClientMethod):
    """Regularised so that all clients agree at the optimum (FedDyn, 2021): min F_k(w) − ⟨g_k, w⟩ + alpha/2 ‖w − w_g‖².

    Then g_k ← g_k − alpha Δ_k, and the server moves to mean(w_k) + h with h ← h + (1/N) Σ Δ_k. alpha cancels in h, so
    that alpha = 0 is not the limit but FedAvg with uniform `weights`. `unsquared` takes ‖·‖ for ‖·‖², as
    FedLAW's code does; `adaptive_alpha` divides alpha by the client's relative size, as the original code does. Only
    parameters are corrected: BatchNorm's statistics are averaged. Gradient clipping is `local.grad_clip`.

    Wrong choice where clients take part seldom: g_k is as old as a client's last round.
    """

    alpha: NonNegative = 0.01
    """Strength of the dynamic regulariser (α)."""
    unsquared: bool = False
    """Penalise the distance to the global model instead of its square."""
    adaptive_alpha: bool = False
    """Divide alpha by the client's size relative to the mean."""
    weights: Literal["uniform", "size"] = "uniform"
    """Whether clients count alike or by their samples, as in FedLAW's code; `weighting: [fedavg]` decides before it."""
    needs: ClassVar[Needs] = Needs(global_model=True)
    averages_more: ClassVar[bool] = True
    batched: ClassVar[bool] = True

    @property
    def base_weights(self) -> str:  # type: ignore[override]
        return self.weights

    def new_state(self, layers: LayerMap) -> LinearTerm | None:
        return LinearTerm(torch.zeros(layers.P)) if self.alpha else None

    def server_steps(self) -> tuple[ServerStep, ...]:
        return (AddDrift(),) if self.alpha else ()

    def _alpha(self, run: LocalRun) -> float:
        if not self.adaptive_alpha:
            return self.alpha
        return self.alpha * run.round_info.mean_samples / len(run.data.train.y)

    def for_steps(self, run: LocalRun) -> dict[str, Tensor]:
        own = {"g": run.state(self).g} if self.alpha else {}
        return own | {"alpha": run.params.new_tensor(self._alpha(run))} if self.adaptive_alpha else own

    def correct_grad(self, run: LocalRun) -> None:
        if self.alpha:
            away = run.params - run.received[: run.layers.P]
            if self.unsquared:
                away /= 2 * away.norm().clamp_min(EPS)
            own = run.for_steps(self)
            if self.adaptive_alpha:
                run.grad.copy_(run.grad.addcmul(away, own["alpha"]))
            else:
                run.grad.add_(away, alpha=self.alpha)
            run.grad.sub_(own["g"])

    def finish(self, run: LocalRun, upload: Upload) -> None:
        if self.alpha:
            run.state(self).g.sub_(run.params - run.received[: run.layers.P], alpha=self._alpha(run))


@dataclass(frozen=True)
class AddDrift(ServerStep):
    """The server's half. Its memory is h̃ = −h/alpha [P] in the paper's symbols: h̃ ← h̃ + (1/N) Σ Δ_k, w = ŵ + h̃."""

    name: ClassVar[str] = "feddyn"

    def prepare(self, server: Server) -> None:
        server.memory[self] = torch.zeros(server.layers.P)

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        uniform = mixture.support()
        mean = target if torch.equal(mixture.weights, uniform.weights) else cohort.reduce(uniform)
        P, share = server.layers.P, len(cohort.clients) / server.population.holders
        server.memory[self] = server.memory[self] + share * (mean[:P] - server.params)
        moved = target.clone()
        moved[:P] += server.memory[self]
        return moved
