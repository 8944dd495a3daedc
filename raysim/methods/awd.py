"""AWD: Improving Robustness with Adaptive Weight Decay (Ghiasi et al., 2023), on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.bounds import Fraction, NonNegative
from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor

EPS = 1e-12


@dataclass(frozen=True)
class AWD(ServerStep):
    """Weight decay that follows the update (AWD, Ghiasi et al., 2023): λ̄ ← 0.1 λ̄ + 0.9 s ‖d‖/‖w‖, w ← ŵ − λ̄ w.

    Deviation: the article decays in every SGD step. FedLWS (2025) compares with a server form that it does not write
    down; here −d = w − ŵ is the gradient and λ̄ begins at 0.

    Wrong choice where layers move at different paces: one λ̄, from the norms of the whole model, decays them all.
    """

    strength: NonNegative = 0.022
    """Decay of a round whose update is as long as the model (s)."""
    smoothing: Fraction = 0.1
    """Share of the last round's decay λ̄ in the new one."""
    reads_models: ClassVar[bool] = False
    refines: ClassVar[bool] = True

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        P, params = server.layers.P, server.params
        norm, moved = (float(v.double().norm()) for v in (params, target[:P] - params))
        now = self.strength * moved / norm if norm > EPS else 0.0
        decay = self.smoothing * server.memory.get(self, 0.0) + (1 - self.smoothing) * now
        server.memory[self] = decay
        server.note(self, "decay", params.new_tensor(decay))
        decayed = target.clone()
        decayed[:P] -= decay * params
        return decayed
