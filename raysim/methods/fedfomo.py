"""FedFomo: Personalized Federated Learning with First Order Model Optimization (Zhang et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raysim.core.bounds import PositiveInt, Probability
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.cohort import Cohort
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.method import Needs
from raysim.core.mixture import Mixture
from raysim.core.note import FELL_BACK
from raysim.core.pairs import Pairs, entries, sparse
from raysim.core.server import Downlink, DownlinkRule, ModelStore, Server, ServerStep
from raysim.lazy import Tensor, no_grad, torch

EPS = 1e-5  # the authors'


@dataclass
class Origin:
    """Where a client's last local training started: θ_i^old [S], against which models are weighed."""

    value: Tensor | None = None


@dataclass(frozen=True)
class FedFomo(ClientMethod, DownlinkRule):
    """Each client mixes the models that help it (FedFomo, Zhang et al., 2021): θ_i ← Σ_n b_n θ_n, b_n ∝ max(a_n, 0).

    a_n = (L(θ_i^old) − L(θ_n)) / (‖θ_n − θ_i^old‖ + 1e-5), with losses on the client's validation samples in eval mode;
    θ_i^old is the model from which the client's last training started. Where no a_n is positive the client continues
    from its own model. The server adds up the a_n, beginning with 1 for a client's own model, and sends each client the
    `models` with the largest sums. As in the article, each of these is replaced by another one with probability
    `epsilon`.

    Wrong choice where the downlink is tight: each client is sent `models` whole models, and by default those of all.
    """

    models: PositiveInt | None = None
    """How many models a client is sent (M); null: all."""
    epsilon: Probability = 0.0
    """Probability that one of them is replaced by another model (ε)."""
    needs: ClassVar[Needs] = Needs(peers="whole")

    def check(self, facts: RunFacts) -> str | None:
        if not facts.client_val_frac:
            return "weighs models on validation samples, but data.client_val_frac is 0. FedALA's authors use 0.2."
        return None

    def new_state(self, layers: LayerMap) -> Origin:
        return Origin()

    @property
    def sends_all(self) -> bool:
        return self.models is None

    def server_steps(self) -> tuple[ServerStep, ...]:
        return (AddPreferences(),)

    def downlink_rule(self) -> DownlinkRule:
        return self

    def downlink(self, clients: Sequence[int], models: ModelStore, server: Server) -> Downlink:
        known, N = set(models.clients), len(server.population.sizes)
        available = torch.tensor(models.clients, dtype=torch.long)
        count = min(self.models or len(available), len(available))
        preferences, stream = Pairs.of(N, server.memory[self]), server.generator("fedfomo")

        def chosen(client: int) -> tuple[int, ...]:
            preference = torch.zeros(N, dtype=torch.float64)
            preference[client] = 1.0
            others, sums = preferences.row(client)
            preference[others] = sums
            order = available[preference[available].argsort(descending=True, stable=True)]
            best, others = order[:count].clone(), order[count:]
            others = others[torch.randperm(len(others), generator=stream)]
            explored = (torch.rand(count, generator=stream) < self.epsilon).nonzero()[: len(others), 0]
            best[explored] = others[: len(explored)]
            return tuple(sorted(best.tolist()))

        return Downlink(peers=tuple(chosen(c) if c in known else () for c in clients))

    def start(self, run: LocalRun) -> None:
        state, scores = run.state(self), dict.fromkeys(run.peers, 0.0)
        if state.value is None or run.previous is None:
            run.receive()
        else:
            before = validation_loss(run, state.value)
            for peer, model in run.peers.items():
                distance = float((model - state.value)[: run.layers.P].norm())
                scores[peer] = (before - validation_loss(run, model)) / (distance + EPS)
            useful = torch.zeros(run.round_info.clients, dtype=torch.float64)
            useful[[*scores]] = torch.tensor([*scores.values()], dtype=torch.float64).clamp_min(0)
            run.note(self, FELL_BACK, (useful.sum() <= 0).double())
            mix = run.previous.clone()
            for peer in useful.nonzero()[:, 0].tolist():
                mix.add_(run.peers[peer] - run.previous, alpha=float(useful[peer] / useful.sum()))
            run.load(mix)
        state.value = run.value.clone()
        run.scratch["fedfomo"] = scores

    def finish(self, run: LocalRun, upload: Upload) -> None:
        scores: dict[int, float] = run.scratch["fedfomo"]
        values = torch.tensor([*scores.values()], dtype=torch.float64)
        index = torch.tensor([[*scores]], dtype=torch.long)
        upload.scalars["fedfomo"] = entries(index, values, [run.round_info.clients])


@no_grad
def validation_loss(run: LocalRun, value: Tensor) -> float:
    """Mean loss of a model `value` [S] on the client's validation samples, in eval mode; 0 if it has none."""
    x, y = run.data.val
    run.flat.model.eval()
    batches = zip(x.split(512), y.split(512), strict=True)
    losses = [run.task.total_loss(run.flat.functional(value, x), y) for x, y in batches]
    run.flat.model.train()
    return float(sum(losses)) / max(1, len(y))


@dataclass(frozen=True)
class AddPreferences(ServerStep):
    """The server's half: Q [N, N], which begins as the identity; row i grows by client i's a. It is stored as `Pairs`; a
    client's own 1 is among them from its first round on."""

    name: ClassVar[str] = "fedfomo"
    reads_models: ClassVar[bool] = False
    only_scales: ClassVar[bool] = True

    def prepare(self, server: Server) -> None:
        server.memory[self] = Pairs.none(len(server.population.sizes)).memory

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        scores, N = sparse(cohort.scalars("fedfomo")), len(server.population.sizes)  # [K, N]
        server.note(self, "preference", scores, "client", "peer")
        preferences = Pairs.of(N, server.memory[self])
        new = [c for c in cohort.clients if c not in preferences.row(c)[0]]
        places = torch.tensor([[*range(len(new))], new], dtype=torch.long)
        ones = entries(places, torch.ones(len(new)).double(), [len(new), N])
        server.memory[self] = preferences.plus(new, sparse(ones)).plus(cohort.clients, scores).memory
        return target
