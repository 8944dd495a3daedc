"""What the loss does around a run's models (FedLAW: Li et al., 2023, figures 4, 10 and 12; FedLWS: Shi et al., 2025)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from raysim.analysis.measure import Measure, MeasureError, Taken
from raysim.core.task import Task
from raysim.lazy import Tensor, torch

if TYPE_CHECKING:
    from raysim.federation.saved import SavedRun


@dataclass(frozen=True, kw_only=True)
class OfModels(Measure):
    """A measure of global models."""

    rounds: tuple[PositiveInt, ...] = ()
    """Traced rounds (from 1) whose models are taken; empty: the final model."""


@dataclass(frozen=True, kw_only=True)
class OnSamples(Measure):
    """A measure of the loss on samples."""

    samples: PositiveInt = 1000
    """At most so many samples make the loss."""
    part: Literal["test", "train"] = "test"
    """Whose samples: the server's test set, or the clients' training samples."""


@dataclass(frozen=True, kw_only=True)
class OfCurvature(OfModels, OnSamples):
    """A measure of the Hessian's eigenvectors."""

    tolerance: NonNegativeFloat = 1e-3
    """Relative accuracy of the eigenvalues; 0: machine precision."""
    packages: ClassVar[tuple[str, ...]] = ("curvlinops", "scipy")


@dataclass(frozen=True)
class Histogram(OfModels):
    """Histogram of the global model's parameters (FedLAW, 2023, figure 4; FedLWS, 2025, figures 3b and 8).

    Of the final model, or after traced `rounds`. `near_zero` is the share of parameters smaller than `near`.
    """

    bins: PositiveInt = 101
    """Bins of the histogram."""
    limit: PositiveFloat = 0.2
    """It reaches from −limit to limit."""
    near: NonNegativeFloat = 0.01
    """What counts as near zero, in absolute value."""

    def take(self, run: SavedRun) -> Taken:
        edges = np.linspace(-self.limit, self.limit, self.bins + 1)
        rows: list[tuple[float, ...]] = []
        for t, value in run.models(self.rounds):
            params = value[: run.layers.P].double().numpy()
            shares = np.histogram(params, edges)[0] / len(params)
            near = float((np.abs(params) < self.near).mean())
            bins = zip(edges[:-1].tolist(), edges[1:].tolist(), shares.tolist(), strict=True)
            rows += [(t, *one, near, self.near) for one in bins]
        columns = _columns(("round", "low", "high", "share", "near_zero", "near"), rows)
        return Taken(columns, f"{100 * near:.1f} % of the parameters are smaller than {self.near:g}")


@dataclass(frozen=True)
class Rescaling(OfModels, OnSamples):
    """Loss of c·w for factors c around 1 (FedLAW, 2023, figure 4): how much the model would gain by shrinking.

    Of the final model, or after traced `rounds`. Running statistics stay as they are.
    """

    low: float = 0.9
    """Smallest factor."""
    high: float = 1.1
    """Greatest factor."""
    points: PositiveInt = 21
    """How many factors are tried, evenly spaced."""
    samples: PositiveInt = 10_000
    """At most so many samples are tested."""

    def take(self, run: SavedRun) -> Taken:
        score = run.score(run.rows(self.part, self.samples))
        factors = np.linspace(self.low, self.high, self.points)
        rows: list[tuple[int, float, float, float]] = []
        for t, value in run.models(self.rounds):
            for factor in factors:
                scaled = value.clone()
                scaled[: run.layers.P] *= float(factor)
                rows.append((t, float(factor), *score(scaled)))
        best = min(rows[-self.points :], key=lambda row: row[2])
        headline = run.task.headline.name if run.task.headline else "score"
        return Taken(
            _columns(("round", "factor", "loss", headline), rows),
            f"the loss is lowest at {best[1]:.3g} times the model: {best[2]:.4f}"
            + (", at an end of the range; widen it with low and high" if best[1] in (factors[0], factors[-1]) else ""),
        )


@dataclass(frozen=True)
class Hessian(OfCurvature):
    """Largest eigenvalues λ₁, λ₂, … of the loss's Hessian in eval mode (FedLAW, 2023, figure 10).

    Needs `raysim[analysis]`. Of the final model, or after traced `rounds`, on a fixed draw of `samples`: curvlinops
    multiplies the Hessian by vectors, and SciPy's Lanczos iteration does the rest.
    """

    top: PositiveInt = 5
    """How many eigenvalues."""

    def take(self, run: SavedRun) -> Taken:
        if not 1 <= self.top < run.layers.P:
            raise MeasureError(f"top is {self.top}; a model of {run.layers.P} parameters has 1 to {run.layers.P - 1}.")
        rows_of_data, rows = run.rows(self.part, self.samples), []
        for t, value in run.models(self.rounds):
            values, _ = eigenpairs(run, value, rows_of_data, self.top, self.tolerance)
            rows += [(t, i + 1, float(one)) for i, one in enumerate(values)]
        found = [one for _, _, one in rows[-self.top :]]
        ratio = f", {found[0] / found[-1]:.3g} times λ{self.top}" if self.top > 1 else ""
        return Taken(_columns(("round", "index", "eigenvalue"), rows), f"λ1 is {found[0]:.4g}{ratio}")


