"""CCN: client contribution normalization for federated learning (2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.core.bounds import Positive
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.flat import stages_in
from raysim.core.layers import LayerMap
from raysim.core.local_run import LocalRun
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.outputs import latent_rows
from raysim.core.probe import Probe
from raysim.core.samples import batch_slices
from raysim.core.server import Server, Weighting
from raysim.lazy import Tensor, nn, no_grad, torch

EPS = 1e-12
SWEEP = 512  # samples of one forward pass over a client's data


@dataclass(frozen=True)
class LatentMean(Probe):
    """Mean latent z [D] over the client's training samples.

    `after` training (of the model sent) or `before` it (of the one received), in eval mode, by a further sweep over the samples;
    or those of the `last_epoch` as its batches were trained on. `pre` leaves out the model's last ReLU.
    """

    at: str = "after"
    activation: str = "post"

    def begin(self, run: LocalRun) -> None:
        if self.at == "before":
            started = run.value.clone()
            run.receive()
            run.scratch["ccn"] = self.sweep(run)
            run.value.copy_(started)

    def batch(self, run: LocalRun, z: Tensor) -> None:
        if self.at == "last_epoch":
            epoch, total, samples = run.scratch.get("ccn", (None, 0.0, 0))
            if epoch != len(run.losses):  # a new epoch
                epoch, total, samples = len(run.losses), 0.0, 0
            run.scratch["ccn"] = epoch, total + z.double().sum(0), samples + len(z)

    def end(self, run: LocalRun) -> Tensor:
        if self.at == "after" and run.uploaded is run.value:
            return self.sweep(run)
        if self.at == "after":  # a method sends another model, or a malicious client a lie
            trained = run.value.clone()
            run.value.copy_(run.uploaded)
            mean: Tensor = self.sweep(run)
            run.value.copy_(trained)
            return mean
        if self.at == "before":
            before: Tensor = run.scratch["ccn"]
            return before
        _, total, samples = run.scratch.get("ccn", (None, 0.0, 0))
        return total / samples if samples else self.sweep(run)  # a client without a step saw no batch

    @no_grad
    def sweep(self, run: LocalRun) -> Tensor:
        x = run.data.train.x
        latents = run.flat.latents if self.activation == "post" else without_last_relu(run.flat.model)
        run.flat.model.eval()
        total, count = torch.zeros((), dtype=torch.float64, device=x.device), 0
        for part in batch_slices(len(x), SWEEP, drop_last=False):
            z = latent_rows(latents(x[part]))
            total, count = total + z.double().sum(0), count + len(z)
        run.flat.model.train()
        return total / count


def without_last_relu(model: nn.Module) -> nn.Sequential:
    """The stages before the head, but for the ReLU that ends them."""
    *lower, last, _ = model.children()
    parts = list(last.children())
    del parts[max(i for i, part in enumerate(parts) if isinstance(part, nn.ReLU))]
    return nn.Sequential(*lower, *parts)


@dataclass(frozen=True)
class CCN(Weighting):
    """Less weight for clients that resemble the others (CCN, 2024): λ_k ∝ (1 − softmax(row / T)_k) ν_k.

    row_k = Σ_p cos(z_k, z_p) of the clients' mean latents, ν are the weights of the base method. The paper leaves open
    its `temperature` (below 1), when latents are computed and on which side of the activation. A zero latent resembles
    nothing but itself. Where no weight is left, as of a single client, the weights stay ν. Of all weight, no
    more than the largest client's share changes hands: with many clients expect little.

    Wrong choice with many clients: of equal base weights at most 1/K changes hands. Over FedNova it cost 0.4 points
    (docs/papers/ccn.md).
    """

    temperature: Positive = 0.5
    """Temperature T of the softmax over the clients' similarities; a low one singles out the most similar."""
    latent_at: Literal["after", "last_epoch", "before"] = "after"
    """When latents are computed: after training, during its last epoch, or before it with the received model."""
    activation: Literal["post", "pre"] = "post"
    """Take latents behind the last ReLU (`post`) or in front of it (`pre`)."""
    rank: ClassVar[int] = 1  # after FedDisco, if both are there
    needs: ClassVar[Needs] = Needs(head="its latents")

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (LatentMean(self.latent_at, self.activation),)

    def check(self, facts: RunFacts) -> str | None:
        if self.activation == "pre" and self.latent_at == "last_epoch":
            return "training yields latents after their activation only; set latent_at: after for activation: pre."
        return None

    def fits(self, model: nn.Module, layers: LayerMap, classes: int) -> str | None:
        relu = stages_in(model) and any(isinstance(part, nn.ReLU) for part in [*model.children()][-2].children())
        if self.activation == "pre" and not relu:
            return "activation is pre, but this model's last stage before the head has no ReLU of its own."
        return None

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        z = cohort.stat(self.probes[0]).double().numpy()  # [K, D]
        length = np.sqrt(np.einsum("kd,kd->k", z, z))
        inverse = 1 / np.maximum(length, EPS)
        # Σ_p ⟨ẑ_k, ẑ_p⟩ = ⟨ẑ_k, Σ_p ẑ_p⟩. A client's product with itself counts 1, even where its latent is zero.
        total = np.einsum("k,kd->d", inverse, z)
        rows = inverse * np.einsum("kd,d->k", z, total) + 1 - (length * inverse) ** 2
        exponentials = np.exp((rows - rows.max()) / self.temperature)
        factor = 1 - exponentials / exponentials.sum()  # sums to K − 1; of a single client it is 0, and ν stays
        lam = factor * prior.lam.numpy()
        none = not lam.sum() > 0
        mixture = prior if none else prior.reweighted(torch.from_numpy(lam))
        server.note(self, "similarity", torch.from_numpy(rows), "client")
        server.note(self, "factor", torch.from_numpy(factor), "client")
        server.note(self, "lambda", mixture.lam / mixture.lam.sum(), "client")
        server.fell_back(self, none)
        return mixture
