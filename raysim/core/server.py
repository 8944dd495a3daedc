"""The server's side: its hooks, and what it remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from raysim.core.cohort import Cohort
from raysim.core.event import Event
from raysim.core.layers import LayerMap
from raysim.core.method import Method
from raysim.core.mixture import Mixture
from raysim.core.note import FELL_BACK, Note
from raysim.core.probe import Probe
from raysim.core.rng import SERVER, generator, seeded_for, stream_of, stream_seed
from raysim.lazy import Tensor, torch
from raysim.registry import Named

if TYPE_CHECKING:
    from raysim.core.selection import Asked

STAGES = ("select", "weigh", "multiply", "rescale")


@dataclass(frozen=True)
class Population:
    """What the server knows of all N clients."""

    sizes: Tensor  # [N] int64 training samples
    count_labels: Callable[[], Tensor]

    @cached_property
    def holders(self) -> int:
        """Number of clients with training samples. The others never take part, so means over all clients leave them out."""
        return int((self.sizes > 0).sum())

    @cached_property
    def labels(self) -> Tensor:
        """[N, C] int64 training samples of each class; counted when first asked for."""
        return self.count_labels()


def held_out(samples: int, share: float) -> int:
    """How many of two proxy samples or more `ProxyData.split` sets aside."""
    return min(max(1, round(share * samples)), samples - 1)


@dataclass(frozen=True)
class ProxyData:
    """The server's own labelled samples, on which its methods learn."""

    rows: np.ndarray  # [n] of the data set
    labels: np.ndarray  # [n]
    balanced_sampling: bool = False  # every batch has the classes in equal numbers, up to one

    def split(self, share: float, stream: torch.Generator) -> tuple[ProxyData, ProxyData]:
        """All but a random `share` of the samples, and that share: at least one sample each."""
        order = torch.randperm(len(self.rows), generator=stream).numpy()
        count = held_out(len(order), share)
        parts = np.sort(order[count:]), np.sort(order[:count])
        kept, held = (replace(self, rows=self.rows[part], labels=self.labels[part]) for part in parts)
        return kept, held

    def order(self, batch_size: int, stream: torch.Generator) -> Tensor:
        """Positions [n] of an epoch, batch after batch: every sample once, or, with balanced sampling, as many draws,
        in which the samples of a rare class return more often."""
        n = len(self.rows)
        if not self.balanced_sampling:
            return torch.randperm(n, generator=stream)
        classes = [torch.from_numpy(np.flatnonzero(self.labels == c)) for c in np.unique(self.labels)]
        turns = [shuffles(len(classes), min(batch_size, n - start), stream) for start in range(0, n, batch_size)]
        turn = torch.cat(turns)  # whose turn it is
        order = torch.empty(n, dtype=torch.long)
        for c, members in enumerate(classes):
            mine = turn == c
            order[mine] = members[shuffles(len(members), int(mine.sum()), stream)]
        return order


