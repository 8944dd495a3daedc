"""What an engine must provide: how a host is called, how its answers are awaited, how a dead one is replaced.

Everything else (who trains where, sums over the models, evaluation) is written once, for all engines, in the other files
of this package.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raysim.core.event import Event
from raysim.core.failures import breaks_device, out_of_memory
from raysim.data import Dataset, Partition
from raysim.engine.shares import Pace
from raysim.errors import Explained
from raysim.host.device import keep_freed_memory
from raysim.host.messages import Arrays, HostSpec
from raysim.lazy import Tensor, torch

Handle = Any  # a value, or a reference to one
Result = TypeVar("Result")
GATHER_BYTES = 2 << 30  # default of `Engine.gather_bytes`
STATE_BYTES = 4 << 30  # default of `Engine.state_bytes`
ATTEMPTS = 3  # at the same work, until it is taken to be the reason why hosts die or fail


class HostLost(Exception):
    """Hosts died; `hosts` are their indices, `why` is a clause such as "its memory ran out"."""

    def __init__(self, hosts: set[int], why: str = "its process ended", *, out_of_memory: bool = False):
        super().__init__(f"hosts {sorted(hosts)} were lost: {why}")
        self.hosts, self.why, self.out_of_memory = hosts, why, out_of_memory


class MachineFailure(Explained, RuntimeError):
    """Work that the machines could not do, after all attempts; the message says what, where and why."""


def machine_failure(error: Exception, node: str) -> MachineFailure | None:
    """What to raise for an error of a host's work that neither the code nor a client is to blame for; None for others."""
    if not (breaks_device(error) or out_of_memory(error)):
        return None
    what = "has too little memory" if out_of_memory(error) else "has a device that failed"
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    return MachineFailure(f"node {node} {what}: {why}. Fix this, and go on in a new process")


class StateLost(Exception):
    """Client states went down with a node; only a checkpoint has them."""


@dataclass(frozen=True)
class Call:
    """A method of one host with its arguments. Handles among these arrive as what they stand for."""

    host: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Span:
    """One phase on one host, for the timeline; seconds since the epoch."""

    host: int
    phase: str
    start: float
    stop: float
    sent: int = 0  # payload bytes it serialised for other processes


