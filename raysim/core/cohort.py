"""A round's clients: what is known of them before they train, and what may be asked of those that came back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.probe import Probe
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class AskedCohort:
    """The clients that will train, sorted by id: the part of a `Cohort` that is known before."""

    clients: tuple[int, ...]
    sizes: Tensor  # [K] int64 training samples
    layers: LayerMap

    def by_size(self) -> Mixture:
        """Every client sends everything and counts its training samples."""
        return Mixture.of(self.sizes, self.layers)

    def uniform(self) -> Mixture:
        """Every client sends everything and counts the same."""
        return Mixture.of(torch.ones(len(self.clients)), self.layers)


class Cohort(Protocol):
    """The clients that came back, sorted by id, as one distributed [K, S] matrix that only collectives touch.

    K counts them. Their models stay where they were trained.
    """

    @property
    def clients(self) -> tuple[int, ...]:
        """Their ids, sorted."""
        ...

    @property
    def layers(self) -> LayerMap:
        """The run's grouping."""
        ...

    @property
    def sizes(self) -> Tensor:
        """[K] int64, training samples."""
        ...

    @property
    def steps(self) -> Tensor:
        """[K] int64, local steps taken."""
        ...

    @property
    def counters(self) -> Tensor:
        """[K, elements] float64, integer buffers of the uploaded models; came back with training."""
        ...

    def by_size(self) -> Mixture:
        """Every client sends everything and counts its training samples."""
        ...

    def uniform(self) -> Mixture:
        """Every client sends everything and counts the same."""
        ...

    def stat(self, probe: Probe) -> Tensor:
        """[K, ...] what `probe` measured; came back with training."""
        ...

    def scalars(self, name: str) -> Tensor:
        """[K, ...] what clients put into `upload.scalars[name]`, sparse if that was; came back with training."""
        ...

    def each(self, function: Callable[..., Tensor], *payload: Any) -> Tensor:
        """[K, ...] `function(update [S], layers, *payload)` of each client, where its model is: one call to each host."""
        ...

    def distances(self, to: Tensor, layers: LayerMap | None = None) -> Tensor:
        """[K, L] float64, ‖θ + Δ_k − to‖ of every layer for a model `to` [P] (or a whole value [S]), where θ is the server's model
        and θ + Δ_k the client's, unless `download` encodes what it is sent: one call to each host."""
        ...

    def distances_to_mixture(self, mix: Mixture) -> Tensor:
        """[K, L] float64, how far every layer's update is from that of the mean that `mix` describes: one reduction and one call
        to each host. Where one host has all clients, and a step has announced that it will ask
        (`ServerStep.measures_distances_to`), their models are read once for this and for the aggregate."""
        ...

    def dots(self, with_: Tensor, layers: LayerMap | None = None) -> Tensor:
        """[K, L] float64, ⟨Δ_k, with_⟩ of every layer: one call to each host."""
        ...

    def gram(self) -> Tensor:
        """[K, K] float64, ⟨Δ_i, Δ_j⟩ over all parameters. No process holds more than its share of the coordinates."""
        ...

    def columns(self, function: Callable[..., Tensor], mix: Mixture | None = None, *payload: Any) -> Tensor:
        """[S] `function(updates [k, n], *payload) -> [n]` of all clients' updates, or of those that send a tensor by `mix`,
        coordinate by coordinate; zero where none does. Hosts exchange slices: each has K · S / hosts floats of them, and
        no more at once than the engine's gather_bytes allows. Of counters the greatest is taken."""
        ...

    def predict(self, rows: np.ndarray) -> Tensor:
        """[K, M, C] logits of every client's model in eval mode on M rows of the data set: one call to each host."""
        ...

    def reduce(self, mix: Mixture, of: str = "model", power: int = 1, distances_to: Mixture | None = None) -> Tensor:
        """One tree reduction. Of the `model`: the new value [S] that `mix` describes. Of a named upload vector:
        Σ_k w_k v_k [P] with `mix`'s weights of parameters. `power` 2 sums squared updates or vectors instead.
        `distances_to` announces a mixture whose `distances_to_mixture` will be asked for next."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether all updates may be brought into one process: they are within the run's byte limit."""
        ...

    def gather(self) -> Tensor:
        """[K, S] all updates in the caller's process; raises `MemoryError` past the run's byte limit."""
        ...

    def compute(self, function: Callable[..., Any], *payload: Any, models: bool = False) -> Any:
        """The server's work on data, on one host with a GPU where there is one: `function(server_model, *payload)`, see
        `raysim.core.server_model`. Tensors among the arguments, and the tensor or tuple of tensors that it returns, change
        the device on the way. With `models` the server model has all updates [K, S]; raises `MemoryError` as `gather`."""
        ...
