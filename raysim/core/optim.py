"""Optimisers over one flat vector: one update however many tensors the model has."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from raysim.lazy import Tensor, torch

WHOLE = slice(None)


@dataclass(frozen=True)
class OptimizerSpec:
    """What `local` in a configuration says about the clients' optimiser."""

    name: str = "sgd"  # sgd | adam | adamw
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    proximal: float = 0.0  # μ of a proximal term that a method adds to the gradient

    def build(self, params: Tensor, grad: Tensor, lr: float) -> SGD | Adam:
        return (SGD if self.name == "sgd" else Adam)(self, params, grad, lr)


class _Optimizer:
    """`normaliser` accumulates FedNova's ‖a_k‖₁ (Wang et al., 2020): how much gradient the steps so far have applied."""

    def __init__(self, spec: OptimizerSpec, params: Tensor, grad: Tensor, lr: float):
        self.spec, self.params, self.grad, self.lr = spec, params, grad, lr
        self.proximal = spec.proximal  # it contracts what was applied before by 1 - lr·μ
        self.normaliser = 0.0
        self.private: slice | None = None  # a part that is never sent, whose steps `normaliser` leaves out
        self.private_steps = 0

    def step(self, part: slice = WHOLE) -> None:
        """Update the parameters, or the slice `part` of them, in place. The gradient is used up."""
        self.count(part)
        self.move(part)

    def count(self, part: slice) -> None:
        """What a step does to numbers."""
        raise NotImplementedError

    def move(self, part: slice) -> None:
        """What a step does to vectors, of one model or of several in rows."""
        raise NotImplementedError


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, as `torch.optim.SGD` defines them."""

    def __init__(self, spec: OptimizerSpec, params: Tensor, grad: Tensor, lr: float):
        super().__init__(spec, params, grad, lr)
        self.momentum = torch.zeros_like(params) if spec.momentum else None  # [P]
        self._weight = 0.0

    def move(self, part: slice) -> None:
        params, grad = (self.params, self.grad) if part == WHOLE else (self.params[part], self.grad[part])
        if self.spec.weight_decay:
            grad.add_(params, alpha=self.spec.weight_decay)
        if self.momentum is not None:
            momentum = self.momentum[part].mul_(self.spec.momentum).add_(grad)
            grad = grad.add_(momentum, alpha=self.spec.momentum) if self.spec.nesterov else momentum
        params.add_(grad, alpha=-self.lr)

    def count(self, part: slice) -> None:
        if part == self.private:
            self.private_steps += 1
            return
        self._weight = self.spec.momentum * self._weight + 1
        applied = 1 + self.spec.momentum * self._weight if self.spec.nesterov else self._weight
        self.normaliser = (1 - self.lr * self.proximal) * self.normaliser + applied

    @property
    def subtracts(self) -> bool:
        """Whether a step subtracts the gradient times its rate, and does nothing else."""
        return self.momentum is None and not self.spec.weight_decay

    @property
    def vectors(self) -> tuple[str, ...]:
        """Its vectors beside the parameters and their gradient."""
        return () if self.momentum is None else ("momentum",)

    def moves_like(self, other: Adam | SGD) -> bool:
        """Whether the numbers with which another one moves are the same."""
        return True

    def state(self) -> dict[str, Tensor]:
        """What outlives a round with `local.state: persist`."""
        return {} if self.momentum is None else {"momentum": self.momentum}

    def load(self, state: dict[str, Tensor]) -> None:
        if self.momentum is not None:
            self.momentum.copy_(state["momentum"])


class Adam(_Optimizer):
    """Adam with bias correction (epsilon 1e-8). Its weight decay is L2, as `torch.optim.Adam` defines it, or decoupled from
    the gradient, as `torch.optim.AdamW` does. FedNova has no closed form for it: `normaliser` counts steps."""

    def __init__(self, spec: OptimizerSpec, params: Tensor, grad: Tensor, lr: float):
        super().__init__(spec, params, grad, lr)
        self.mean, self.square = torch.zeros_like(params), torch.zeros_like(params)  # [P]
        self.steps: dict[tuple[int, int], int] = {}  # (start, stop) of a part -> its steps, for the bias correction

    def move(self, part: slice) -> None:
        params, grad, (b1, b2) = self.params[..., part], self.grad[..., part], self.spec.betas
        steps = self.steps[self._key(part)]
        if self.spec.weight_decay and self.spec.name == "adamw":
            params.mul_(1 - self.lr * self.spec.weight_decay)
        elif self.spec.weight_decay:
            grad.add_(params, alpha=self.spec.weight_decay)
        mean = self.mean[..., part].lerp_(grad, 1 - b1)
        square = self.square[..., part].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        scale = (square / (1 - b2**steps)).sqrt_().add_(1e-8)
        params.addcdiv_(mean, scale, value=-self.lr / (1 - b1**steps))

    def count(self, part: slice) -> None:
        key = self._key(part)
        self.steps[key] = self.steps.get(key, 0) + 1
        self.normaliser += part != self.private
        self.private_steps += part == self.private

    def _key(self, part: slice) -> tuple[int, int]:
        start, stop, _ = part.indices(self.params.shape[-1])
        return start, stop

    subtracts = False

    @property
    def vectors(self) -> tuple[str, ...]:
        """Its vectors beside the parameters and their gradient."""
        return "mean", "square"

    def moves_like(self, other: Adam | SGD) -> bool:
        """Whether the numbers with which another one moves are the same."""
        return isinstance(other, Adam) and self.steps == other.steps

    def state(self) -> dict[str, Tensor]:
        """What outlives a round with `local.state: persist`."""
        steps = torch.tensor([(*part, n) for part, n in self.steps.items()]).view(-1, 3)
        return {"mean": self.mean, "square": self.square, "steps": steps}

    def load(self, state: dict[str, Tensor]) -> None:
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
        self.steps = {(start, stop): n for start, stop, n in state["steps"].tolist()}


class Rows:
    """The optimisers of several clients, which step together: their own vectors become views of the rows of matrices."""

    def __init__(self, optimizers: Sequence[SGD | Adam], params: Tensor, grad: Tensor):
        """`params` and `grad` [k, P] are what the rows will step with."""
        own = {name: torch.stack([getattr(o, name) for o in optimizers]) for name in optimizers[0].vectors}
        for i, optimizer in enumerate(optimizers):
            vars(optimizer).update({name: matrix[i] for name, matrix in own.items()})
        self.optimizers, self._matrices = optimizers, {"params": params, "grad": grad, **own}

    def step(self, start: int, stop: int) -> None:
        """One step of the rows from `start` to `stop`, as `SGD.step` and `Adam.step` take it. Gradients are used up."""
        for optimizer in self.optimizers[start:stop]:
            optimizer.count(WHOLE)
        while start < stop:
            first = self.optimizers[start]
            alike = [*itertools.takewhile(first.moves_like, self.optimizers[start:stop])]
            end, together = start + len(alike), copy.copy(first)
            vars(together).update({name: matrix[start:end] for name, matrix in self._matrices.items()})
            together.move(WHOLE)
            start = end
