"""FedDisco: Federated Learning with Discrepancy-Aware Collaboration (Ye et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.bounds import NonNegative
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.server import Server, Weighting
from raysim.lazy import Tensor, nn, torch


@dataclass(frozen=True)
class FedDisco(Weighting):
    """Less weight for unbalanced clients (FedDisco, Ye et al., 2023): λ_k ∝ max(0, p_k − a D_k + b).

    D_k is how far the client's label distribution is from the `target`. As in the released code the KL values are
    divided by their sum over the cohort (`normalize_kl`), which the article does not mention. Where no weight would be
    positive the weights stay p; the released code stops there.

    Wrong choice where clients hardly differ: normalised distances sum to 1 however small they are, and lower weights by a.
    """

    a: NonNegative = 0.5
    """How much the distance D_k of a client's labels from the target lowers its weight."""
    b: NonNegative = 0.1
    """What every weight is raised by."""
    metric: Literal["kl", "l2", "l1", "cosine"] = "kl"
    """How the distance of two label distributions is measured."""
    normalize_kl: bool = True
    """Divide the KL values by their sum over the cohort."""
    target: tuple[float, ...] | None = None
    """The known test distribution, a share for every class; null: uniform."""
    needs: ClassVar[Needs] = Needs(classes=True)
    plans_early: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        target = self.target
        if target is not None and (min(target, default=0.0) <= 0 or abs(sum(target) - 1) > 1e-6):
            return "target must be positive shares of all classes that sum to 1."
        return None

    def fits(self, model: nn.Module, layers: LayerMap, classes: int) -> str | None:
        wrong = self.target is not None and len(self.target) != classes
        return f"target has {len(self.target or ())} shares, but the data have {classes} classes." if wrong else None

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        labels = server.population.labels[list(cohort.clients)].double()  # [K, C]
        self._ask_once(server, cohort.clients, labels.shape[1])
        target = torch.tensor(self.target or [1 / labels.shape[1]] * labels.shape[1], dtype=torch.float64)
        distance = discrepancy(labels / labels.sum(1, keepdim=True), target, self.metric)
        if self.metric == "kl" and self.normalize_kl and distance.sum() > 0:
            distance = distance / distance.sum()
        lam = (prior.lam / prior.lam.sum() - self.a * distance + self.b).clamp_min(0)
        none_left = bool(lam.sum() <= 0)
        mixture = prior if none_left else prior.reweighted(lam)
        server.note(self, "discrepancy", distance, "client")
        server.note(self, "lambda", mixture.lam / mixture.lam.sum(), "client")
        server.fell_back(self, none_left)
        return mixture

    def _ask_once(self, server: Server, clients: tuple[int, ...], classes: int) -> None:
        """Book the label counts of clients, which each sends once: in the first round in which it takes part."""
        never = torch.full((len(server.population.sizes),), -1)
        first = server.memory[self] = server.memory.get(self, never).clone()  # the round, or -1
        new = [c for c, round_ in zip(clients, first[list(clients)].tolist(), strict=True) if round_ in (-1, server.t)]
        first[new] = server.t
        server.scratch.one_time_scalars |= dict.fromkeys(new, classes)


def discrepancy(q: Tensor, u: Tensor, metric: str) -> Tensor:
    """How far each distribution q [K, C] is from u [C]: [K]."""
    distance: Tensor
    if metric == "kl":
        distance = (torch.special.xlogy(q, q) - torch.special.xlogy(q, u)).sum(1).clamp_min(0)
    elif metric == "cosine":
        distance = 1 - (q @ u) / (q.norm(dim=1) * u.norm())
    else:
        distance = (q - u).norm(p=2 if metric == "l2" else 1, dim=1)
    return distance
