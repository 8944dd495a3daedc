"""Rounds that end when the first updates come in, while other clients go on training: what such selections share."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from raysim.core.bounds import NonNegative, NonNegativeInt, PositiveInt
from raysim.core.cohort import Cohort
from raysim.core.facts import cohort_size
from raysim.core.rng import SERVER, draw, stream_seed
from raysim.core.selection import Asked, Clients, Dropped, Selection
from raysim.core.server import Server
from raysim.lazy import Tensor, torch

ALL_AT_ONCE = 128  # asking for the seconds of so many clients costs no more than for one


class Task(NamedTuple):
    """A client that trains."""

    ends: float  # simulated seconds
    client: int
    version: int  # the round whose model it was sent
    repeat: int  # how often it was sent that model before
    starts: float  # simulated seconds


@dataclass(frozen=True)
class Asynchronous(Selection):
    """M clients train at a time, each from the newest model when it began. τ is the number of rounds that ended meanwhile.

    At one instant all returns are handled first, by client, and then all free places are filled in one draw. A client may be
    sent the same model again, and then draws other batches; of its updates one is used a round, and another waits for the
    next.
    """

    concurrency: PositiveInt | None = field(default=None, kw_only=True)
    """M, how many clients train at a time; null: what `rounds.participation` says."""
    staleness: Literal["polynomial", "hinge", "constant"] = field(default="polynomial", kw_only=True)
    """s(τ): (1 + τ)^-a; or 1 up to τ = b and 1 / (a (τ - b) + 1) above; or 1."""
    a: NonNegative = field(default=0.5, kw_only=True)
    """a of s."""
    b: NonNegative = field(default=4.0, kw_only=True)
    """b of the hinge."""
    max_staleness: NonNegativeInt | None = field(default=None, kw_only=True)
    """Updates with a greater τ are dropped, and their bytes count; null: none."""

    needs_clock: ClassVar[bool] = True
    asynchronous: ClassVar[bool] = True

    @property
    def updates(self) -> int:
        """How many end a round."""
        raise NotImplementedError

    def closes(self, now: float) -> float:
        """The simulated second at which a round ends that begins `now`, with the updates that are in, or with the first one;
        infinity where their number ends it."""
        return math.inf

    def awaits(self, t: int, flying: Sequence[Task]) -> bool:
        """Whether round t does not end before some of those `flying`."""
        return False

    def asked(self, participation: float, clients: int) -> int:
        return min(self.updates, clients)

    def weight(self, staleness: np.ndarray) -> np.ndarray:
        """s(τ)."""
        if self.staleness == "polynomial":
            return (1.0 + staleness) ** -self.a
        late = np.maximum(staleness - self.b, 0.0) if self.staleness == "hinge" else np.zeros(len(staleness))
        return 1 / (self.a * late + 1)

    def weights_of(self, cohort: Cohort, server: Server) -> Tensor:
        """[K] s(τ) of the round's clients, which are noted."""
        asked = server.scratch.asked
        assert asked is not None
        staleness = np.array([server.t - asked.version(client) for client in cohort.clients])
        weight = torch.from_numpy(self.weight(staleness))
        server.note(self, "staleness", torch.from_numpy(staleness), "client")
        server.note(self, "staleness_weight", weight, "client")
        return weight

    def select(self, server: Server, participation: float, clients: Clients) -> Asked:
        holders = server.population.sizes.nonzero().flatten().tolist()
        places = self.concurrency or cohort_size(participation, len(server.population.sizes))
        now, flying = clients.now, self._recalled(server)
        used, dropped, later, sent, draws = dict[int, Task](), list[Dropped](), list[Task](), Counter[int](), 0
        seconds = dict[int, float]()
        if len(holders) <= ALL_AT_ONCE * self.updates:
            seconds = dict(zip(holders, clients.seconds(holders).tolist(), strict=True))
        busy = {task.client for task in flying}
        pool = [client for client in holders if client not in busy]
        end, most = self.closes(now), min(self.updates, len(holders))
        while end < math.inf or len(used) < most or self.awaits(server.t, flying):
            if not flying or flying[0].ends > now:  # all returns of this instant are in
                if now >= end and used:
                    break
                if (free := min(places - len(flying), len(pool))) > 0:
                    drawn = sorted(self.drawn(server, pool, free, draws))
                    draws += 1
                    took = [seconds[client] for client in drawn] if seconds else clients.seconds(drawn).tolist()
                    for client, lasts in zip(drawn, took, strict=True):
                        insort(flying, Task(now + lasts, client, server.t, sent[client], now))
                        del pool[bisect_left(pool, client)]
                    sent.update(drawn)
                if not flying:  # every client waits with a second update
                    now = end
                    break
                if flying[0].ends > end and used:
                    now = end
                    break
                end = end if used else max(end, flying[0].ends)
            task = flying.pop(0)
            now = max(now, task.ends)
            if task.client in used:
                later.append(task)  # and its client stays busy
                continue
            insort(pool, task.client)
            if self.max_staleness is None or server.t - task.version <= self.max_staleness:
                used[task.client] = task
            else:
                dropped.append(Dropped(task.client, task.version, task.starts))
        flying = sorted(flying + later)
        self._remember(server, flying)
        tasks = [used[client] for client in sorted(used)]
        return Asked(
            tuple(task.client for task in tasks), tuple(task.version for task in tasks),
            tuple(task.repeat for task in tasks), tuple(task.starts for task in tasks),
            in_flight=frozenset(task.version for task in flying), dropped=tuple(dropped), ends=now,
        )  # fmt: skip

    def _remember(self, server: Server, flying: list[Task]) -> None:
        """Who trains when the round is over."""
        server.memory[self] = {
            "ends": torch.tensor([task.ends for task in flying], dtype=torch.float64),
            "starts": torch.tensor([task.starts for task in flying], dtype=torch.float64),
            "tasks": torch.tensor([task[1:4] for task in flying], dtype=torch.long).reshape(-1, 3),
        }

    def _recalled(self, server: Server) -> list[Task]:
        """Who trains, as the last round has left them."""
        if self not in server.memory:
            return []
        memory = server.memory[self]
        tasks = zip(*(memory[name].tolist() for name in ("ends", "tasks", "starts")), strict=True)
        return [Task(end, c, v, r, start) for end, (c, v, r), start in tasks]

    def drawn(self, server: Server, pool: list[int], count: int, draws: int) -> list[int]:
        """`count` of the clients in the `pool`, in the draw of this number in the round."""
        purpose = f"cohort {draws}" if draws else "cohort"
        return [pool[i] for i in draw(len(pool), count, stream_seed(server.seed, server.t, SERVER, purpose))]
