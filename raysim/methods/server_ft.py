"""Server-FT: fine-tuning the aggregate on the server, the baseline of FedLAW (Li et al., 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raysim.core.bounds import Fraction, NonNegativeInt, Positive, PositiveInt
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.optim import OptimizerSpec
from raysim.core.robust import Coordinatewise
from raysim.core.server import ProxyData, Server, ServerStep
from raysim.core.server_model import ServerModel
from raysim.lazy import Tensor, torch

# The released code makes the server's optimiser as it makes the clients', and never decays its learning rate.
OFFICIAL_LR, OFFICIAL = 0.08, OptimizerSpec("sgd", momentum=0.9, weight_decay=5e-4)


@dataclass(frozen=True)
class Recipe:
    """How a training on proxy samples differs from plain epochs."""

    temperature: float = 1.0  # of the student's softmax, where probabilities are taught
    swa: bool = False  # the result is the mean of the models after every epoch
    cosine: bool = False  # the learning rate falls to zero over all batches
    validation: np.ndarray | None = None  # rows on which the model of the best epoch is chosen ...
    patience: int = 0  # ... once so many batches have not raised it


@dataclass(frozen=True)
class ServerFT(ServerStep):
    """Train the aggregate on the server's labelled proxy samples (Server-FT, a baseline of FedLAW, Li et al., 2023).

    Adam, reset in every round; `server_ft_official` takes the released code's optimiser instead: SGD with lr 0.08,
    momentum 0.9, which persists over rounds, and weight decay 5e-4. The learning rate of Adam is our choice: the paper
    gives none. BatchNorm's running statistics follow the proxy batches.

    Wrong choice when clients train without `local.grad_clip`: three of six runs diverged after 44 to 59 rounds
    (docs/papers/fedlaw.md).
    """

    epochs: NonNegativeInt = 2
    """Passes over the proxy samples, each round."""
    lr: Positive = 1e-3
    """Learning rate of the server's Adam."""
    batch_size: PositiveInt = 128
    """Proxy samples of a batch."""
    betas: tuple[Fraction, Fraction] = (0.5, 0.999)
    """Adam's averaging factors of gradient and squared gradient."""
    server_ft_official: bool = False
    """Use the released code's optimiser, SGD with momentum, instead of Adam."""

    needs: ClassVar[Needs] = Needs(proxy=True)
    reads_models: ClassVar[bool] = False
    refines: ClassVar[bool] = True

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        return self.train(target, cohort, server) if self.epochs else target

    def train(
        self, target: Tensor, cohort: Cohort, server: Server, taught: Tensor | None = None, recipe: Recipe | None = None,
        part: ProxyData | None = None,
    ) -> Tensor:  # fmt: skip
        """`target` [S] trained on the labels, or towards the probabilities `taught` [n, C], of the proxy set or a `part`."""
        orders, rows = server.proxy_orders(self, self.epochs, self.batch_size, part), (part or server.proxy).rows
        value: Tensor
        value, momentum, losses = cohort.compute(
            train_on_proxy, self, target, rows, orders, server.memory.get(self), taught, recipe or Recipe()
        )
        if self.server_ft_official:
            server.memory[self] = momentum
        server.note(self, "proxy_loss_before", losses[0])
        server.note(self, "proxy_loss_after", losses[1])
        return value


def refuse_parts(facts: RunFacts) -> str | None:
    """Teachers are models that the server has: whole ones, sent by all clients. What a robust rule does to each coordinate by
    itself does not protect them."""
    choosing = [w.name for w in facts.weighting if w.stage == "select"]
    keeping = [f"{m.name} {m.withholds}" for m in facts.client if m.withholds]
    rules = [w.name for w in facts.weighting if isinstance(w, Coordinatewise)]
    unsafe = [f"with {name} malicious ones are among them; multi_krum drops those" for name in rules]
    reasons = [*(f"with {name} not every client sends its whole model" for name in choosing), *keeping, *unsafe]
    return f"learns from all clients' whole models, but {reasons[0]}." if reasons else None


def train_on_proxy(
    server_model: ServerModel, how: ServerFT, value: Tensor, rows: np.ndarray, orders: Tensor, momentum: Tensor | None,
    taught: Tensor | None, recipe: Recipe,
) -> Any:  # fmt: skip
    """The trained value [S], the optimiser's momentum [P] and the objective before and after [2]."""
    server_model.load(value)
    objective = (
        server_model.objective(rows) if taught is None else server_model.distillation(rows, taught, recipe.temperature)
    )
    before = server_model.mean_loss(objective, how.batch_size)
    spec, lr = (OFFICIAL, OFFICIAL_LR) if how.server_ft_official else (OptimizerSpec("adam", betas=how.betas), how.lr)
    optimizer = spec.build(server_model.flat.params, server_model.flat.grad, lr)
    if momentum is not None:
        optimizer.load({"momentum": momentum})
    mean, total = torch.zeros_like(value), sum(len(order.split(how.batch_size)) for order in orders)
    done = since = 0  # batches: all, and those since the last gain
    held = recipe.validation
    best, best_value = 0.0 if held is None else server_model.quality(held), value
    for epoch, order in enumerate(orders):
        for batch in order.split(how.batch_size):
            if recipe.cosine:
                optimizer.lr = lr * (1 + math.cos(math.pi * done / total)) / 2
            server_model.gradient(objective, batch)
            optimizer.step()
            done, since = done + 1, since + 1
        if recipe.swa:
            mean += (server_model.flat.value - mean) / (epoch + 1)
        if held is not None:
            quality = server_model.quality(held)
            if quality > best:
                best, best_value, since = quality, server_model.flat.value.clone(), 0
            elif since >= recipe.patience:
                break
    if recipe.swa:
        server_model.load(mean)
    if held is not None:
        server_model.load(best_value)
    after = server_model.mean_loss(objective, how.batch_size)
    last = optimizer.state().get("momentum", value.new_empty(0))
    return server_model.flat.value, last, torch.stack([before, after])