@dataclass
class Engine(ABC):
    """Hosts, and what rests with them between rounds: the published model, the clients' states and last models.

    An engine provides the abstract methods; the others are what every caller of an engine does with them.
    """

    spec: HostSpec
    data: Dataset
    partition: Partition
    fan_in: int = 4
    gather_bytes: int = GATHER_BYTES  # `Cohort.gather` refuses to bring more than this into one process
    nodes: list[str] = field(default_factory=list)  # the machine of every host
    state_bytes: int = STATE_BYTES  # of the two below, held in memory once a checkpoint has them
    # By client, of committed rounds: in the first map what is in memory, in another what a checkpoint has.
    client_states: ChainMap[int, Handle] = field(default_factory=ChainMap)
    client_models: ChainMap[int, Handle] = field(default_factory=ChainMap)  # last uploads, where a method asks for them
    spans: list[Span] = field(default_factory=list)  # of this round
    events: list[Event] = field(default_factory=list)  # since the last look
    remarks: set[str] = field(default_factory=set)  # already reported: how clients trained
    pace: Pace = field(default_factory=Pace)  # what clients cost, and how fast the hosts are

    def __post_init__(self) -> None:
        self.layers = self.spec.layers
        if self.spec.keep_freed_memory:
            keep_freed_memory(4 * self.layers.S)
        self.stateful = self.spec.stateful(self.layers)
        self.keys = itertools.count()  # of partial sums that wait on hosts
        self.value = torch.empty(0)  # [S] the server's model, published to the hosts
        self.published: Handle = None
        self.published_public: Handle = None
        self.published_shared: Handle = None
        self.initial_state: Handle = None  # of a client that has not taken part yet, where it is not empty

    # What an engine provides.

    @property
    @abstractmethod
    def hosts(self) -> Sequence[Any]:
        """The hosts. Neighbours get neighbours of a sorted cohort; an object that is there twice does two hosts' work."""

    @abstractmethod
    def call(self, call: Call) -> Handle:
        """Begin a call and return a handle of its result."""

    @abstractmethod
    def train(self, call: Call) -> list[Handle]:
        """Begin a call that a host answers with a `TrainReply`; its first argument is the `TrainRequest`. Returns handles
        of the objects that `TrainReply.detach` makes of the answer."""

    @abstractmethod
    def fetch(self, calls: Sequence[tuple[int, Handle]]) -> list[Any]:
        """Values of (host, handle)s, in order. Raises `HostLost`, also for hosts that hang."""

    @abstractmethod
    def put(self, value: Any) -> Handle:
        """Make a value available to all hosts."""

    @abstractmethod
    def value_of(self, handle: Handle) -> Any:
        """The value behind a handle that `put` or a host made. Raises `StateLost`."""

    @abstractmethod
    def replace(self, lost: HostLost) -> str:
        """Put new hosts in the place of dead ones, or let others do their work; returns which, as a clause. Raises
        `MachineFailure` where none is left."""

    def grow(self) -> None:  # noqa: B027 - most engines do not
        """Called as a round begins: take in hosts that fit by now."""

    @abstractmethod
    def close(self) -> None:
        """Stop all hosts."""

    def store(self, arrays: Arrays) -> Handle:
        """A handle of a client's state or model that lies in a checkpoint, as if a host had returned it."""
        return self.put(dict(arrays))

    # What all engines do with it.

    def ask(self, calls: Sequence[Call]) -> list[Any]:
        """Make calls side by side and return their results, as `fetch` does. Raises `HostLost`."""
        handles = [(c.host, self.call(c)) for c in calls]
        return self.fetch(handles)

    def retry_after_loss(self, action: Callable[[], Result]) -> Result:
        """`action`, again after a loss of hosts, which are replaced.

        Raises `MachineFailure` where the same host is lost `ATTEMPTS` times: then it is the action that brings it down.
        """
        deaths: Counter[int] = Counter()
        while True:
            try:
                return action()
            except HostLost as lost:
                deaths.update(lost.hosts)
                host, times = deaths.most_common(1)[0]
                if times == ATTEMPTS:
                    raise MachineFailure(
                        f"a client actor on node {self.nodes[host]} died {times} times at the same work: {lost.why}"
                    ) from None
                self.replace_lost(lost)

    def device(self) -> str:
        """What the hosts compute on: cpu or cuda."""
        kind: str = self.retry_after_loss(lambda: self.ask([Call(0, "computes_on", ())]))[0]
        return kind

    def numerics(self) -> list[dict[str, Any]]:
        """What decides the bits of each host besides the code."""
        calls = [Call(i, "numerics", ()) for i in range(len(self.hosts))]
        return self.retry_after_loss(lambda: self.ask(calls))

    def replace_lost(self, lost: HostLost) -> None:
        """`replace`, and remember that it was necessary."""
        died = [self.nodes[i] for i in sorted(lost.hosts)]
        then = f"{lost.why}; {self.replace(lost)}, its clients are retrained (bit-identical)"
        self.events += [Event("actor", f"a client actor on node {node} died: {then}", node=node) for node in died]

    def begin(self, value: Tensor) -> None:
        """`value` [S] is the model that the run began with. Clients that have not taken part yet may have it as their
        previous one, and start with its running statistics where those stay with the clients."""
        state = self.spec.initial_state(value)
        self.initial_state = self.put(state) if state else None

    def publish(self, value: Tensor, shared: Mapping[str, Tensor], public: Tensor) -> None:
        """Make the server's model [S], the `public` one that clients are sent and what travels with it available to all hosts."""
        self.value = value
        self.published = self.put(value.numpy())
        self.published_public = self.published if public is value else self.put(public.numpy())
        self.published_shared = self.put({n: tensor.numpy() for n, tensor in shared.items()}) if shared else {}

    def commit(self, states: Mapping[int, Handle], models: Mapping[int, Handle]) -> None:
        """The round counts: so do the states and models that its clients came back with."""
        self.client_states.update(states)
        self.client_models.update(models)
