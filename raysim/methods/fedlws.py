"""FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking (Shi et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.core.bounds import NonNegative
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe, ReceivedDistance
from raysim.core.robust import Coordinatewise
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, torch

EPS = 1e-12


@dataclass(frozen=True)
class FedLWS(ServerStep):
    """Shrink each layer where clients disagree (FedLWS, 2025): γ_l = ‖w_l‖ / (β τ_l ‖d_l‖ + ‖w_l‖), w_l ← γ_l ŵ_l.

    τ_l is the mean distance of the uploaders' updates from their unweighted mean, d = ŵ − w. Deviation: a layer whose
    norm is zero is not shrunk (γ = 1); the rule would keep it at zero for ever. The released code also clamps βτ
    (`tau_clamp: [0.01, 0.2]`), counts running statistics and step counters as part of their layers (`lws_stats: all`
    with `model.layer_by: bias_group`; counters are then averaged), and shrinks them (`shrink_buffers`). After a
    robust rule by coordinate τ is what that rule makes of the distances to its aggregate, so that no liar sets it.

    The paper calls beta from 0.001 to 0.1 safe; a large one drives layers to zero. Averaged running statistics suit a
    model that is shrunk so little: on a ResNet8, shrinking it under them cost at most 0.05 points of accuracy at beta
    0.01 and 0.4 at 0.1, but 2 at 1 (benchmarks/shrunk_statistics.py), where `bn_stats: recalibrate` helps.

    Wrong choice where accuracy should rise: with SimpleCNN no gain over FedAvg showed (docs/papers/fedlws.md).
    """

    beta: NonNegative = 0.1
    """How strongly disagreement shrinks a layer (β)."""
    per: Literal["layer", "model"] = "layer"
    """`layer`: a γ for each layer; `model`: one γ from the norms of the whole model (the paper's Eq. 7)."""
    variant: Literal["full", "only_opt", "only_reg"] = "full"
    """What γ scales: the whole new model (γ ŵ), only the update (w + γ d), or only the old model (ŵ − (1 − γ) w)."""
    tau_stat: Literal["mean", "rms"] = "mean"
    """How τ averages distances; `rms` is an upper bound of the mean that asks the clients nothing."""
    tau_clamp: tuple[float, float] | None = None
    """Lower and upper bound of β τ; null: none."""
    lws_stats: Literal["parameters", "all"] = "parameters"
    """Whether running statistics and counters belong to their layer's norms."""
    shrink_buffers: bool = False
    """Shrink running statistics and counters as well."""
    refines: ClassVar[bool] = True

    @property
    def only_scales(self) -> bool:  # type: ignore[override]
        return self.variant == "full"

    @property
    def compares_models(self) -> bool:
        return self.lws_stats == "all"  # statistics are no updates

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (self.distance,) if self.tau_stat == "rms" else ()

    @property
    def distance(self) -> ReceivedDistance:
        return ReceivedDistance(buffers=self.lws_stats == "all")

    def check(self, facts: RunFacts) -> str | None:
        if self.tau_clamp is not None and not 0 <= self.tau_clamp[0] <= self.tau_clamp[1]:
            return f"tau_clamp is {list(self.tau_clamp)}; it must be a lower and an upper bound."
        for rule in (w for w in facts.weighting if isinstance(w, Coordinatewise)):
            if self.tau_stat == "rms" or self.lws_stats == "all":
                way = "Set tau_stat: mean and lws_stats: parameters"
                return (
                    f"takes τ or step counters from a mean of all clients, which {rule.name} does not protect. {way}."
                )
        return None

    def measures_distances_to(self, mixture: Mixture) -> Mixture | None:
        return mixture.support() if self.tau_stat == "mean" and self.lws_stats == "parameters" else None

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        layers, before, size, reduced = server.layers, server.value, server.layers.P, target
        sent = mixture.support()  # equal weights over what was uploaded
        if self.lws_stats == "all":
            size, reduced = layers.S, with_mean_counters(reduced, mixture, cohort)
        tau = self.disagreement(sent, cohort, server)  # [L + 1]: the model comes last
        norm = with_total(layers.norms(before[:size]))
        moved = with_total(layers.norms(reduced[:size] - before[:size]))
        pull = self.beta * tau if self.tau_clamp is None else (self.beta * tau).clip(*self.tau_clamp)
        gamma = np.where(norm > EPS, norm / np.maximum(pull * moved + norm, EPS), 1.0)
        r = np.where(moved > EPS, (1 - gamma) * norm / np.maximum(gamma * moved, EPS**2), 0.0)
        noted = {"gamma": gamma, "tau": tau, "norm": norm, "moved": moved, "r": r}
        for name, value in ((name, torch.from_numpy(value)) for name, value in noted.items()):
            server.note(self, name, value[:-1], "layer")
            server.note(self, f"model_{name}", value[-1])
        factors = torch.from_numpy(gamma[:-1] if self.per == "layer" else gamma[-1:].repeat(layers.L))
        server.note(self, "applied", factors, "layer")
        return self.shrink(factors, before, reduced if self.shrink_buffers else target, mixture)

    def disagreement(self, sent: Mixture, cohort: Cohort, server: Server) -> np.ndarray:
        """τ of every layer and of the whole model [L + 1], over the clients that sent it."""
        before, (rule, aggregate) = server.value, server.scratch.combined or (None, server.value)
        if isinstance(rule, Coordinatewise):
            return disagreement_by(rule, aggregate - before, sent, cohort)
        layers, share = sent.layers, sent.layers.collect(sent.base).numpy()  # [K, L]
        if self.measures_distances_to(sent):
            distances = cohort.distances_to_mixture(sent)
        else:
            centre = cohort.reduce(sent)
            if self.lws_stats == "all":
                centre = with_mean_counters(centre, sent, cohort)
            else:
                centre = centre[: layers.P]
            if self.tau_stat == "rms":
                moved = layers.norms(centre - before[: len(centre)])
                squares = torch.from_numpy(share) * cohort.stat(self.distance).square()
                return with_total((squares.sum(0) - moved.square()).clamp_min(0).sqrt())
            distances = cohort.distances(to=centre)
        spread = with_total(distances * torch.from_numpy(share > 0))  # ‖Δ_k − Δ̄‖  [K, L + 1]
        of_model = (share > 0).any(1)
        shares: np.ndarray = np.column_stack([share, of_model / max(1, of_model.sum())])
        tau: np.ndarray = (shares * spread).sum(0)
        return tau

    def shrink(self, gamma: Tensor, before: Tensor, after: Tensor, mixture: Mixture) -> Tensor:
        """The new value: γ [L] applied to `after` [S] in the way of the variant, to buffers only where asked."""
        layers = mixture.layers
        size, tensors = (layers.S, None) if self.shrink_buffers else (layers.P, layers.T)

        def expanded(per_layer: Tensor) -> Tensor:
            return layers.per_element(layers.expand(per_layer)[:tensors].to(after.dtype))

        factor = torch.ones_like(gamma) if self.variant == "only_reg" else gamma
        result = layers.scaled(after, layers.expand(factor)[:tensors])
        if self.variant != "full":
            own = 1 - gamma if self.variant == "only_opt" else gamma - 1
            result[:size] += expanded(own) * before[:size]
        if self.shrink_buffers:
            for _, elements, _ in layers.counters:
                result[elements].trunc_()  # as loading a float into an integer does
        return result


def disagreement_by(rule: Coordinatewise, combined: Tensor, sent: Mixture, cohort: Cohort) -> np.ndarray:
    """τ of every layer and of the whole model [L + 1] by a robust `rule`: what it makes of the clients' distances to the update
    [S] that it has `combined`, so that a liar's is one among them."""
    sends = sent.layers.collect(sent.sent).numpy()  # [K, L]
    spread = with_total(cohort.each(distances_to, combined[: sent.layers.P]) * torch.from_numpy(sends))  # [K, L + 1]
    columns = zip(spread.T, np.column_stack([sends, sends.any(1)]).T, strict=True)
    return np.array(
        [float(rule.column(torch.from_numpy(d[heard])[:, None])) if heard.any() else 0.0 for d, heard in columns]
    )


def distances_to(update: Tensor, layers: LayerMap, other: Tensor) -> Tensor:
    return layers.norms(update[: len(other)] - other)


def with_total(norms: Tensor) -> np.ndarray:
    """Norms of layers, and after them that of all together: [..., L] -> [..., L + 1]."""
    per_layer = norms.numpy()
    return np.concatenate([per_layer, np.sqrt(np.square(per_layer).sum(-1, keepdims=True))], axis=-1)


def with_mean_counters(value: Tensor, mix: Mixture, cohort: Cohort) -> Tensor:
    """`value` [S], a reduction by `mix`, with counters averaged like everything else and not taken by their maximum."""
    result = value.clone()
    for tensor, elements, columns in mix.layers.counters:
        weights = mix.base[:, tensor]
        if weights.sum() > 0:
            result[elements] = torch.stack([(weights * counts).sum() for counts in cohort.counters[:, columns].T])
    return result
