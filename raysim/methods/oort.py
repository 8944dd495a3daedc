"""Oort (Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, OSDI 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raysim.core.bounds import NonNegative, PositiveInt, Probability, Share
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts, cohort_size
from raysim.core.probe import Probe, SampleLosses
from raysim.core.selection import Asked, Clients, Selection
from raysim.core.server import Server
from raysim.lazy import Tensor, torch

NEVER = -1  # in which round a newcomer took part last


@dataclass(frozen=True)
class Oort(Selection):
    """Exploits the clients with the greatest utility, less the slower they are, and explores newcomers (Lai et al., 2021,
    algorithm 1, with FedScale's normalisation).

    U_k = n_k √(mean squared sample loss in the first epoch of its last round L_k). In round R its score is
    û_k + √(0.1 ln R / L_k), times (T / t_k)^`penalty` where its seconds t_k exceed T. (1 - ε) K clients are drawn by their
    scores, the others among newcomers by 1 / t_k. Without a clock all are as fast.

    Wrong choice where the slow clients hold what others do not: they are drawn less and less.
    """

    exploration: Probability = 0.9
    """ε before the first round."""
    decay: Share = 0.98
    """Factor on ε in every round."""
    least: Probability = 0.2
    """The lowest ε."""
    clip: Share = 0.95
    """Utilities above this share of them all, in order, are cut."""
    cut_off: Share = 0.95
    """Who has less than this share of the score of the (1 - ε) K-th is not drawn."""
    penalty: NonNegative = 2.0
    """Exponent of T / t_k."""
    percentile: NonNegative = 30.0
    """T at first: so many per cent of the clients that took part are faster."""
    pacer: NonNegative = 5.0
    """Points that are added to `percentile` when `every` rounds have gathered less utility than those before."""
    every: PositiveInt = 20
    """Rounds of the pacer."""
    normalize: bool = True
    """Whether û is the utility scaled to 0 to 1, as in FedScale; false: as it is, beside which the term of R counts little."""
    at_most: PositiveInt | None = None
    """Rounds after which a client is not exploited any more; null: no limit."""

    def check(self, facts: RunFacts) -> str | None:
        if self.least > self.exploration:
            return f"least {self.least:g} is above exploration {self.exploration:g}."
        return "percentile: it is 100 at most." if self.percentile > 100 else super().check(facts)

    @property
    def probes(self) -> tuple[Probe, ...]:
        return (SampleLosses(),)

    def share(self, t: int) -> float:
        """ε in round t, from 0."""
        return max(self.exploration * self.decay ** (t + 1), self.least)

    def select(self, server: Server, participation: float, clients: Clients) -> Asked:
        memory = self._paced(server)
        holders = clients.here[server.population.sizes.numpy()[clients.here] > 0]
        count = min(cohort_size(participation, len(server.population.sizes)), len(holders))
        last, uses = memory["last"].numpy()[holders], memory["uses"].numpy()[holders]
        new = last == NEVER
        worn = uses >= (self.at_most or math.inf)
        if (~worn).sum() < count:  # else there were too few
            worn[:] = False
        known = np.flatnonzero(~new & ~worn)
        exploit = math.floor((1 - self.share(server.t)) * count + 1e-9)
        exploit = min(max(exploit, count - int(new.sum())), len(known))
        seconds, stream = clients.seconds(holders.tolist()), server.generator("oort")
        utility = (server.population.sizes * memory["loss"]).numpy()[holders]
        threshold = preferred(seconds[~new], float(memory["percentile"]))
        server.note(self, "exploration", torch.tensor(self.share(server.t)))
        if math.isfinite(threshold):
            server.note(self, "preferred_seconds", torch.tensor(threshold))
        score = self.scores(utility[known], seconds[known], last[known] + 1, server.t + 1, threshold)
        order = np.argsort(-score, kind="stable")
        picked = order[:exploit]
        if exploit:
            picked = order[score[order] > self.cut_off * score[picked[-1]]]
            picked = picked if len(picked) >= exploit else order[:exploit]
        exploited = known[picked[_drawn(score[picked], exploit, stream)]]
        newcomers = np.flatnonzero(new)
        explored = newcomers[_drawn(1 / np.maximum(seconds[new], 1e-9), count - exploit, stream)]
        by = dict.fromkeys(holders[exploited].tolist(), "exploit") | dict.fromkeys(
            holders[explored].tolist(), "explore"
        )
        worth = dict(zip(holders[known].tolist(), score.tolist(), strict=True))
        return Asked(
            tuple(sorted(by)), selected_by=by, utility={client: worth[client] for client in by if client in worth}
        )

    def scores(
        self, utility: np.ndarray, seconds: np.ndarray, last: np.ndarray, round_: int, threshold: float
    ) -> np.ndarray:
        """[n] of clients with such `utility`, which took part `last` in these rounds, from 1; now it is round `round_`."""
        if not len(utility):
            return utility
        cut = np.minimum(utility, np.sort(utility)[min(int(self.clip * len(utility) + 1e-9), len(utility) - 1)])
        if self.normalize:
            base = 0.999 * utility.min()
            cut = (cut - base) / max(utility.max() - base, 1e-4)
        score: np.ndarray = cut + np.sqrt(0.1 * math.log(round_) / last)
        slow = seconds > threshold
        score[slow] *= (threshold / seconds[slow]) ** self.penalty
        return score

    def learn(self, cohort: Cohort, server: Server) -> None:
        memory, clients = dict(self._remembered(server)), list(cohort.clients)
        loss = cohort.stat(SampleLosses()).nan_to_num(0.0)
        for name, value in (("loss", loss), ("last", server.t), ("uses", memory["uses"][clients] + 1)):
            memory[name] = memory[name].clone()
            memory[name][clients] = value
        memory["gathered"] = memory["gathered"] + (cohort.sizes * loss).sum()
        server.memory[self] = memory

    def _paced(self, server: Server) -> dict[str, Tensor]:
        """What is remembered, after the pacer has looked at the last rounds."""
        memory = dict(self._remembered(server))
        if server.t and server.t % self.every == 0:
            if memory["gathered"] < memory["gathered_before"]:
                memory["percentile"] = (memory["percentile"] + self.pacer).clamp(max=100.0)
            memory["gathered_before"], memory["gathered"] = memory["gathered"], torch.zeros_like(memory["gathered"])
        server.memory[self] = memory
        return memory

    def _remembered(self, server: Server) -> dict[str, Tensor]:
        if self in server.memory:
            remembered: dict[str, Tensor] = server.memory[self]
            return remembered
        n = len(server.population.sizes)
        return {
            "loss": torch.zeros(n, dtype=torch.float64),  # root of the mean square, of each client's last round
            "last": torch.full((n,), NEVER),
            "uses": torch.zeros(n, dtype=torch.long),
            "percentile": torch.tensor(self.percentile, dtype=torch.float64),
            "gathered": torch.zeros((), dtype=torch.float64),  # utility since the pacer looked last
            "gathered_before": torch.zeros((), dtype=torch.float64),
        }


def preferred(seconds: np.ndarray, percentile: float) -> float:
    """T, of the `seconds` [n] of those that took part."""
    place = min(math.floor(percentile * len(seconds) / 100 + 1e-9), len(seconds) - 1)
    return float(np.sort(seconds)[place]) if len(seconds) else math.inf


def _drawn(weights: np.ndarray, count: int, stream: torch.Generator) -> np.ndarray:
    """Places of `count` that are drawn by their weights, without replacement."""
    if not count:
        return np.empty(0, np.int64)
    positive = torch.from_numpy(np.maximum(weights, 1e-12))
    places: np.ndarray = torch.multinomial(positive, count, generator=stream).numpy()
    return places
