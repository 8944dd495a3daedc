"""How shrinking balances the clients' pull against the old model's decay (FedLWS: Shi et al., 2025; FedLAW: Li et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.analysis.instrument import Instrument
from raysim.core.facts import RunFacts
from raysim.core.note import Note
from raysim.core.server import Population
from raysim.lazy import torch

if TYPE_CHECKING:
    from raysim.federation.round import Round


@dataclass(frozen=True)
class Balance(Instrument):
    """Balance of optimization and regularization where the model shrinks (FedLAW, 2023; FedLWS, 2025); reads the models.

    The round made γ (w + d) of the model w, γ being what the weights' sum and the server's steps scale each tensor by.
    `gradient` is ‖γ d‖, `decay` is ‖(1 − γ) w‖, `norm` is ‖w‖, `moved` is ‖d‖, `gamma` is the γ of the whole model, the
    mean over its layers (of the means over their tensors) where they differ, and `tau` the mean distance of the clients
    from their unweighted mean, over the clients that sent something and what they sent. The two papers' ratios are each
    other's inverse: `fedlaw_ratio` = gradient / decay, `fedlws_ratio` = decay / gradient; they are negative where γ > 1,
    so that the model grew.
    A round that did not shrink, or did not move, lacks the ratio that it would make infinite. A decay below a millionth
    of the norm is rounding and counts as 0.
    """

    reads_models: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        companions = [step for method in facts.client for step in method.server_steps()]
        others = [step.name for step in (*facts.server, *companions) if not step.only_scales]
        return f"shows what shrinking does, but {others[0]} does more to the model than scale it." if others else None

    def observe(self, done: Round, population: Population) -> Iterator[Note]:
        assert done.mixture is not None
        cohort, mixture, layers = done.cohort, done.mixture, done.cohort.layers
        T, P, tensors = layers.T, layers.P, layers.regroup("tensor")
        sent = mixture.sent[:, :T]
        shared = sent.any(0)  # [T]: what clients keep is not scaled

        target, after = (layers.norms(layers.scaled(value[:P], shared.double())) for value in (done.target, done.after))
        planned = mixture.own + mixture.weights.sum(0)  # [T]: L-DAWA's differ within a layer
        step = layers.expand(torch.where(target > 0, after / target, 1.0))[:T]
        gamma = planned * torch.where(shared, step, 1.0)
        mean = layers.scaled(done.target[:P], 1 / planned)
        before, moved = tensors.norms(done.before[:P]), tensors.norms(mean - done.before[:P])
        members = torch.bincount(torch.tensor(layers.groups[:T]), minlength=layers.L).double()
        shares = layers.expand(1 / members)[:T]  # of each tensor in its layer

        def whole(per_tensor: torch.Tensor) -> torch.Tensor:
            return per_tensor.square().sum().sqrt()

        gradient, decay = whole(gamma * moved), whole((1 - gamma) * before)
        decay = decay * (decay > 1e-6 * whole(before))
        along = ((1 - gamma) * before.square()).sum()  # ⟨(1 − γ) w, w⟩: below 0 the model grows
        centre = cohort.reduce(mixture.support())[:P]
        squares = cohort.distances(centre, tensors).square() * sent  # [K, T]
        yield self.note("gamma", (shares * gamma).sum() / shares.sum())
        yield self.note("tau", squares.sum(1).sqrt()[sent.any(1)].mean())
        for name, value in {"norm": whole(before), "moved": whole(moved), "gradient": gradient, "decay": decay}.items():
            yield self.note(name, value)
        if decay > 0:
            yield self.note("fedlaw_ratio", gradient / decay * along.sign())
        if gradient > 0:
            yield self.note("fedlws_ratio", decay / gradient * along.sign())
