"""FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning (Chen & Chao, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.core.bounds import NonNegativeInt, Positive
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.server import Server
from raysim.core.server_model import ServerModel
from raysim.lazy import Tensor, torch
from raysim.methods.server_ft import Recipe, ServerFT, refuse_parts

EPS = 1e-12
NOISE, LEAST_VARIANCE = 0.1, 1e-5


@dataclass(frozen=True)
class FedBE(ServerFT):
    """Distil clients, their average and sampled models into the aggregate (FedBE, Chen & Chao, 2021).

    In every tensor the directions u_k = Δ_k/‖Δ_k‖ have mean m and variance v over the clients, and the lengths have
    mean ρ; a sample is w_g + ρ (m + 0.1 √v ε). `mode: dirichlet` samples Σ π_k w_k, π ~ Dir(1), instead. The teachers'
    logits are averaged and divided by `temperature`; `swa` takes the mean of the student over its epochs. Deviations: a
    client that did not move has u_k = 0, where the codes divide by zero. A sample has the aggregate's running
    statistics, where the codes sample those as well and so get negative variances.

    Wrong choice with few clients a round: m and v of each direction are estimated from K values.
    """

    epochs: NonNegativeInt = 100
    """Passes over the proxy samples, each round."""
    samples: NonNegativeInt = 1
    """How many models are sampled as further teachers."""
    mode: Literal["gaussian", "dirichlet"] = "gaussian"
    """How they are sampled: from Gaussians around the clients, or as random mixtures of them."""
    temperature: Positive = 1.0
    """What the teachers' mean logits are divided by; below 1 it sharpens them."""
    swa: bool = False
    """Take the mean of the student over its epochs."""

    needs: ClassVar[Needs] = Needs(classes=True, proxy=True)
    reads_models: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        return refuse_parts(facts)

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        if not self.epochs:
            return target
        rows = server.proxy.rows
        others = torch.stack([target, *self.sampled(target, mixture, cohort, server)])
        clients = cohort.predict(rows)[mixture.kept]
        mean = (clients.sum(0) + cohort.compute(summed_logits, others, rows)) / (len(clients) + len(others))
        return self.train(target, cohort, server, (mean / self.temperature).softmax(1), Recipe(swa=self.swa))

    def sampled(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> list[Tensor]:
        """Models [S] drawn around those of the clients that `mixture` keeps."""
        among = cohort.uniform().keep(mixture.kept)
        stream, K, P = server.generator("fedbe"), len(cohort.clients), server.layers.P
        if self.mode == "dirichlet":
            # Exponential draws, normalised, are uniform on the simplex.
            draws = -torch.rand(self.samples, K, generator=stream, dtype=torch.float64).log()
            return [cohort.reduce(among.reweighted(pi * among.kept)) for pi in draws]
        mean, variance, length = directions(among, cohort, server)
        models = []
        for _ in range(self.samples):
            noise = torch.randn(P, generator=stream, dtype=target.dtype)
            model = target.clone()
            model[:P] = server.params + length * (mean + NOISE * variance.sqrt() * noise)
            models.append(model)
        return models


def directions(among: Mixture, cohort: Cohort, server: Server) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [P] and variance [P] of the unit updates of the clients `among` which all count alike, tensor by tensor, and the
    updates' mean length [P]."""
    tensors, layers = server.layers.regroup("tensor"), server.layers
    length = cohort.distances(server.params, tensors)  # ‖Δ_k‖  [K, tensors]
    unit = torch.where(length > EPS, 1 / length.clamp_min(EPS), 0.0)
    scale = tensors.expand(unit)[:, : layers.T]
    units = among.scaled(scale)
    anchor = -units.weights.sum(0)  # takes the server's own model out of the sum: Σ w_k Δ_k is left
    mean = cohort.reduce(units.scaled(torch.ones(()), anchor))[: layers.P]
    squares = cohort.reduce(among.scaled(scale.square()), power=2)[: layers.P]
    variance = (squares - mean.square()).clamp_min(LEAST_VARIANCE)
    return mean, variance, tensors.per_parameter(length[among.kept].mean(0)).to(mean.dtype)


def summed_logits(server_model: ServerModel, values: Tensor, rows: np.ndarray) -> Tensor:
    """[n, C] of models `values` [M, S] in eval mode."""
    total = torch.zeros(())
    for value in values:
        server_model.load(value)
        total = total.to(value.device) + server_model.logits(rows)
    return total
