"""The server's part of a round: the plan, the sum, the server's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import cast

from raysim.core.cohort import AskedCohort, Cohort
from raysim.core.hooks import check_type, check_vector, misused
from raysim.core.mixture import Mixture
from raysim.core.rng import stream_of
from raysim.core.server import STAGES, Downlink, DownlinkRule, ModelStore, Server, ServerStep, Weighting
from raysim.core.server_model import ServerModel
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class EarlyPlan:
    """What was planned of a round before it trained. It is adopted whole, or dropped where a client did not come back."""

    mixture: Mixture
    fork: Server  # on which it was planned
    noted: int  # how much the server had noted before

    def adopt(self, server: Server) -> None:
        """Let `server` note and remember what the plan did."""
        later = server.scratch.notes[self.noted :]
        server.memory, server.scratch = self.fork.memory, self.fork.scratch
        server.scratch.notes += later


@dataclass(frozen=True)
class Aggregator:
    """All of the server's side, as a value."""

    base_weights: str  # size | uniform
    weightings: tuple[Weighting, ...]
    steps: tuple[ServerStep, ...]
    rule: DownlinkRule = DownlinkRule()
    personal_layers: str | None = None  # layers that no client sends
    bn_stats: str = "average"  # average | local | first | proxy | recalibrate

    @cached_property
    def _in_order(self) -> tuple[list[Weighting], list[Weighting]]:
        """The weightings by stage and rank, however they were listed: those that plan before training, and the others."""
        order = sorted(self.weightings, key=lambda w: (STAGES.index(w.stage), w.rank))
        early = [*takewhile(lambda w: w.plans_early, order)]
        return early, order[len(early) :]

    @property
    def plans_early(self) -> bool:
        """Whether the whole plan is known before training and no step reads a client's model."""
        models = any(s.reads_models for s in self.steps) or any(w.combines for w in self.weightings)
        return not self._in_order[1] and not models

    def prepare(self, server: Server) -> None:
        """Let the steps prepare what the server remembers or shares from the start."""
        for i, step in enumerate(self.steps):
            with server.seeded_for(step, f"prepare {i} {stream_of(step)}"):
                step.prepare(server)

    def downlink(self, clients: Sequence[int], models: ModelStore, server: Server) -> Downlink:
        """What `clients` (sorted) are sent in this round."""
        with server.seeded_for(self.rule, "downlink"):
            made = self.rule.downlink(clients, models, server)
        sent: Downlink = check_type(self.rule.downlink, made, Downlink, "Return a Downlink", server.t)
        return sent

    def plan_early(self, cohort: AskedCohort, server: Server) -> EarlyPlan:
        """The plan as far as it is known before training. `server` stays as it is until the plan is adopted."""
        fork = server.fork()
        return EarlyPlan(self._plan_early(cohort, fork), fork, len(server.scratch.notes))

    def plan(self, cohort: Cohort, server: Server, early: EarlyPlan | None = None) -> Mixture:
        """The whole plan, continued from the `early` one of the same clients, where that was adopted."""
        mixture = early.mixture if early else self._plan_early(cohort, server)
        for i in range(len(self._in_order[0]), len(self.weightings)):
            mixture = self._planned(i, cohort, server, mixture)
        return mixture.with_first_buffers() if self._in_order[1] and self.bn_stats == "first" else mixture

    def _plan_early(self, cohort: AskedCohort | Cohort, server: Server) -> Mixture:
        mixture = cohort.by_size() if self.base_weights == "size" else cohort.uniform()
        if self.personal_layers:
            personal = server.layers.where(self.personal_layers)
            mixture = mixture.select(~personal.expand(len(cohort.clients), -1))
        if self.bn_stats not in ("average", "first"):
            mixture = mixture.without_buffers()
        for i in range(len(self._in_order[0])):  # which promise to read only what an `AskedCohort` has
            mixture = self._planned(i, cast(Cohort, cohort), server, mixture)
        if self.bn_stats == "first" and not self._in_order[1]:  # else the clients that send are not chosen yet
            mixture = mixture.with_first_buffers()
        _ = mixture.coefficients  # computed now, while clients train
        return mixture

    def reduce(self, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        """The aggregate [S], and on the way the distances that a step will ask for."""
        for weighting in self.weightings:
            with server.seeded_for(weighting, f"combine {stream_of(weighting)}"):
                made = weighting.combine(mixture, cohort, server)
            if made is not None:
                server.scratch.combined = weighting, check_vector(weighting.combine, made, server.value, server.t)
                return server.scratch.combined[1]
        asked = (step.measures_distances_to(mixture) for step in self.steps)
        return cohort.reduce(mixture, distances_to=next((other for other in asked if other is not None), None))

    def transform(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        """Fold the server steps in order, then see to BatchNorm's statistics where they come from proxy data. A round that leaves
        the model has none of this: momentum would move the model, and decay would shrink it."""
        if server.scratch.leaves_model:
            return server.value
        if self.bn_stats == "proxy" and server.scratch.statistics is not None:
            target = torch.cat([target[: server.layers.P], server.scratch.statistics])
        for i in range(len(self.steps)):
            target = self.applied(i, target, mixture, cohort, server)
        if self.personal_layers and self.steps:  # no step may shrink what no client sends
            part, target = server.layers.span(self.personal_layers), target.clone()
            target[part] = server.value[part]
        if self.bn_stats == "recalibrate" and server.layers.B:
            target = cohort.compute(ServerModel.recalibrated, target, server.proxy.rows)
        return target

    def applied(self, i: int, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        """What step i makes of `target` [S]. Raises `HookError` where that is no such vector."""
        step = self.steps[i]
        with server.seeded_for(step, f"apply {i} {stream_of(step)}"):
            made = step.apply(target, mixture, cohort, server)
        return check_vector(step.apply, made, target, server.t)

    def _planned(self, i: int, cohort: Cohort, server: Server, prior: Mixture) -> Mixture:
        """The plan of the weighting that is the i-th in order. Raises `HookError` where there is no average by it."""
        early, others = self._in_order
        weighting = [*early, *others][i]
        with server.seeded_for(weighting, f"plan {i} {stream_of(weighting)}"):
            made = weighting.plan(cohort, server, prior)
        plan, way = weighting.plan, "Return a Mixture, such as prior.reweighted(weights)"
        mixture: Mixture = check_type(plan, made, Mixture, way, server.t)
        if mixture.lam.shape != prior.lam.shape:
            shape = f"returned weights {[*mixture.lam.shape]}"
            raise misused(plan, shape, f"They must be {[*prior.lam.shape]}, one for each client", server.t)
        if fault := mixture.fault():
            way = "They must be finite, none negative, one positive. Where the rule gives others, return prior"
            raise misused(plan, f"returned weights {fault}", f"{way} and call server.fell_back(self, True)", server.t)
        return mixture
