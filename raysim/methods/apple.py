"""APPLE: Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning (Luo & Wu, 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.bounds import NonNegative, PositiveInt, Share
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.pairs import Pairs, entries, sparse
from raysim.core.server import Downlink, DownlinkRule, ModelStore, Server, ServerStep
from raysim.lazy import Tensor, torch


@dataclass
class Relations:
    """A client's π_i [N], float64: how much of each client's core its personal model has."""

    pi: Tensor | None = None


@dataclass(frozen=True)
class APPLE(ClientMethod, DownlinkRule):
    """Each client learns a signed mix of all cores, and its own core (APPLE, Luo & Wu, 2022): w = Σ_j π_ij m_j.

    For each batch, with G = ∇L(w): m_i moves by the local optimiser along π_ii G, and π_ij ← π_ij − eta2 (⟨G, m_j⟩ +
    λ_t mu (π_ij − p_j)). λ_t is (cos(πt/R) + 1)/2 for t < R = int(L T) and then 0; with `schedule: epsilon` it is
    epsilon^(t/R) before R. After that w is put together again. A client sends its core with the buffers of w, which is
    its personal model. Of the `models` cores that a client is sent one is its own, and the others have the largest |π|;
    cores that it lacks count as zero. `official` follows the code of FedALA's authors: N η for η, the mean over tensors
    of mean(G ⊙ m_j) for ⟨G, m_j⟩, and w is sent instead of m_i.

    Wrong choice for many clients or large models: without `models` a client is sent the cores of all, every round.
    """

    eta2: NonNegative = 0.01
    """Step size of the relations π."""
    mu: NonNegative = 0.1
    """Strength of the pull of π towards the clients' shares of the samples (μ)."""
    L: float = 0.2
    """Fraction of the run's rounds in which that pull acts."""
    schedule: Literal["cos", "epsilon"] = "cos"
    """How the pull fades (λ_t): along a cosine, or exponentially down to `epsilon`."""
    epsilon: Share = 1e-3
    """With `schedule: epsilon`: what is left of the pull when it ends, in (0, 1]."""
    models: PositiveInt | None = None
    """How many cores a client is sent, its own included; null: all."""
    initial: Literal["uniform", "own"] = "uniform"
    """What π is at first: 1/N for every client, or 1 for the client's own core and 0 for the others."""
    official: bool = False
    """Compute as FedALA's authors coded it."""
    needs: ClassVar[Needs] = Needs(peers="whole", total_rounds=True)

    def check(self, facts: RunFacts) -> str | None:
        if facts.participation < 1:
            return (
                f"it needs all clients in each round, not {facts.participation:g} of them: set rounds.participation: 1."
            )
        return None

    def new_state(self, layers: LayerMap) -> Relations:
        return Relations()

    @property
    def sends_all(self) -> bool:
        return self.models is None

    def server_steps(self) -> tuple[ServerStep, ...]:
        return (KnowRelations(),)

    def downlink_rule(self) -> DownlinkRule:
        return self

    def downlink(self, clients: Sequence[int], models: ModelStore, server: Server) -> Downlink:
        others = server.population.sizes.nonzero()[:, 0]
        relations = Pairs.of(len(server.population.sizes), server.memory[self])
        first = 1 / len(others) if self.initial == "uniform" else 0.0

        def cores(client: int) -> tuple[int, ...]:
            met, pi = relations.row(client)
            weight = torch.full((relations.clients,), first if len(met) else 0.0, dtype=torch.float64)
            weight[met] = pi.abs()
            weight[client] = math.inf  # its own comes first
            order = others[weight[others].argsort(descending=True, stable=True)]
            return tuple(sorted(order[: self.models].tolist()))

        return Downlink(peers=tuple(map(cores, clients)))

    def start(self, run: LocalRun) -> None:
        run.load(run.received if run.previous is None else run.previous)
        state = run.state(self)
        if state.pi is None:
            has_samples = (run.shared["apple"] > 0).double()
            state.pi = has_samples / has_samples.sum()
            if self.initial == "own":
                state.pi = torch.zeros_like(state.pi)
                state.pi[run.client] = 1.0
        P = run.layers.P
        cores = {peer: model[:P] for peer, model in run.peers.items()}
        cores = run.scratch["apple"] = cores | {run.client: run.params.clone()}
        run.scratch["apple peers"] = torch.tensor(list(cores), device=run.params.device)
        if self.official:
            run.optimizer.lr = run.lr * run.round_info.clients
            run.scratch["apple means"] = mean_of_means(run.layers).to(run.params)
        self._mix(run)

    def step(self, run: LocalRun, x: Tensor, y: Tensor) -> None:
        pi, cores = run.state(self).pi, run.scratch["apple"]
        run.gradient(x, y)
        along = run.grad * run.scratch["apple means"] if self.official else run.grad
        peers = run.scratch["apple peers"]
        slope = torch.stack([torch.dot(along, core) for core in cores.values()]).double()  # ⟨G, m_j⟩
        core = cores[run.client]
        run.grad.mul_(pi[run.client])
        run.params.copy_(core)
        run.optimizer.step(run.trained)
        core.copy_(run.params)
        pull = self._loosening(run) * self.mu * (pi - run.shared["apple"])[peers]
        pi[peers] -= self.eta2 * (slope + pull)
        self._mix(run)

    def finish(self, run: LocalRun, upload: Upload) -> None:
        pi, met = run.state(self).pi, [*run.scratch["apple"]]  # the others are as they were at first
        upload.scalars["apple"] = entries(torch.tensor([met], device=pi.device), pi[met], pi.shape)
        if not self.official:
            upload.value = torch.cat([run.scratch["apple"][run.client], run.buffers])

    def _mix(self, run: LocalRun) -> None:
        """Put the personal model together."""
        pi = run.state(self).pi.tolist()
        run.params.zero_()
        for peer, core in run.scratch["apple"].items():
            if pi[peer]:
                run.params.add_(core, alpha=pi[peer])

    def _loosening(self, run: LocalRun) -> float:
        """λ_t: the pull of π towards the clients' shares of the samples ends after a fraction L of the rounds."""
        last = int(self.L * run.round_info.rounds)
        if run.t >= last:
            return 0.0
        passed = run.t / last
        return (math.cos(math.pi * passed) + 1) / 2 if self.schedule == "cos" else self.epsilon**passed


def mean_of_means(layers: LayerMap) -> Tensor:
    """[P], by which a sum over elements becomes the mean over tensors of their means."""
    return layers.per_element(1 / (layers.sizes[: layers.T].double() * layers.T))


@dataclass(frozen=True)
class KnowRelations(ServerStep):
    """The server's half: it sends every client the shares p of the samples, and remembers π [N, N], whom each client has met."""

    name: ClassVar[str] = "apple"
    reads_models: ClassVar[bool] = False
    only_scales: ClassVar[bool] = True

    def prepare(self, server: Server) -> None:
        sizes = server.population.sizes.double()
        server.shared["apple"] = sizes / sizes.sum()
        server.memory[self] = Pairs.none(len(sizes)).memory

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        relations, N = sparse(cohort.scalars("apple")), len(server.population.sizes)  # [K, N]
        server.note(self, "relation", relations, "client", "peer")
        new = Pairs.none(N).plus(cohort.clients, relations)
        server.memory[self] = Pairs.of(N, server.memory[self]).without(new).plus(cohort.clients, relations).memory
        return target
