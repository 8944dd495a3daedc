"""What shrinks the global model, and how far: norms, shrink factors, and the balance of decay and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raysim.report import NoData
from raysim.report.canvas import COLUMN, Canvas, colour, legend, panel
from raysim.report.clouds import pearson, scatter_groups
from raysim.report.folder import RunFolder
from raysim.report.groups import Group, runs_of
from raysim.report.quantities import noted
from raysim.report.series import Chart, Curve, over_rounds

BALANCES = {
    "fedlaw_ratio": "FedLAW's r\n‖γd‖ / ‖(1 − γ)w‖",
    "fedlws_ratio": "FedLWS's r\n‖(1 − γ)w‖ / ‖γd‖",
    "gamma": "shrink factor γ",
    "gradient": "global gradient ‖γd‖",
    "decay": "pull of shrinking ‖(1 − γ)w‖",
    "tau": "disagreement of the clients τ",
    "norm": "norm of the model ‖w‖",
    "moved": "step of the mean ‖d‖",
}
RATIOS = ("fedlaw_ratio", "fedlws_ratio")


def norm(groups: Sequence[Group]) -> Chart:
    """Norm of the global model after each round."""

    def norms(run: RunFolder) -> np.ndarray:
        table = run.columns("layers")
        return np.sqrt(np.bincount(table["round"], table["norm"] ** 2)) if len(table["round"]) else np.empty(0)

    return over_rounds(groups, norms, "norm of the model ‖w‖")


def balance(groups: Sequence[Group], variant: str) -> Chart:
    """What shrinking does in each round: the clients' pull against the decay of the old model.

    The r of FedLAW and the r of FedLWS are each other's inverse."""
    return over_rounds(groups, lambda run: noted(run, f"balance.{variant}"), BALANCES[variant])


def ratios(groups: Sequence[Group], variant: str) -> Canvas:
    """Distribution of the ratio r over rounds and runs, and the normal distribution of the same mean and deviation."""
    values = np.concatenate([noted(run, f"balance.{variant}") for group in groups for run in group.runs])
    values = values[~np.isnan(values)]
    if len(values) < 2:
        raise NoData("No run has recorded the ratio with the instrument balance.")
    figure, axes = panel(COLUMN, 2.2)
    count, edges = np.histogram(values, bins=min(40, max(5, len(values) // 5)), density=True)
    bars = axes.stairs(count, edges, fill=True, color=colour(0), alpha=0.6)
    handles: list[Any] = [bars]
    named = [f"{len(values)} rounds"]
    mean, std = values.mean(), values.std(ddof=1)
    if std > 1e-12 * abs(mean):  # of equal numbers it may be rounding
        x = np.linspace(*axes.get_xlim(), 200)
        handles += axes.plot(x, np.exp(-(((x - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi)), color=colour(1))
        named.append(f"normal, {mean:.3g} ± {std:.2g}")
    axes.set(xlabel=", ".join(BALANCES[variant].split("\n")), ylabel="density", ylim=(0, None))
    legend(figure, handles, named)
    return figure


def tau_r(groups: Sequence[Group]) -> Canvas:
    """Disagreement τ of the clients and FedLWS's ratio r in every round, and Pearson's correlation of the two.

    The ratio is what shrinking took from the model over what the clients gave it. In FedLWS without bounds r = β τ by
    definition, so a correlation of 1 is no finding."""
    missing = "No run has recorded τ and r, with FedLWS or the instrument balance."
    figure, axes, clouds, dots = scatter_groups(groups, _tau_and_ratio, missing)
    axes.set(xlabel=BALANCES["tau"], ylabel=BALANCES["fedlws_ratio"])
    found = [pearson(*cloud.points.T) for cloud in clouds]
    correlations = ["no correlation" if np.isnan(r) else f"correlation {r:.2f}".replace("-", "−") for r in found]
    named = [f"{cloud.label}: {words}" for cloud, words in zip(clouds, correlations, strict=True)]
    legend(figure, dots, named if len(groups) > 1 else correlations)
    return figure


def in_proportion(groups: Sequence[Group]) -> bool:
    """Whether r is β τ with one β in every run, as FedLWS without bounds makes it."""
    points = [points for run in runs_of(groups) if len(points := _tau_and_ratio(run))]
    return all(np.allclose(r * tau.max(), r[tau.argmax()] * tau) for tau, r in (pair.T for pair in points))


def _tau_and_ratio(run: RunFolder) -> np.ndarray:
    """[n, 2] of the rounds that have both. What the instrument saw goes before what FedLWS reported."""
    columns = [
        seen if len(seen := noted(run, f"balance.{ours}")) else noted(run, f"fedlws.{its}")
        for ours, its in (("tau", "model_tau"), ("fedlws_ratio", "model_r"))
    ]
    points = np.stack(columns, 1) if len(columns[1]) else np.empty((0, 2))
    return np.asarray(points[~np.isnan(points).any(1)])


def shrinking(run: RunFolder) -> Chart:
    """FedLWS's shrink factor γ of the layers over the rounds.

    The lines are the mean of the layers, with a band of one standard deviation over them, the first layer, the last
    layer, and the one factor that the whole model would have."""
    gamma = noted(run, "fedlws.gamma")
    if not len(gamma):
        raise NoData("The run has no FedLWS.")
    shown = {
        "mean of the layers": gamma.mean(1), "first layer": gamma[:, 0], "last layer": gamma[:, -1],
        "whole model": noted(run, "fedlws.model_gamma"),
    }  # fmt: skip
    mean, *others = (Curve.one(i, label, run, values) for i, (label, values) in enumerate(shown.items()))
    banded = replace(mean, std=gamma.std(1)[mean.rounds])
    return Chart([banded, *others], "shrink factor γ", band="± 1 std over layers")