def shuffles(things: int, count: int, stream: torch.Generator) -> Tensor:
    """The first `count` of 0..things-1 in random order, again and again in a new one."""
    passes = [torch.randperm(things, generator=stream) for _ in range(1 + count // things)]
    return torch.cat(passes)[:count]


def check_senders(field: str, n: int, cohort: int | None) -> str | None:
    """What is wrong with a method's `field`, how many of a round's `cohort` (None: not known yet) send."""
    if n < 1:
        return f"{field} is {n}; at least one client must send."
    few = cohort is not None and n > cohort
    return f"{field} is {n}, but a round has {cohort} clients. With {cohort} it is FedAvg." if few else None


class Memory(dict[Any, Any]):
    """What methods remember from round to round, under their names: `server.memory[self]`."""

    def __getitem__(self, owner: Named | str) -> Any:
        return super().__getitem__(_word(owner))

    def __setitem__(self, owner: Named | str, value: Any) -> None:
        super().__setitem__(_word(owner), value)

    def __contains__(self, owner: object) -> bool:
        return super().__contains__(_word(owner))

    def get(self, owner: Named | str, default: Any = None) -> Any:
        return super().get(_word(owner), default)


def _word(owner: Any) -> Any:
    return owner.name if isinstance(owner, Named) else owner


@dataclass
class RoundScratch:
    """What the server notes and uses in one round; every round has a new one."""

    t: int = 0
    lr: float = 0.0
    notes: list[Note] = field(default_factory=list)
    warnings: list[Event] = field(default_factory=list)
    batches: list[np.ndarray] = field(default_factory=list)  # rows of every batch that the server drew
    statistics: Tensor | None = None  # [B] what weight learning on proxy data left, for `bn_stats: proxy`
    one_time_scalars: dict[int, int] = field(default_factory=dict)  # numbers that clients send now, and never again
    asked: Asked | None = None  # who takes part
    combined: tuple[Weighting, Tensor] | None = (
        None  # the rule in place of the mean, and the aggregate [S] that it made
    )
    leaves_model: bool = False  # a weighting's rule had too few clients: the model stays, and no server step follows

    def copy(self) -> RoundScratch:
        """One of its own, with what there is so far."""
        return replace(
            self, notes=[*self.notes], warnings=[*self.warnings], batches=[*self.batches],
            one_time_scalars=dict(self.one_time_scalars),
        )  # fmt: skip


@dataclass
class Server:
    """What the server has from round to round. `value`, `shared` and `memory` change and are saved."""

    value: Tensor  # [S] the global model: parameters, then buffers
    layers: LayerMap  # in the run's grouping
    seed: int
    rounds: int
    population: Population
    shared: dict[str, Tensor] = field(default_factory=dict)  # travels with the model (SCAFFOLD's control)
    memory: Memory = field(default_factory=lambda: Memory())  # one slot a method: `memory[self]`
    proxy: ProxyData = ProxyData(np.empty(0, np.int64), np.empty(0, np.int64))
    scratch: RoundScratch = field(default_factory=lambda: RoundScratch())

    @property
    def t(self) -> int:
        """The round, from 0."""
        return self.scratch.t

    @property
    def lr(self) -> float:
        """The local learning rate of this round."""
        return self.scratch.lr

    @property
    def params(self) -> Tensor:
        """The global parameters [P], a view."""
        return self.value[: self.layers.P]

    def generator(self, purpose: str) -> torch.Generator:
        """The server's random stream for `purpose` in this round."""
        return generator(self.seed, self.t, SERVER, purpose)

    @property
    def trained(self) -> int:
        """On how many samples it has trained in this round, counting each in every pass."""
        return sum(len(batch) for batch in self.scratch.batches)

    def seeded_for(self, code: object, purpose: str) -> AbstractContextManager[None]:
        """Around a hook of `code`: what it draws from global generators comes from the server's stream for `purpose` in this
        round."""
        return seeded_for(code, stream_seed(self.seed, self.t, SERVER, purpose))

    def proxy_orders(self, method: object, epochs: int, batch_size: int, part: ProxyData | None = None) -> Tensor:
        """[epochs, n] positions in the proxy set, or in a `part` of it, in the order in which `method` takes them,
        `batch_size` at a time."""
        proxy = part or self.proxy
        stream = self.generator(f"{stream_of(method)} batches")
        orders = [proxy.order(batch_size, stream) for _ in range(epochs)]
        parts = [torch.split(order, batch_size) for order in orders]
        self.scratch.batches += [proxy.rows[batch.numpy()] for batches in parts for batch in batches]
        return torch.stack(orders) if orders else torch.empty(0, len(proxy.rows), dtype=torch.long)

    def fork(self) -> Server:
        """A copy to plan on: what it notes and remembers does not reach this one."""
        return replace(self, memory=Memory(self.memory), scratch=self.scratch.copy())

    def fell_back(self, method: Named, happened: bool) -> None:
        """Record whether `method` could not do its work this round and left the plan as it was; see `FELL_BACK`."""
        self.note(method, FELL_BACK, torch.tensor(float(happened)))

    def warn(self, message: str) -> None:
        """A line in the terminal, once a run if it stays the same, and a row of the table `events` in every round."""
        self.scratch.warnings.append(Event("run", message))

    def note(self, method: Named, name: str, value: Tensor, *axes: str, clients: Sequence[int] | None = None) -> None:
        """Record `value` of this round; one axis name a dimension. `clients`, if not those that came back, are "client"."""
        if value.requires_grad or value.is_cuda or value.dtype != torch.float64:
            value = value.detach().cpu().double()
        asked = None if clients is None else tuple(clients)
        self.scratch.notes.append(Note(method.name, name, value, axes, asked))


@dataclass(frozen=True)
class Weighting(Method):
    """Turns statistics into a plan; weightings chain by stage, each refining the one before.

    `select` decides who sends what, `weigh` sets the clients' scalar weights, `multiply` scales the weights of layers,
    `rescale` leaves a mixture that need not be convex.
    """

    role: ClassVar[str] = "weighting"
    stage: ClassVar[str] = "weigh"
    """One of `STAGES`."""
    rank: ClassVar[int] = 0
    """Its place within the stage; lower ones plan first."""
    base_weights: ClassVar[str | None] = None
    """"uniform" where the paper averages without sizes."""
    reported: ClassVar[bool] = True
    """Whether clients send what `probes` measure; False: the server sees it in their models."""
    plans_early: ClassVar[bool] = False
    """Whether it plans from an `AskedCohort`, labels and random streams, which are known before training."""

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What clients measure for this method while they train."""
        return ()

    @property
    def scales(self) -> bool:
        """Whether it multiplies parameters by a learned or constant factor, with which averaged running statistics do
        not go."""
        return False

    @property
    def compares_models(self) -> bool:
        """Whether it compares clients that must have begun at one model."""
        return self.needs.proxy or (self.stage != "weigh" and not self.combines)

    @property
    def unequal(self) -> str | None:
        """How clients come to count differently by it, as a clause, and the way out; None: all count alike."""
        return "weighs them. Leave one of the two out"

    @property
    def senders(self) -> int | None:
        """How many clients of a round it lets send each layer at most; None: all."""
        return None

    def mask_bits(self, layers: LayerMap) -> int:
        """Bits by which a client learns what to send, where the server chooses."""
        return 0

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        raise NotImplementedError

    def combine(self, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor | None:
        """The aggregate [S] by another rule than the mean that the whole plan, `mixture`, describes; None: by that. A run can
        have one weighting with such a rule."""
        return None

    @property
    def combines(self) -> bool:
        """Whether it has a rule of its own."""
        return type(self).combine is not Weighting.combine


@dataclass(frozen=True)
class ServerStep(Method):
    """What the server does with the reduced model; steps chain in list order."""

    role: ClassVar[str] = "server"
    refines: ClassVar[bool] = False
    """Whether it shrinks or trains the model that the steps before it have made."""
    remembers: ClassVar[bool] = False
    """Whether it remembers updates, which must be those of a model that no step has refined."""
    reads_models: ClassVar[bool] = True
    """Whether it reads the clients' models; False: it works only on the aggregate, so that models need not be stored."""
    only_scales: ClassVar[bool] = False
    """Whether it does nothing to the model but scale layers."""

    @property
    def compares_models(self) -> bool:
        """Whether it compares the clients' models, which must have begun at one; False: at most their updates."""
        return self.reads_models

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What clients measure for this step while they train."""
        return ()

    def measures_distances_to(self, mixture: Mixture) -> Mixture | None:
        """Whose `cohort.distances_to_mixture` this step will ask for, after an aggregation by `mixture`."""
        return None

    @property
    def scales(self) -> bool:
        """Whether it multiplies parameters by a learned or constant factor, with which averaged running statistics do
        not go."""
        return False

    def prepare(self, server: Server) -> None:
        """Before the first round: what the server remembers or shares from the start."""

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        """`target` [S] is what the aggregation (and the steps before) made of `server.value`; return the new value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Downlink:
    """What the cohort is sent: the global model, unless `mix` or `peers` say otherwise.

    A client that has not sent a model yet counts with the global one. Only parameters are mixed, because signed weights
    can make a BatchNorm variance negative; buffers are the client's own. A client whose row of `peers` is empty is
    sent the global model.
    """

    models: tuple[int, ...] = ()  # M clients whose last models `mix` refers to
    mix: Tensor | None = None  # [K, M]: client k is sent w_k + Σ_m mix[k, m] · (model_m − w_k), w_k its own last model
    peers: tuple[tuple[int, ...], ...] = ()  # per client of the cohort: whose last models it is sent


class ModelStore(Protocol):
    """The last uploads of all clients that have taken part. They stay where they are; only numbers come back."""

    @property
    def clients(self) -> tuple[int, ...]:
        """Who has a model there, sorted."""
        ...

    def distances(self, clients: Sequence[int]) -> Tensor:
        """[M, M] float64, ‖w_i − w_j‖² of the parameters of the `clients`' models: one call, shared by the hosts."""
        ...


class DownlinkRule:
    """The default: every client is sent the global model."""

    def downlink(self, clients: Sequence[int], models: ModelStore, server: Server) -> Downlink:
        """What `clients` (sorted) are sent in this round. It is also asked for evaluations, so it remembers nothing."""
        return Downlink()
