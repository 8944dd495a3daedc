"""FedADP: neuron-level adaptive pruning of uploads (Liu et al., 2023), as FedLDF (2024) compares with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import ClassVar

from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep
from raysim.lazy import Tensor, nn, torch

EPS = 1e-12


@dataclass(frozen=True)
class Neurons:
    """The neurons of a model: of each unit the output channels or rows of its first tensor, numbered unit by unit.

    A neuron owns its row in every tensor of the unit that has as many rows (weight, bias, norm and running statistics).
    What belongs to none, such as the head, step counters and positional embeddings, is one last neuron that is always
    kept. All elements of the model's value lie in consecutive pieces, each of one tensor and one neuron.
    """

    tensor: Tensor  # [R] of each piece
    neuron: Tensor  # [R]
    size: Tensor  # [R] elements
    units: tuple[int, ...]  # that are pruned
    bounds: tuple[int, ...]  # neurons bounds[i]:bounds[i + 1] are those of units[i]
    parameters: Tensor  # [U + 1] int64, of each neuron; the last one is the kept rest

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, layers: LayerMap) -> Neurons:
        units, head = layers.regroup("unit"), layers.where("head").tolist()
        first: dict[int, tuple[int, int]] = {}  # unit -> its first neuron and their number
        bounds = [0]
        for i, (spec, unit) in enumerate(zip(layers.tensors[: layers.T], units.groups, strict=False)):
            if unit not in first and not spec.bare and not head[i]:
                first[unit] = bounds[-1], spec.shape[0]
                bounds.append(bounds[-1] + spec.shape[0])
        pieces = []
        for i, (spec, unit) in enumerate(zip(layers.tensors, units.groups, strict=True)):
            start, rows = first.get(unit, (0, 0))
            if spec.shape[:1] == (rows,) and not head[i]:
                pieces += [(i, start + row, spec.size // rows) for row in range(rows)]
            else:
                pieces.append((i, bounds[-1], spec.size))
        tensor, neuron, size = torch.tensor(pieces).T
        counts = torch.zeros(bounds[-1] + 1, dtype=torch.long)
        counts.index_add_(0, neuron[tensor < layers.T], size[tensor < layers.T])
        return cls(tensor, neuron, size, tuple(first), tuple(bounds), counts)

    def expand(self, kept: Tensor) -> Tensor:
        """A value for each neuron, the kept rest included, given to all its elements: [U + 1] -> [S]."""
        return kept[self.neuron.to(kept.device)].repeat_interleave(self.size.to(kept.device))


@dataclass(frozen=True)
class FedADP(ClientMethod):
    """Each client sends only the neurons that moved most, a share `keep` of the model (FedADP, Liu et al., 2023).

    A layer's share is proportional to how far it moved, ‖Δ_l‖/‖w_l‖, but at least `least`; the output layer is sent
    whole. The server averages each neuron over the clients that sent it, and keeps its own where none did. Deviation:
    the article's text is not public; this is FedLDF's (2024) use of it as far as it is known.

    Wrong choice where few clients send the same neuron: it takes the whole update of those few.
    """

    keep: float = 0.2
    """Share of the model that a client sends (ρ)."""
    least: float = 0.02
    """Least share of every layer that is sent (ρ_min)."""
    needs: ClassVar[Needs] = Needs(global_model=True)
    sends_parts: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        if not 0 < self.least <= self.keep <= 1:
            return f"keep is {self.keep} and least {self.least}; it takes 0 < least <= keep <= 1."
        before = facts.client[: facts.client.index(self)]
        if any(method.server_steps() for method in before):
            return "its server half completes the mean that the others start from; list it before them."
        return None

    def fits(self, model: nn.Module, layers: LayerMap, classes: int) -> str | None:
        if not Neurons.of(layers).units:
            return "prunes what lies below the head, but this model has no trainable layer below its head. It would be FedAvg."
        return None

    def server_steps(self) -> tuple[ServerStep, ...]:
        return (MeanOfSent(),)

    def finish(self, run: LocalRun, upload: Upload) -> None:
        neurons, P = Neurons.of(run.layers), run.layers.P
        kept = self.choose(upload.value[:P].cpu(), run.received[:P].cpu(), run.layers, neurons)
        upload.scalars["fedadp"] = kept
        upload.sent = neurons.expand(torch.cat([kept, torch.ones(1, dtype=torch.bool)])).to(run.value.device)

    def choose(self, params: Tensor, received: Tensor, layers: LayerMap, neurons: Neurons) -> Tensor:
        """Which neurons are sent: bool [U]."""
        units, update = layers.regroup("unit"), params - received
        owner = neurons.expand(torch.arange(len(neurons.parameters)))[: layers.P]  # neuron of each parameter
        moved = torch.zeros(len(neurons.parameters)).double().index_add_(0, owner, update.double().square())
        relative = units.norms(update) / units.norms(received).clamp_min(EPS) + EPS
        sizes = torch.stack([neurons.parameters[lo:hi].sum() for lo, hi in pairwise(neurons.bounds)])
        budget = self.keep * layers.P - int(neurons.parameters[-1])
        shares = water_fill(relative[list(neurons.units)], sizes, budget, self.least)
        kept = torch.zeros(neurons.bounds[-1], dtype=torch.bool)
        for (lo, hi), share in zip(pairwise(neurons.bounds), shares.tolist(), strict=True):
            order = moved[lo:hi].argsort(descending=True, stable=True)
            kept[lo + order[: ceil(share * (hi - lo) - 1e-9)]] = True
        return kept


def water_fill(ratio: Tensor, sizes: Tensor, budget: float, least: float) -> Tensor:
    """Shares [n] in [least, 1], elsewhere proportional to `ratio`; Σ share · size is as near to `budget` as can be."""
    scales = torch.cat([least / ratio, 1 / ratio]).sort().values  # where a share meets one of its bounds
    totals = ((scales[:, None] * ratio).clamp(least, 1) * sizes).sum(1)  # between those it grows linearly
    i = int((totals < budget).sum().clamp(1, len(totals) - 1))
    part = ((budget - totals[i - 1]) / (totals[i] - totals[i - 1]).clamp_min(EPS)).clamp(0, 1)
    return ((scales[i - 1] + part * (scales[i] - scales[i - 1])) * ratio).clamp(least, 1)


@dataclass(frozen=True)
class MeanOfSent(ServerStep):
    """The server's half: w + Σ_k λ_k m_k Δ_k / Σ_k λ_k m_k for the clients' masks m_k of each neuron."""

    name: ClassVar[str] = "fedadp"
    reads_models: ClassVar[bool] = False

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        layers, neurons = server.layers, Neurons.of(server.layers)
        masks = cohort.scalars("fedadp").double()  # [K, U]
        server.note(self, "kept", masks.mean(1), "client")
        masks = torch.cat([masks, torch.ones(len(masks), 1).double()], dim=1)
        share = (mixture.base[:, neurons.tensor] * masks[:, neurons.neuron]).sum(0).repeat_interleave(neurons.size)
        own = layers.per_element(mixture.server_coefficient) * server.value  # the target without the clients' updates
        mean = (own + (target - own) / share).to(target.dtype)
        return torch.where(share > 0, mean, server.value)
