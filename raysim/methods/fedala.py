"""FedALA: Adaptive Local Aggregation for Personalized Federated Learning (Zhang et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.core.bounds import NonNegative, NonNegativeInt, PositiveInt, Share
from raysim.core.client import ClientMethod, LocalRun, Passes
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.lazy import Tensor, torch

MAX_EPOCHS = 100  # the rule for convergence may never be met


@dataclass
class ALAState:
    """A client's element-wise weights of the top layers, in [0, 1]; None until they are first learned."""

    weights: Tensor | None = None
    settled: bool = False  # the first, long optimisation is done


@dataclass(frozen=True)
class FedALA(ClientMethod):
    """Start from an element-wise mix of global and local model, learned on local data (FedALA, 2023, algorithm 1).

    In the top `layers` stages of what is downloaded (or the last `tensors` of its parameter tensors):
    Θ̂ = Θ_i + (Θ − Θ_i) ⊙ W, W ← clip(W − eta ∂L/∂Θ̂ ⊙ (Θ − Θ_i), 0, 1) on a `fraction` of the client's samples. The
    first optimisation runs until the loss settles, later ones take `epochs` passes. The stages below are taken from
    the download. Θ is what the client is sent, Θ_i what it trained last. FedALA combines with methods that do not bring
    a local initialisation.

    The released code of today (preset `official_001`): `tensors: 2`, `window: true`, `clients: all`, `threshold: 0.1`,
    `drop_last: false`. BatchNorm runs in train mode while W is learned, and its statistics are restored afterwards. The
    loss of each epoch's last batch decides when the first optimisation ends, and is noted; a `threshold` that it never
    reaches costs every client 100 epochs.

    Wrong choice where clients take part once: without a model of its own a client has nothing to mix. The round in which
    W first settles took 6.6 to 8.2 times as long (docs/papers/fedala.md).
    """

    eta: NonNegative = 1.0
    """Step size of the weights W (η)."""
    fraction: Share = 0.8
    """Share of the client's samples on which W is learned each round, in (0, 1] (s %)."""
    layers: PositiveInt = 1
    """How many stages from the top are mixed (p)."""
    tensors: NonNegativeInt | None = None
    """Mix this many of the last parameter tensors instead of whole stages; 0: all, null: use `layers`."""
    threshold: NonNegative = 0.01
    """Standard deviation of the last ten epochs' losses below which W has settled."""
    window: bool = False
    """Take neighbouring samples in stored order, where the paper draws at random."""
    clients: Literal["cohort", "all"] = "cohort"
    """Who mixes: the round's cohort, or also those that are not drawn, which then keep the mix as Θ_i."""
    freeze: bool = False
    """Leave W as the first optimisation made it."""
    epochs: PositiveInt = 1
    """Passes once W has settled; also the least number of the first optimisation (6 in figure 3)."""
    drop_last: bool | None = None
    """Leave out a shorter last batch where W is learned; null: as `local.drop_last` does in training."""
    start_round: NonNegativeInt = 0
    """Round (from 0) before which the download is taken as it is (155 in figure 4)."""
    needs: ClassVar[Needs] = Needs(previous="trained")
    batched: ClassVar[bool] = True

    def own_pass(self, samples: np.ndarray, drop_last: bool) -> tuple[np.ndarray, bool] | None:
        return self._count(samples), drop_last if self.drop_last is None else self.drop_last

    def more_work(self, samples: np.ndarray, passes: Passes) -> np.ndarray | float:
        """As once W has settled: how long its first optimisation takes, only training shows."""
        return 0.0 if self.freeze else self.epochs * passes.once(self._count(samples), self.drop_last)

    def new_state(self, layers: LayerMap) -> ALAState:
        return ALAState()

    def starts_everyone(self) -> bool:
        return self.clients == "all"

    def start(self, run: LocalRun) -> None:
        run.receive()
        top = self._top(run)
        if run.t < self.start_round or run.previous is None or torch.equal(run.previous[top], run.received[top]):
            return
        state, old, new = run.state(self), run.previous[top], run.received[top]
        W = state.weights = torch.ones_like(new) if state.weights is None else state.weights
        if not (self.freeze and state.settled):
            buffers = run.buffers.clone()
            self._learn(W, run, old, new, top, once=state.settled)
            run.buffers.copy_(buffers)
            state.settled = True
        torch.lerp(old, new, W, out=run.params[top])  # exactly the global model where W is 1

    def _learn(self, W: Tensor, run: LocalRun, old: Tensor, new: Tensor, top: slice, once: bool) -> None:
        first, gap, samples = run.layers.stage_at(top.start), new - old, self._samples(run)
        losses: list[float] = []
        while len(losses) < self.epochs or not (once or has_settled(losses, self.threshold)):
            for x, y in run.slices(samples, "ala", drop_last=self.drop_last):
                torch.lerp(old, new, W, out=run.params[top])
                loss = run.gradient(x, y, corrected=False, stage=first)
                W.sub_(self.eta * run.grad[top] * gap).clamp_(0, 1)
            losses.append(float(loss))
        run.note(self, "loss", torch.tensor(losses, dtype=torch.float64), "epoch")

    def _top(self, run: LocalRun) -> slice:
        downloaded = "body" if run.stack.personal_layers == "head" else "all"
        if self.tensors is not None:
            return run.layers.top_tensors(self.tensors, downloaded)
        return run.layers.top(self.layers, downloaded)

    def _count(self, samples: np.ndarray) -> np.ndarray:
        return np.maximum(1, (self.fraction * samples).astype(np.int64))

    def _samples(self, run: LocalRun) -> Tensor:
        """Those that W is learned on in this round, in the order of all its epochs."""
        n, stream = len(run.data.train.y), run.generator("ala")
        count = int(self._count(np.array(n)))
        if self.window:
            return torch.arange(count) + torch.randint(n - count + 1, (1,), generator=stream)
        return torch.randperm(n, generator=stream)[:count]


def has_settled(losses: list[float], threshold: float) -> bool:
    """Whether the last ten epochs' losses hardly differ, or there have been as many epochs as there may be."""
    last = torch.tensor(losses[-10:], dtype=torch.float64)
    return (len(losses) > 10 and last.std(correction=0).item() < threshold) or len(losses) >= MAX_EPOCHS
