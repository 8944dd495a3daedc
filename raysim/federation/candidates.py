"""What a selection learns of clients before they train: their simulated seconds, and their losses, for which they are asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysim.core.event import Event
from raysim.core.hooks import misused
from raysim.core.server import Downlink
from raysim.engine.base import Engine
from raysim.engine.evaluation import evaluate_clients
from raysim.federation.builder import RunParts
from raysim.federation.failures import RoundFailed, check_results
from raysim.federation.simulated_time import usual_seconds
from raysim.federation.versions import round_info

NOW = "clock"  # of the server's memory: when the next round may begin, in simulated seconds


class RunClients:
    """The clients of a run at the beginning of a round. Who is asked for a loss is a candidate from then on."""

    def __init__(self, run: RunParts, engine: Engine | None):
        """Without an `engine`, for what is known before a run, all losses are 0."""
        self._run, self._engine = run, engine
        self.here = np.arange(len(run.server.population.sizes))
        self.now = float(run.server.memory.get(NOW, 0.0))  # simulated seconds: when the round begins
        self.idle = 0.0  # and how long the server waited for that
        self._asked: set[int] = set()  # in this round, in vain
        if run.config.clock.comes_and_goes:
            self._wait()
        self.candidates: dict[int, int] = {}  # and of how many samples they said the loss
        self.asked_before: dict[int, int] = {}  # those that were candidates before the round asked others
        self.events: list[Event] = []  # those that failed

    def retry(self, asked: Sequence[int], lasts: float) -> float | None:
        """Begin again without those who were `asked`, after `lasts` seconds and when enough others are available; returns how
        much later that is, None where there are not enough."""
        before, run, least = self.now, self._run, self._run.config.rounds.min_clients
        self._asked |= {*asked}
        left = np.setdiff1d(run.server.population.sizes.nonzero().flatten().numpy(), [*self._asked])
        if len(left) < least:
            return None
        now, available = run.config.clock.opens(run.server.seed, left, before + lasts, least)
        if np.isinf(now):
            return None
        self.now, self.here, self.asked_before = now, left[available], {**self.candidates}
        return self.now - before

    @property
    def asked_now(self) -> dict[int, int]:
        """The candidates that have been asked since, and of how many samples they said the loss."""
        more = {c: n - self.asked_before.get(c, 0) for c, n in self.candidates.items()}
        return {client: samples for client, samples in more.items() if samples}

    def _wait(self) -> None:
        """Until enough clients are available."""
        run, server = self._run, self._run.server
        before = self.now
        holders = server.population.sizes.nonzero().flatten().numpy()
        least = run.config.rounds.min_clients
        self.now, available = run.config.clock.opens(server.seed, holders, before, least)
        if np.isinf(self.now):
            raise RoundFailed(
                f"round {server.t + 1}: after {before:g} simulated seconds there is no time at which {least} of the "
                f"{len(holders)} clients with samples are available. Start another run, with a smaller rounds.min_clients or "
                "clients that are there more often."
            )
        self.idle, self.here = self.now - before, holders[available]

    def seconds(self, clients: Sequence[int]) -> np.ndarray:
        return usual_seconds(self._run, clients)

    def losses(self, clients: Sequence[int], batch: bool = False) -> np.ndarray:
        run, server, sizes = self._run, self._run.server, self._run.partition.sizes
        selection = run.config.rounds.selection
        if not selection.needs.global_model:
            way = "Say so in its class: needs = raysim.Needs(global_model=True)"
            raise misused(selection.select, "asks clients for their losses", way, server.t)
        if empty := [client for client in clients if not sizes[client]]:
            way = "Those with some are server.population.sizes.nonzero().flatten()"
            raise misused(
                selection.select, f"asks client {empty[0]}, which has no samples, for its loss", way, server.t
            )
        for client in clients:
            samples = min(int(sizes[client]), run.spec.settings.batch_size) if batch else int(sizes[client])
            self.candidates[client] = self.candidates.get(client, 0) + samples
        if self._engine is None:
            return np.zeros(len(clients))
        asked = tuple(sorted({*clients}))
        found = evaluate_clients(self._engine, round_info(server), asked, Downlink(), "loss", of_batch=batch)
        doing = f"round {server.t + 1}, the loss of the model that it was sent"
        self.events += check_results(found, self._engine.nodes, doing, run.config.rounds)
        scores = [found.results[client].test for client in clients]
        return np.array([np.nan if score is None else score.mean_loss for score in scores], np.float64)
