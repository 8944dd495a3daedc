"""FedAMP: Personalized Cross-Silo Federated Learning on Non-IID Data (Huang et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.bounds import NonNegative, Positive
from raysim.core.client import ClientMethod, LocalRun
from raysim.core.facts import RunFacts
from raysim.core.method import Needs
from raysim.core.pairs import sparse
from raysim.core.server import Downlink, DownlinkRule, ModelStore, Server
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class FedAMP(ClientMethod, DownlinkRule):
    """Like clients attract each other (FedAMP, Huang et al., 2021): min F_i(w) + lam/(2 alpha) ‖w − u_i‖².

    u_i = Σ_j c_ij w_j is what client i is sent, c_ij = alpha/sigma exp(−‖w_i − w_j‖²/sigma), c_ii = 1 − Σ_{j≠i} c_ij.
    c_ii is negative where others are very close; `clip` then scales their c_ij down to a sum of 1. Training starts from
    the client's own model or, with `init: cloud`, from u_i, which `fedala` beside it needs. The personal model is the
    model from which training starts, or w_i where it is tested after training. The global model is the mean; no client
    is sent it.

    Wrong choice for many clients: the distance of every pair of their models is measured.
    """

    alpha: Positive = 1000.0
    """Step size of the attraction (α); the proximal term is divided by it."""
    lam: NonNegative = 1.0
    """Strength of the proximal term (λ)."""
    sigma: Positive = 0.1
    """Squared distance at which the attraction of two models has fallen to 1/e (σ)."""
    clip: bool = False
    """Scale the others' weights down to a sum of 1 where they exceed it, so that a client's own is not negative."""
    init: Literal["own", "cloud"] = "own"
    """Start training from the client's own model, or from the mix u_i that it was sent."""
    needs: ClassVar[Needs] = Needs(peers="mixed")
    batched: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        if facts.participation < 1:
            return (
                f"it needs all clients in each round, not {facts.participation:g} of them: set rounds.participation: 1."
            )
        if self.init == "own" and any(method.starts_elsewhere for method in facts.client if method is not self):
            return "starts from the client's own model; beside a method that starts otherwise, set init: cloud."
        return None

    @property
    def starts_elsewhere(self) -> bool:
        return self.init == "own"

    def downlink_rule(self) -> DownlinkRule:
        return self

    def downlink(self, clients: Sequence[int], models: ModelStore, server: Server) -> Downlink:
        if not models.clients:
            return Downlink()
        place = {c: i for i, c in enumerate(models.clients)}
        weights = attraction(models.distances(models.clients), self.alpha, self.sigma, self.clip)
        mix = torch.stack([weights[place[c]] if c in place else torch.zeros_like(weights[0]) for c in clients])
        server.note(self, "weights", sparse(mix), "client", "peer", clients=clients)
        return Downlink(models.clients, mix)

    def begin(self, run: LocalRun) -> None:
        if self.init == "own" and run.previous is not None:
            run.load(run.previous)

    def personal(self, run: LocalRun) -> None:
        if not run.steps:
            run.stack.start(run)
            self.begin(run)

    def correct_grad(self, run: LocalRun) -> None:
        run.grad.add_(run.params - run.received[: run.layers.P], alpha=self.lam / self.alpha)


def attraction(squared: Tensor, alpha: float, sigma: float, clip: bool = False) -> Tensor:
    """c_ij [M, M] of squared distances [M, M], zero on the diagonal: a client's own weight is what is left of 1."""
    weights = (alpha / sigma * torch.exp(-squared / sigma)).fill_diagonal_(0)
    return weights / weights.sum(1, keepdim=True).clamp_min(1) if clip else weights
