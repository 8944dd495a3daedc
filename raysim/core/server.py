"""The server's side: what clients are sent, how their models are weighted, what is done with the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raysim.core.cohort import Cohort
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe
from raysim.core.rng import SERVER, generator

STAGES = ("select", "weigh", "multiply", "rescale")


@dataclass(frozen=True)
class Population:
    """What the server knows of all N clients."""

    sizes: Tensor  # [N] int64 training samples
    labels: Tensor  # [N, C] int64 training samples of each class


@dataclass(frozen=True)
class Note:
    """A value that a method wants recorded; `axes` name its dimensions: "client", "layer", or anything for an index."""

    method: str
    name: str
    value: Tensor
    axes: tuple[str, ...]


@dataclass
class Server:
    """Everything the server remembers; saved whole."""

    value: Tensor  # [S] the global model: parameters, then buffers
    layers: LayerMap  # in the run's grouping
    seed: int
    rounds: int
    population: Population
    lr: float = 0.0  # the local learning rate of this round
    t: int = 0
    shared: dict[str, Tensor] = field(default_factory=dict)  # travels with the model (SCAFFOLD's control)
    memory: dict[str, Any] = field(default_factory=dict)  # one private slot a method
    proxy: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # rows of the server's own samples
    notes: list[Note] = field(default_factory=list)  # of this round
    once: dict[int, int] = field(default_factory=dict)  # numbers that clients sent this round, and never again

    @property
    def params(self) -> Tensor:
        """The global parameters [P], a view."""
        return self.value[: self.layers.P]

    def generator(self, purpose: str) -> torch.Generator:
        """The server's random stream for `purpose` in this round."""
        return generator(self.seed, self.t, SERVER, purpose)

    def note(self, method: object, name: str, value: Tensor, *axes: str) -> None:
        """Record `value` of this round; one axis name a dimension."""
        self.notes.append(Note(type(method).__name__.lower(), name, value.detach().cpu().double(), axes))


@dataclass(frozen=True)
class Weighting:
    """Turns statistics into a plan; weightings chain by stage, each refining the one before.

    `select` decides who sends what, `weigh` sets the clients' scalar weights, `multiply` scales the weights of layers,
    `rescale` leaves a mixture that need not be convex.
    """

    stage: ClassVar[str] = "weigh"
    base_weights: ClassVar[str | None] = None
    needs_proxy: ClassVar[bool] = False
    foresees: ClassVar[bool] = False  # plans from what is known before training: the cohort, sizes, labels, streams

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What clients measure for this method while they train."""
        return ()

    def mask_bits(self, layers: LayerMap) -> int:
        """Bits that tell a client what to send, where the server chooses."""
        return 0

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        raise NotImplementedError


@dataclass(frozen=True)
class ServerStep:
    """What the server does with the reduced model; steps chain in list order."""

    needs_proxy: ClassVar[bool] = False
    reads_models: ClassVar[bool] = True  # False: works on the aggregate alone, so that models need not be kept

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What clients measure for this step while they train."""
        return ()

    def prepare(self, server: Server) -> None:
        """Before the first round: what the server remembers or shares from the start."""

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        """`target` [S] is what the aggregation (and the steps before) made of `server.value`; return the new value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Downlink:
    """What the cohort is sent: the global model, unless `mix` or `peers` say otherwise."""

    bank: tuple[int, ...] = ()  # M clients whose last models `mix` refers to
    mix: Tensor | None = None  # [K, M]: client k is sent Σ_m mix[k, m] · bank_m instead of the global model
    peers: tuple[tuple[int, ...], ...] = ()  # per client of the cohort: whose models it is sent besides


class DownlinkRule:
    """The default: everybody is sent the global model."""

    def downlink(self, clients: Sequence[int], server: Server) -> Downlink:
        return Downlink()


@dataclass(frozen=True)
class Aggregator:
    """All of the server's side, as a value."""

    base_weights: str  # size | uniform
    weightings: tuple[Weighting, ...]
    steps: tuple[ServerStep, ...]
    rule: DownlinkRule = DownlinkRule()
    personal_layers: str | None = None  # layers that no client sends
    bn_stats: str = "average"  # average | local | first (methods.md 0.2)

    @property
    def foresees(self) -> bool:
        """Whether the plan is known before training and no step reads a client's model."""
        return all(w.foresees for w in self.weightings) and not any(s.reads_models for s in self.steps)

    def plan(self, cohort: Cohort, server: Server) -> Mixture:
        """Fold the weightings by stage, whatever order they were listed in."""
        mixture = cohort.by_size() if self.base_weights == "size" else cohort.uniform()
        if self.personal_layers:
            kept = server.layers.where(self.personal_layers)
            mixture = mixture.select(~kept.expand(len(cohort.clients), -1))
        if self.bn_stats != "average":
            mixture = mixture.with_buffers_of(None if self.bn_stats == "local" else 0)
        for weighting in sorted(self.weightings, key=lambda w: STAGES.index(w.stage)):
            mixture = weighting.plan(cohort, server, mixture)
        return mixture

    def transform(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        """Fold the server steps in order."""
        for step in self.steps:
            target = step.apply(target, mixture, cohort, server)
        return target
