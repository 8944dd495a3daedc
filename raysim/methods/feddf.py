"""FedDF: Ensemble Distillation for Robust Model Fusion in Federated Learning (Lin et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server
from raysim.methods.server_ft import ServerFT

if TYPE_CHECKING:
    from raysim.config import Config


@dataclass(frozen=True)
class FedDF(ServerFT):
    """Distil the clients' mean logits into the aggregate (FedDF, Lin et al., 2020): KL(softmax Z̄ ‖ softmax f(w; x)).

    As FedLAW's paper runs it as a baseline: on the proxy samples, whose labels are not used, for a fixed number of
    epochs with Adam; every client is a teacher of the same weight, in eval mode. `temperature` divides the logits of
    both sides. Deviation from the original: no early stop on validation data, of which the server has none.
    """

    epochs: int = 100
    temperature: float = 1.0

    reads_models: ClassVar[bool] = True

    def check(self, config: Config) -> str | None:
        return "temperature must be positive." if self.temperature <= 0 else super().check(config)

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        if not self.epochs:
            return target
        mean = cohort.predict(server.proxy.rows).mean(0)  # [n, C]
        return self.train(target, cohort, server, (mean / self.temperature).softmax(1), self.temperature)