@dataclass(frozen=True)
class Slice(OfCurvature):
    """Loss along the Hessian's first eigenvector v₁, L(w + a v₁) (FedLAW, 2023, figure 4).

    Needs `raysim[analysis]`. Of the final model, or after traced `rounds`; v₁ has length 1.
    """

    reach: float = 1.0
    """Greatest step along the eigenvector, in both directions."""
    points: PositiveInt = 41
    """How many steps, evenly spaced."""

    def take(self, run: SavedRun) -> Taken:
        rows_of_data = run.rows(self.part, self.samples)
        score, rows = run.score(rows_of_data), []
        for t, value in run.models(self.rounds):
            (first,), directions = eigenpairs(run, value, rows_of_data, 1, self.tolerance)
            for step in np.linspace(-self.reach, self.reach, self.points):
                moved = value.clone()
                moved[: run.layers.P] += float(step) * directions[0]
                rows.append((t, float(step), score(moved)[0]))
        losses = [loss for _, _, loss in rows[-self.points :]]
        return Taken(
            _columns(("round", "step", "loss"), rows),
            f"λ1 is {first:.4g}; the loss goes from {min(losses):.4f} to {max(losses):.4f}",
        )


@dataclass(frozen=True)
class Simplex(OnSamples):
    """Loss of all mixtures λ₁w₁ + λ₂w₂ + λ₃w₃ of three clients' models (FedLAW, 2023, figure 12).

    For each of the traced `rounds`, or all of them, on a triangular grid of λ; without `clients`, the first three of
    the first round's cohort. Rounds in which one of them is missing are left out. Running statistics are mixed like
    parameters. `p` is where the mixture by samples lies.
    """

    rounds: tuple[PositiveInt, ...] = ()
    """Traced rounds (from 1) whose models are taken; empty: all of them."""
    clients: tuple[int, int, int] | None = None
    """The three clients; null: the first three of the first round's cohort."""
    step: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Distance of neighbouring points of the grid."""

    def take(self, run: SavedRun) -> Taken:
        rounds = run.of_rounds(self.rounds)
        clients = tuple(self.clients or run.cohort(rounds[0])[:3])
        if len(set(clients)) != 3:
            raise MeasureError(
                f"{run.folder}: round {rounds[0] + 1} has {len(set(clients))} clients; a simplex needs three."
            )
        together = [t for t in rounds if set(clients) <= set(run.cohort(t))]
        if not together:
            raise MeasureError(f"{run.folder}: in none of these rounds did the clients {clients} all take part.")
        score, rows = run.score(run.rows(self.part, self.samples)), []
        for t in together:
            first, second, third = (run.read(t, f"client-{client:04d}") for client in clients)
            for one, two in triangle(round(1 / self.step)):
                loss, _ = score(third + one * (first - third) + two * (second - third))
                rows.append((t, one, two, 1 - one - two, loss))
        sizes = run.sizes[list(clients)]
        last = [row for row in rows if row[0] == together[-1]]
        best = min(last, key=lambda row: row[-1])
        return Taken(
            _columns(("round", "lambda_1", "lambda_2", "lambda_3", "loss"), rows),
            f"in round {together[-1] + 1} the loss is lowest, {best[-1]:.4f}, at λ = "
            + ", ".join(f"{part:.2f}" for part in best[1:4]),
            {"clients": list(map(int, clients)), "p": (sizes / sizes.sum()).tolist()},
        )


def triangle(steps: int) -> Iterator[tuple[float, float]]:
    """λ₁ and λ₂ of all points whose three coordinates are multiples of 1/steps and add up to 1."""
    for i in range(steps + 1):
        for j in range(steps + 1 - i):
            yield i / steps, j / steps


def eigenpairs(
    run: SavedRun, value: Tensor, rows: np.ndarray, count: int, tolerance: float
) -> tuple[np.ndarray, Tensor]:
    """The `count` largest eigenvalues, descending, of the Hessian of the mean loss of `value` [S] on `rows`, and unit
    eigenvectors [count, P]."""
    run.load(value)
    x, y = run.samples(rows)
    batch = run.batch_size
    data = list(zip(x.split(batch), y.split(batch), strict=True))
    values, vectors = top_eigenpairs(run.network, run.task, data, count, tolerance)
    named = {name: each for name, each in run.network.named_parameters() if each.requires_grad}
    directions = torch.zeros(count, run.layers.S)
    for direction, vector in zip(directions, vectors, strict=True):
        views = run.layers.unflatten(direction)
        parts = vector.split([parameter.numel() for parameter in named.values()])
        for (name, parameter), part in zip(named.items(), parts, strict=True):
            views[name].copy_(part.view(parameter.shape))
    return values, directions[:, : run.layers.P]


def top_eigenpairs(
    model: torch.nn.Module, task: Task, data: list[tuple[Tensor, Tensor]], count: int, tolerance: float
) -> tuple[np.ndarray, Tensor]:
    """The largest eigenvalues, descending, of the Hessian of `model`'s mean loss on batches of `data`, and unit
    eigenvectors [count, P] in the order of its parameters, without those that are frozen."""
    from scipy.sparse.linalg import eigsh

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = sum(parameter.numel() for parameter in parameters)
    start = torch.randn(size, generator=torch.Generator().manual_seed(0)).numpy()  # SciPy's own differs every time
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script`", FutureWarning)  # which curvlinops and torch still use
        from curvlinops import HessianLinearOperator

        hessian = HessianLinearOperator(model, _mean_loss(task), parameters, data, check_deterministic=False)
        values, vectors = eigsh(hessian.to_scipy(), k=count, which="LA", tol=tolerance, v0=start)
    order = np.argsort(-values)
    return values[order], torch.from_numpy(np.ascontiguousarray(vectors.T[order])).float()


def _mean_loss(task: Task) -> torch.nn.Module:
    """The task's loss in the form that curvlinops asks for."""

    class MeanLoss(torch.nn.Module):
        reduction = "mean"

        def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
            return task.loss(outputs, y)

    return MeanLoss()


def _columns(names: tuple[str, ...], rows: Sequence[tuple[float, ...]]) -> dict[str, list[float]]:
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
