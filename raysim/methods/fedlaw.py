"""FedLAW: Revisiting Weighted Aggregation in Federated Learning with Neural Networks (Li et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from raysim.core.bounds import Fraction, NonNegativeInt, Positive, PositiveInt
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.optim import Adam, OptimizerSpec
from raysim.core.server import Server, Weighting
from raysim.core.server_model import ServerModel
from raysim.lazy import Tensor, torch
from raysim.methods.fedlws import FedLWS

# Stochastic weight averaging, as the released code schedules it.
SWA_START, SWA_LR, SWA_ANNEALING, COSINE_EPOCHS = 5, 0.05, 10, 100
WARM_UP = 2  # rounds in which a mixture that is worse than chance is nothing to warn of

# Inner products with the proxy loss's gradient G at w = γ (w_g + Σ λ_k Δ_k): ⟨w_g, G⟩ and ⟨Δ_k, G⟩ [K].
Slopes = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # of (λ [K], γ, positions [b])


@dataclass(frozen=True)
class Stage:
    """Some epochs of weight learning, and what they move; the other weights stay where they are."""

    moves: Literal["lambda", "gamma", "both"]
    epochs: int
    swa: bool = False
    gamma_clamp: tuple[float, float] | None = None

    def part(self, clients: int) -> slice:
        """Of the weights [K + 1]."""
        return {"lambda": slice(0, clients), "gamma": slice(clients, None), "both": slice(None)}[self.moves]


@dataclass(frozen=True)
class LearnedWeights(Weighting):
    """What all methods of the paper share: Adam on the loss of the mixed model w = γ Σ λ_k w_k over the proxy samples.

    λ = softmax(x), γ = eˢ (`exp`), or λ = x² / Σ x², γ = s² (`quad`). Weights start at their initial values in every round. Since
    Σ λ = 1, w = γ (w_g + Σ λ_k Δ_k), and a step needs one product of λ with the updates and one of the updates with
    the gradient, whether the updates are stacked on one device or lie where they were trained. The model
    is in train mode during this. Weights that do not stay finite are replaced by those they started from.
    """

    epochs: NonNegativeInt = 100
    """Passes over the proxy samples, each round."""
    lr: Positive = 0.01
    """Learning rate of Adam at first."""
    form: Literal["exp", "quad"] = "exp"
    """How weights are made of what is learned: by softmax and exponential, or by squares."""
    batch_size: PositiveInt = 128
    """Proxy samples of a batch."""
    betas: tuple[Fraction, Fraction] = (0.5, 0.999)
    """Adam's averaging factors of gradient and squared gradient."""
    halve_every: PositiveInt = 20
    """Epochs after which the learning rate is halved."""

    needs: ClassVar[Needs] = Needs(proxy=True, gather_bytes=True)

    def check(self, facts: RunFacts) -> str | None:
        reasons = [f"{m.name} {m.withholds}" for m in facts.client if m.withholds]
        return f"mixes whole models, but {reasons[0]}." if reasons else None

    def stages(self) -> tuple[Stage, ...]:
        raise NotImplementedError

    # The weights are one vector: x [K], then s.

    def start(self, p: Tensor) -> Tensor:
        """Where learning starts, [K + 1]: the prior weights, or, in the quadratic form, uniform ones."""
        return self.weights_of(p if self.form == "exp" else torch.full_like(p, 1 / len(p)))

    def weights_of(self, lam: Tensor) -> Tensor:
        """[K] -> [K + 1]: these λ, and γ = 1."""
        if self.form == "exp":
            return torch.cat([lam.log(), lam.new_zeros(1)])
        return torch.cat([lam.sqrt(), lam.new_ones(1)])

    def read(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """[..., K + 1] -> λ [..., K] and γ [...]."""
        x, s = z[..., :-1], z[..., -1]
        if self.form == "exp":
            return x.softmax(-1), s.exp()
        return x.square() / x.square().sum(-1, keepdim=True), s.square()

    def gradient(self, z: Tensor, of_server: Tensor, of_updates: Tensor) -> Tensor:
        """∂L/∂z [K + 1] from ⟨w_g, G⟩ and ⟨Δ_k, G⟩ [K]."""
        lam, gamma = self.read(z)
        mean = lam @ of_updates
        centred, along = of_updates - mean, of_server + mean  # D_k − Σ λD, and Σ λD
        if self.form == "exp":
            return torch.cat([gamma * lam * centred, (gamma * along).view(1)])
        x, s = z[:-1], z[-1]
        return torch.cat([2 * gamma * x / x.square().sum() * centred, (2 * s * along).view(1)])

    def rate(self, stage: Stage, epoch: int) -> float:
        """Learning rate: halved every so often; with SWA a cosine until averaging starts, then up to `SWA_LR`."""
        if not stage.swa:
            return self.lr * 0.5 ** (epoch // self.halve_every)
        averaging = epoch - SWA_START - 1
        cosine = self.lr * (1 + math.cos(math.pi * min(epoch, SWA_START + 1) / COSINE_EPOCHS)) / 2
        rise = (1 - math.cos(math.pi * min(max(averaging, 0) / SWA_ANNEALING, 1))) / 2
        return rise * SWA_LR + (1 - rise) * cosine

    def learn(self, p: Tensor, orders: Tensor, slopes: Slopes) -> Tensor:
        """Weights [epochs + 1, K + 1] at the start and after every epoch; `orders` [epochs, n] are proxy positions."""
        z = self.start(p)
        history, grad, epochs = [z.clone()], torch.zeros_like(z), iter(orders)
        for stage in self.stages():
            part, mean = stage.part(len(p)), torch.zeros_like(z)
            adam = Adam(OptimizerSpec("adam", betas=self.betas), z, grad, self.lr)
            for epoch in range(stage.epochs):
                adam.lr = self.rate(stage, epoch)
                for batch in next(epochs).split(self.batch_size):
                    grad.copy_(self.gradient(z, *slopes(*self.read(z), batch)))
                    adam.step(part)
                    if stage.gamma_clamp is not None:
                        z[-1].clamp_(*map(math.log if self.form == "exp" else math.sqrt, stage.gamma_clamp))
                if stage.swa and epoch > SWA_START:
                    mean += (z - mean) / (epoch - SWA_START)
                    if epoch == stage.epochs - 1:
                        z.copy_(mean)
                history.append(z.clone())
        return torch.stack(history)

    def fit(self, models: Models, p: Tensor, orders: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The history of `learn`; the proxy loss before, after, and of a model of zeros [3]; the running statistics [B] it left."""
        history = self.learn(p, orders, models.slopes)
        statistics = models.statistics().clone()
        lam, gamma = self.read(history[-1])
        losses = torch.stack([models.loss(*w) for w in (self.read(history[0]), (lam, gamma), (lam, 0 * gamma))])
        return history, losses, statistics

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        p = prior.per_client()
        orders = server.proxy_orders(self, self.epochs, self.batch_size)
        if cohort.gathers:
            fitted = cohort.compute(fit_stacked, self, p, orders, server.proxy.rows, models=True)
        else:
            fitted = self.fit(Distributed(self, cohort, server, prior), p, orders)
        server.note(self, "lambda", self.read(fitted[0])[0], "epoch", "client")
        lam, gamma = self.conclude(server, *fitted)
        return prior.reweighted(lam).scaled(gamma)

    def guarded(self, server: Server, gamma: Tensor, losses: Tensor) -> bool:
        """Whether the learned γ is not applied."""
        return False

    def conclude(self, server: Server, history: Tensor, losses: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Record what was learned but λ; the final λ [K] and γ."""
        lam, gamma = self.read(history)
        server.note(self, "gamma", gamma, "epoch")
        server.note(self, "proxy_loss_before", losses[0])
        server.note(self, "proxy_loss_after", losses[1])
        learned = bool(history[-1].isfinite().all() and statistics.isfinite().all())
        guarded = learned and self.guarded(server, gamma[-1], losses)
        server.fell_back(self, guarded or not learned)
        if not learned:
            return lam[0], gamma[0]
        if guarded:  # what learning left are the statistics of the scaled model
            return lam[-1], gamma[0]
        server.scratch.statistics = statistics
        return lam[-1], gamma[-1]


@dataclass(frozen=True)
class LearnedShrinking(LearnedWeights):
    """What learns γ shares (FedLAW, 2023). While no mixture is better than a model of zeros, γ shrinks the model to that."""

    gamma_clamp: tuple[float, float] | None = None
    """Lower and upper bound of γ; null: none."""
    guard: bool = False
    """Keep γ at 1 in a round whose proxy loss after learning is not below that of a model of zeros (ours, not the paper's)."""

    stage: ClassVar[str] = "rescale"

    @property
    def scales(self) -> bool:
        return True

    def check(self, facts: RunFacts) -> str | None:
        clamp = self.gamma_clamp
        if clamp is not None and not 0 < clamp[0] <= clamp[1]:
            return f"gamma_clamp is {list(clamp)}; it must be a positive lower and an upper bound."
        if any(isinstance(step, FedLWS) for step in facts.server):
            return "shrinks the model, and so does FedLWS; a run can have one of them."
        return super().check(facts)

    def guarded(self, server: Server, gamma: Tensor, losses: Tensor) -> bool:
        hopeless = bool(losses[1] >= losses[2])
        if hopeless and gamma < 1 and not self.guard and server.t >= WARM_UP:
            server.warn(
                f"{self.name}: on the proxy samples the mixture is no better than a model of zeros, so γ may drive the model to "
                "zero. Set guard: true, or a lower lr"
            )
        return hopeless and self.guard


@dataclass(frozen=True)
class FedLAW(LearnedShrinking):
    """Shrink factor γ and client weights λ learned together on proxy data (FedLAW, 2023): w = γ Σ λ_k w_k.

    With `swa`, in two stages of half the epochs each: λ with γ fixed, averaging its iterates, and γ with λ fixed. The released
    code learns λ first, the paper γ. Nothing bounds γ but `gamma_clamp`. While the mean of the clients is worse than chance,
    shrinking it lowers the loss, and over the rounds the model can vanish; `guard` keeps γ at 1 meanwhile. Where γ is far above
    1, the model's norm becomes several times FedAvg's, and learning can slow. A lower `lr` or a bound on γ may help against
    both. Weights that do not stay finite are replaced by those with which learning began.

    Wrong choice when the clients' mean is worse than chance on the proxy samples: at α 0.1, with the paper's `lr`, it
    stayed at chance, 24 points behind FedAvg (docs/papers/fedlaw.md).
    """

    swa: bool = False
    """Learn λ and γ in two stages and average λ's iterates."""
    swa_order: Literal["lambda_first", "gamma_first"] = "lambda_first"
    """Which of the two stages comes first."""

    def check(self, facts: RunFacts) -> str | None:
        return refuse_weightings(self, facts) or super().check(facts)

    def stages(self) -> tuple[Stage, ...]:
        if not self.swa:
            return (Stage("both", self.epochs, gamma_clamp=self.gamma_clamp),)
        half = self.epochs // 2
        if self.swa_order == "lambda_first":
            return (
                Stage("lambda", half, swa=True),
                Stage("gamma", self.epochs - half, gamma_clamp=self.gamma_clamp),
            )
        return (Stage("gamma", half, gamma_clamp=self.gamma_clamp), Stage("lambda", self.epochs - half, swa=True))


@dataclass(frozen=True)
class AttentiveLAW(LearnedWeights):
    """Client weights λ learned on proxy data without shrinking, γ = 1 (FedLAW, 2023, attentive LAW).

    From round `stop_round` on clients count by their samples again; with `bn_stats: proxy` BatchNorm's statistics then
    stay as learning last left them, so set `recalibrate`. `swa` averages λ's iterates. Weights that do not stay finite are
    replaced by those with which learning began.

    Wrong choice where the mean should shrink: the shares λ sum to one, and γ stays 1.
    """

    swa: bool = False
    """Average the iterates of λ."""
    stop_round: NonNegativeInt | None = None
    """Round (from 0) from which clients count by their samples again; null: never."""

    def check(self, facts: RunFacts) -> str | None:
        return refuse_weightings(self, facts) or super().check(facts)

    def stages(self) -> tuple[Stage, ...]:
        return (Stage("lambda", self.epochs, self.swa),)

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        stopped = self.stop_round is not None and server.t >= self.stop_round
        return prior if stopped else super().plan(cohort, server, prior)


@dataclass(frozen=True)
class AdaptiveGWS(LearnedShrinking):
    """Only the shrink factor γ learned on proxy data (FedLAW, 2023, adaptive global weight shrinking): w = γ ŵ.

    ŵ is the model that the other weightings make, so that no client's model is gathered. With a global step size `eta` (the
    paper's table 10) the step comes before γ: w = γ (w_g + eta (ŵ − w_g)). As with FedLAW, γ can drive the model to zero or make
    it large; `gamma_clamp` or a lower `lr` helps. A γ that does not stay finite is replaced by 1.

    Wrong choice where some clients mislead: γ is one number for the whole mean, and cannot weigh one less.
    """

    eta: Positive = 1.0
    """Step size of the server (η), applied before γ."""

    def stages(self) -> tuple[Stage, ...]:
        return (Stage("gamma", self.epochs, gamma_clamp=self.gamma_clamp),)

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        update = self.eta * (cohort.reduce(prior) - server.value)
        orders = server.proxy_orders(self, self.epochs, self.batch_size)
        alone = torch.ones(1, dtype=torch.float64)
        fitted = cohort.compute(fit_stacked, self, alone, orders, server.proxy.rows, update[None])
        _, gamma = self.conclude(server, *fitted)
        return prior.scaled(gamma * self.eta, anchor=gamma * (1 - self.eta + self.eta * prior.anchor))


def refuse_weightings(method: LearnedWeights, facts: RunFacts) -> str | None:
    others = " and ".join(w.name for w in facts.weighting if type(w) is not type(method))
    return f"learns the clients' weights itself, so that {others} would have no effect." if others else None


# Two ways to hold the models of a cohort.


class Models(Protocol):
    """The mixed model w = γ (w_g + Σ λ_k Δ_k) on proxy data."""

    def slopes(self, lam: Tensor, gamma: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """⟨w_g, G⟩ and ⟨Δ_k, G⟩ [K], float64, of the gradient G at positions `batch` [b]."""
        ...

    def loss(self, lam: Tensor, gamma: Tensor) -> Tensor:
        """The mean loss over all proxy samples."""
        ...

    def statistics(self) -> Tensor:
        """The running statistics [B], which follow every batch of `slopes`."""
        ...


class Stacked:
    """All updates as one matrix on one device: a product forward and a product back."""

    def __init__(self, server_model: ServerModel, updates: Tensor, rows: np.ndarray, batch_size: int):
        P = server_model.layers.P
        self.server_model, self.batch_size = server_model, batch_size
        self.server, self.updates = server_model.value[:P], updates[:, :P]  # w_g [P], Δ [K, P]
        self.objective = server_model.objective(rows)
        server_model.load(server_model.value)

    def mix(self, lam: Tensor, gamma: Tensor) -> None:
        mixed = self.server_model.flat.params
        torch.addmv(self.server, self.updates.T, lam.to(mixed.dtype), out=mixed).mul_(gamma.to(mixed.dtype))

    def slopes(self, lam: Tensor, gamma: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        self.mix(lam, gamma)
        grad = self.server_model.gradient(self.objective, batch)
        return (self.server @ grad).double(), (self.updates @ grad).double()

    def loss(self, lam: Tensor, gamma: Tensor) -> Tensor:
        self.mix(lam, gamma)
        return self.server_model.mean_loss(self.objective, self.batch_size)

    def statistics(self) -> Tensor:
        return self.server_model.flat.buffers


@dataclass
class Distributed:
    """Updates stay with their hosts: a step is one reduction, one gradient on one host, and one call of `dots`."""

    law: LearnedWeights
    cohort: Cohort
    server: Server
    prior: Mixture
    buffers: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = self.server.value[self.server.layers.P :].clone()

    def mix(self, lam: Tensor, gamma: Tensor) -> Tensor:
        value = self.cohort.reduce(self.prior.reweighted(lam).scaled(gamma))
        value[self.server.layers.P :] = self.buffers
        return value

    def slopes(self, lam: Tensor, gamma: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.server.proxy.rows[batch.numpy()]
        grad, self.buffers = self.cohort.compute(gradient_of, self.mix(lam, gamma), rows)
        whole = self.server.layers.regroup("model")
        return self.server.params.double() @ grad.double(), self.cohort.dots(grad, whole)[:, 0]

    def loss(self, lam: Tensor, gamma: Tensor) -> Tensor:
        rows, batch_size = self.server.proxy.rows, self.law.batch_size
        loss: Tensor = self.cohort.compute(mean_loss_of, self.mix(lam, gamma), rows, batch_size)
        return loss

    def statistics(self) -> Tensor:
        return self.buffers


def fit_stacked(
    server_model: ServerModel, law: LearnedWeights, p: Tensor, orders: Tensor, rows: Any, *updates: Tensor
) -> Any:
    """`law.fit` over the updates [K, S] given, or those of the cohort."""
    models = updates[0] if updates else server_model.updates
    assert models is not None
    return law.fit(Stacked(server_model, models, rows, law.batch_size), p, orders)


def gradient_of(server_model: ServerModel, value: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Gradient [P] of the loss of `value` [S] on `rows`, and the running statistics [B] after them."""
    server_model.load(value)
    objective = server_model.objective(rows)
    return server_model.gradient(objective, torch.arange(len(rows), device=value.device)), server_model.flat.buffers


def mean_loss_of(server_model: ServerModel, value: Tensor, rows: np.ndarray, batch_size: int) -> Tensor:
    server_model.load(value)
    return server_model.mean_loss(server_model.objective(rows), batch_size)
