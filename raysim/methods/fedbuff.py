"""FedBuff (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from raysim.core.bounds import NonNegative, NonNegativeInt, PositiveInt
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts, cohort_size
from raysim.core.mixture import Mixture
from raysim.core.rng import SERVER, draw, stream_seed
from raysim.core.selection import Asked, Durations, Selection
from raysim.core.server import Server, Weighting
from raysim.lazy import torch


class Task(NamedTuple):
    """A client that trains."""

    ends: float  # simulated seconds
    client: int
    version: int  # the round whose model it was sent
    repeat: int  # how often it was sent that model before


@dataclass(frozen=True)
class FedBuff(Selection):
    """θ + (1/B) Σ s(τ) Δ as soon as B updates are there, while M clients train at a time (Nguyen et al., 2022, algorithm 1).

    τ is the number of rounds that ended while the client trained. At one instant all returns are handled first, by client,
    and then all free places are filled in one draw. A client may be sent the same model again, and then draws other batches;
    of its updates one is used a round, and another waits for the next. Server steps act on the sum: `server: [step_size]` is
    η_g.
    """

    buffer: PositiveInt = 10
    """B, the updates of a round."""
    concurrency: PositiveInt | None = None
    """M, how many clients train at a time; null: what `rounds.participation` says."""
    staleness: Literal["polynomial", "hinge", "constant"] = "polynomial"
    """s(τ): (1 + τ)^-a; or 1 up to τ = b and 1 / (a (τ - b) + 1) above; or 1."""
    a: NonNegative = 0.5
    """a of s."""
    b: NonNegative = 4.0
    """b of the hinge."""
    max_staleness: NonNegativeInt | None = None
    """Updates with a greater τ are dropped; null: none."""
    normalize: Literal["count", "weights"] = "count"
    """Whether the sum is divided by B, as in the paper, or by the sum of s, as in FedScale."""

    needs_clock: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = True

    def check(self, facts: RunFacts) -> str | None:
        if facts.clients is not None and self.buffer > facts.clients:
            return f"buffer {self.buffer} waits for more clients than the federation's {facts.clients}."
        return None

    def asked(self, participation: float, clients: int) -> int:
        return min(self.buffer, clients)

    def weightings(self) -> tuple[Weighting, ...]:
        return (Stale(self),)

    def weight(self, staleness: np.ndarray) -> np.ndarray:
        """s(τ)."""
        if self.staleness == "polynomial":
            return (1.0 + staleness) ** -self.a
        late = np.maximum(staleness - self.b, 0.0) if self.staleness == "hinge" else np.zeros(len(staleness))
        return 1 / (self.a * late + 1)

    def select(self, server: Server, participation: float, seconds: Durations) -> Asked:
        holders = server.population.sizes.nonzero().flatten().tolist()
        places = self.concurrency or cohort_size(participation, len(server.population.sizes))
        now, flying = self._recalled(server)
        buffer, later, sent, draws = dict[int, Task](), list[Task](), Counter[int](), 0
        while len(buffer) < min(self.buffer, len(holders)):
            if not flying or flying[0].ends > now:
                busy = {task.client for task in (*flying, *later)}
                pool = [client for client in holders if client not in busy]
                if (free := min(places - len(flying), len(pool))) > 0:
                    drawn = sorted(self.drawn(server, pool, free, draws))
                    draws += 1
                    ends = (now + seconds(drawn)).tolist()
                    flying += [Task(end, c, server.t, sent[c]) for end, c in zip(ends, drawn, strict=True)]
                    flying.sort()
                    sent.update(drawn)
            task = flying.pop(0)
            now = max(now, task.ends)
            if task.client in buffer:
                later.append(task)
            elif self.max_staleness is None or server.t - task.version <= self.max_staleness:
                buffer[task.client] = task
        flying = sorted(flying + later)
        server.memory[self] = {
            "now": torch.tensor(now, dtype=torch.float64),
            "ends": torch.tensor([task.ends for task in flying], dtype=torch.float64),
            "tasks": torch.tensor([task[1:] for task in flying], dtype=torch.long).reshape(-1, 3),
        }
        used = [buffer[client] for client in sorted(buffer)]
        return Asked(
            tuple(task.client for task in used), tuple(task.version for task in used), tuple(task.repeat for task in used),
            frozenset(task.version for task in flying), now,
        )  # fmt: skip

    def _recalled(self, server: Server) -> tuple[float, list[Task]]:
        """The time, and who trains, as the last round has left them."""
        if self not in server.memory:
            return 0.0, []
        memory = server.memory[self]
        tasks = zip(memory["ends"].tolist(), memory["tasks"].tolist(), strict=True)
        return float(memory["now"]), [Task(end, *task) for end, task in tasks]

    def drawn(self, server: Server, pool: list[int], count: int, draws: int) -> list[int]:
        """`count` of the clients in the `pool`, in the draw of this number in the round."""
        purpose = f"cohort {draws}" if draws else "cohort"
        return [pool[i] for i in draw(len(pool), count, stream_seed(server.seed, server.t, SERVER, purpose))]


@dataclass(frozen=True)
class Stale(Weighting):
    """Multiplies updates by s(τ)."""

    of: FedBuff = field(default_factory=FedBuff)
    """Whose s it is."""

    base_weights: ClassVar[str | None] = "uniform"
    stage: ClassVar[str] = "rescale"

    def plan(self, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        asked = server.scratch.asked
        assert asked is not None
        staleness = np.array([server.t - asked.version(client) for client in cohort.clients])
        weight = torch.from_numpy(self.of.weight(staleness))
        server.note(self.of, "staleness", torch.from_numpy(staleness), "client")
        plan = prior.reweighted(prior.lam * weight)  # of buffers a convex mean
        if self.of.normalize == "weights" or not staleness.any():
            return plan
        mean = (prior.base[:, : prior.layers.T] * weight[:, None]).sum(0)  # s of those that send a tensor
        return plan.scaled(mean, 1 - mean)
