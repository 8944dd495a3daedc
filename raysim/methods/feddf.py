"""FedDF: Ensemble Distillation for Robust Model Fusion in Federated Learning (Lin et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from raysim.core.bounds import NonNegativeInt, Positive
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.server import Server
from raysim.lazy import Tensor
from raysim.methods.server_ft import Recipe, ServerFT, refuse_parts


@dataclass(frozen=True)
class FedDF(ServerFT):
    """Distil the clients' mean logits into the aggregate (FedDF, Lin et al., 2020): KL(softmax Z̄ ‖ softmax f(w; x)).

    This is the baseline of FedLAW's paper: Adam on the proxy samples, whose labels are not used, for a fixed number of
    epochs. Every client is a teacher of the same weight, in eval mode. The original is `{cosine: true, patience: 1000,
    betas: [0.9, 0.999]}` and 10 000 batches: its learning rate falls to zero, and it stops after so many batches that
    have not raised the accuracy on validation samples. Here a share `validation` of the proxy samples is held out for
    that and tested after every epoch.

    Wrong choice where proxy samples are unlike the clients': the mean of the teachers is learned only on them.
    """

    epochs: NonNegativeInt = 100
    """Passes over the proxy samples, each round; with `patience` the most there may be."""
    temperature: Positive = 1.0
    """What the logits of teachers and student are divided by."""
    cosine: bool = False
    """Let the learning rate fall to zero along a cosine."""
    patience: int | None = None
    """Stop after this many batches without a gain on the validation samples; null: train all epochs."""
    validation: float = 0.2
    """With `patience`: share of the proxy samples that are held out for validation."""

    needs: ClassVar[Needs] = Needs(classes=True, proxy=True)
    reads_models: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        if self.patience is not None and (self.patience < 1 or not 0 < self.validation < 1):
            return "patience must be at least 1 batch and validation a share in (0, 1)."
        if self.patience is not None and facts.proxy_samples == 1:
            return "patience needs proxy samples to learn on and others to look at, but data.proxy.samples is 1."
        return refuse_parts(facts)

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        if not self.epochs:
            return target
        part, recipe = server.proxy, Recipe(self.temperature, cosine=self.cosine)
        if self.patience is not None:
            part, held = part.split(self.validation, server.generator("feddf validation"))
            recipe = replace(recipe, validation=held.rows, patience=self.patience)
        taught = (cohort.predict(part.rows)[mixture.kept].mean(0) / self.temperature).softmax(1)  # [n, C]
        return self.train(target, cohort, server, taught, recipe, part)
