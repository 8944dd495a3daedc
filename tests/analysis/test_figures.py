"""Figures of the instruments show what the tables say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import tiny
from matplotlib.collections import PathCollection

import raysim
from raysim.analysis.measure import write
from raysim.analysis.trajectory import Trajectory
from raysim.config import to_yaml
from raysim.federation.saved import SavedRun
from raysim.report import NoData
from raysim.report.figures import draw
from raysim.report.groups import compare
from raysim.report.runs import Run
from raysim.report.shrinking import BALANCES, in_proportion
from raysim.report.updates import critical_point
from raysim.store import tables
from raysim.store.tables import Recorder


def by_hand(folder: Path, notes: dict[str, Sequence[Any]], seed: int = 3, **changes: Any) -> Run:
    """A run that noted these numbers ("coherence.mean": one a round, or {client: number} a round), two clients a round of
    weights ¼ and ¾, with a model of two layers whose norms are 3 and 4."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(tiny(seed=seed, **changes)))
    with Recorder(folder) as recorder:
        for t in range(len(next(iter(notes.values())))):
            recorder.add(
                "rounds", round=t, clients_ok=2, clients_failed=0, bytes_up=1, bytes_down=1, seconds=1.0, wall=t
            )
            recorder.add("clients", round=t, client=[0, 1], weight=[0.25, 0.75], status="ok")
            recorder.add(
                "layers", round=t, layer=[0, 1], name=["a", "b"], parameters=[5, 20], norm=[3.0, 4.0], update_norm=0.0
            )
            recorder.add(
                "traffic", round=t, client=[0, 1], up_params=[100, 0], down_params=100, down_vectors=[0, 300], bytes=0,
                **{f"{way}_{what}": 0 for way in ("up", "down") for what in ("buffers", "scalars", "masks")}, up_vectors=0,
            )  # fmt: skip
            for name, values in notes.items():
                method, _, what = name.partition(".")
                if isinstance(values[t], dict):
                    clients, numbers = list(values[t]), list(values[t].values())
                    recorder.add("notes", round=t, method=method, name=what, client=clients, value=numbers)
                elif values[t] is not None:
                    recorder.add("notes", round=t, method=method, name=what, value=values[t])
    return Run(folder)


def curve(line: Any) -> list[list[float]]:
    return np.asarray(line.get_xydata()).tolist()


def test_coherence_is_a_curve_with_its_critical_point(tmp_path: Path) -> None:
    runs = [
        by_hand(tmp_path / "a", {"coherence.mean": [0.4, 0.3, -0.3, 0.2], "coherence.paper": [0.1] * 4}, seed=1),
        by_hand(tmp_path / "b", {"coherence.mean": [0.2, 0.1, -0.1, 0.2], "coherence.paper": [0.1] * 4}, seed=2),
    ]
    axes = draw("coherence", runs).axes[0]
    mean, zero, critical = axes.lines
    np.testing.assert_allclose(curve(mean), [[1, 0.3], [2, 0.2], [3, -0.2], [4, 0.2]])
    assert list(zero.get_ydata()) == [0, 0]
    np.testing.assert_allclose(curve(critical), [[3, -0.2]])
    assert len(axes.collections) == 1  # the band over two seeds
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "mean cosine of updates")
    assert curve(draw("coherence:paper", runs[:1]).axes[0].lines[0]) == [[t, 0.1] for t in (1, 2, 3, 4)]
    assert critical_point(np.array([-1.0, -2.0, 0.0])) is None
    assert critical_point(np.array([-1.0, 2.0, 1.0, 0.0])) == 3


def test_weights_against_coherence(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "a", {"coherence.client": [{0: 0.5, 1: -0.5}, {1: 0.1}]})
    (dots,) = draw("lambda-coherence", [run]).axes[0].collections
    np.testing.assert_allclose(np.asarray(dots.get_offsets()), [[0.5, 25], [-0.5, 75], [0.1, 75]])


def test_groups_of_clients_have_a_curve_each(tmp_path: Path) -> None:
    notes = {"coherence.mean": [0.1, 0.2], "coherence.mean_even": [0.3, None], "coherence.mean_odd": [0.0, -0.1]}
    figure = draw("coherence-groups", [by_hand(tmp_path / "a", notes)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["all clients", "even", "odd"]
    assert [curve(line) for line in figure.axes[0].lines[:3]] == [
        [[1, 0.1], [2, 0.2]],
        [[1, 0.3]],
        [[1, 0.0], [2, -0.1]],
    ]
    with pytest.raises(NoData, match="no groups"):
        draw("coherence-groups", [by_hand(tmp_path / "b", {"coherence.mean": [0.1]})])


def test_the_two_ratios_are_told_apart(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "a", {"balance.fedlaw_ratio": [20.0, None, 10.0], "balance.fedlws_ratio": [0.05, 0, 0.1]})
    shown = {variant: draw(f"balance:{variant}", [run]).axes[0] for variant in ("fedlaw_ratio", "fedlws_ratio")}
    assert curve(shown["fedlaw_ratio"].lines[0]) == [[1, 20], [3, 10]]
    assert curve(shown["fedlws_ratio"].lines[0]) == [[1, 0.05], [2, 0], [3, 0.1]]
    labels = {axes.get_ylabel() for axes in shown.values()}
    assert labels == {"FedLAW's r\n‖γd‖ / ‖(1 − γ)w‖", "FedLWS's r\n‖(1 − γ)w‖ / ‖γd‖"}
    figure = draw("ratios:fedlaw_ratio", [run])
    bars, normal = figure.axes[0].patches[0], figure.axes[0].lines[0]
    assert np.sum(bars.get_data().values * np.diff(bars.get_data().edges)) == pytest.approx(1)
    assert normal.get_ydata().max() == pytest.approx(1 / (50**0.5 * np.sqrt(2 * np.pi)), rel=1e-3)  # sd of 20 and 10
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["2 rounds", "normal, 15 ± 7.1"]
    fixed = by_hand(tmp_path / "b", {"balance.fedlaw_ratio": [0.1, 0.1, 0.1]})  # no normal distribution is as narrow
    figure = draw("ratios:fedlaw_ratio", [fixed])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["3 rounds"]
    assert not figure.axes[0].lines


def test_disagreement_against_ratio_takes_what_was_recorded(tmp_path: Path) -> None:
    notes = {"fedlws.model_tau": [1.0, 2.0, 3.0], "fedlws.model_r": [0.1, 0.2, 0.3]}
    figure = draw("tau-r", [by_hand(tmp_path / "a", notes)])
    np.testing.assert_allclose(np.asarray(figure.axes[0].collections[0].get_offsets()), [[1, 0.1], [2, 0.2], [3, 0.3]])
    assert figure.legends[0].get_texts()[0].get_text() == "correlation 1.00"
    straight = [by_hand(tmp_path / name, {"fedlws.model_tau": [0.0, 2.0, 4.0], "fedlws.model_r": r})
                for name, r in (("s", [0.0, 0.2, 0.4]), ("t", [0.0, 0.2, 0.1]))]  # fmt: skip
    assert [in_proportion(compare([run])) for run in straight] == [True, False]
    # Where an oracle chose γ, only the instrument knows both.
    notes = {"balance.tau": [1.0, 2.0, 3.0], "balance.fedlws_ratio": [0.3, None, 0.1]}
    (dots,) = draw("tau-r", [by_hand(tmp_path / "b", notes)]).axes[0].collections
    np.testing.assert_allclose(np.asarray(dots.get_offsets()), [[1, 0.3], [3, 0.1]])
    still = by_hand(tmp_path / "c", {"balance.tau": [1.0, 2.0, 3.0], "balance.fedlws_ratio": [0.0, 0.0, 0.0]})
    assert draw("tau-r", [still]).legends[0].get_texts()[0].get_text() == "no correlation"


def test_similarity_of_few_and_of_many_clients(tmp_path: Path) -> None:
    few = by_hand(tmp_path / "few", {"similarity.client": [{0: 0.5, 4: 0.6}, {0: 0.7}]})
    first, second = draw("similarity", [few]).axes[0].lines
    assert (curve(first), curve(second)) == ([[1, 0.5], [2, 0.7]], [[1, 0.6]])
    many = by_hand(tmp_path / "many", {"similarity.client": [{c: 0.1 * c for c in range(9)}]}, server=["fedlws"])
    both = draw("similarity", [few, many])
    assert [axes.get_title(loc="left") for axes in both.axes] == ["fedavg", "fedavg + fedlws"]
    assert curve(both.axes[1].lines[0]) == [[1, pytest.approx(0.4)]]


def test_objective_before_and_after(tmp_path: Path) -> None:
    seen = {"objective.before": [2.0, 1.5, 1.2], "objective.after": [1.0, 0.9, 0.8]}
    axes = draw("objective", [by_hand(tmp_path / "a", seen)]).axes[0]
    assert [curve(line) for line in axes.lines] == [[[t, v] for t, v in enumerate(s, 1)] for s in seen.values()]
    assert axes.get_yscale() == "log"
    assert {1.2, 1.6, 2} <= {float(label.get_text()) for label in axes.get_yticklabels()}  # and no powers of ten


def test_classes_are_a_map_over_the_rounds(measured: Path) -> None:
    run = raysim.load(measured)
    noted = [row["value"] for row in run["notes"].to_pylist() if row["name"] == "classes"]
    axes = draw("classes", [run]).axes[0]
    np.testing.assert_allclose(axes.get_images()[0].get_array(), 100 * np.reshape(noted, (4, 4)).T)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2", "3"]


def test_norms_and_floats(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "a", {"coherence.mean": [0.1, 0.2]})
    assert curve(draw("norm", [run]).axes[0].lines[0]) == [[1, 5], [2, 5]]
    up, down = draw("parameters", [run]).axes[0].patches
    assert up.get_width() == pytest.approx(0.5)  # one of two clients sends 25 floats, the model
    assert down.get_width() == pytest.approx(1 + 3 / 2)  # one is sent three further vectors


def test_shrinking_shows_layers_and_model(measured: Path) -> None:
    run = raysim.load(measured)
    gamma = run.columns("layers")["fedlws.gamma"].reshape(4, -1)
    mean, first, last, model = draw("shrinking", [run]).axes[0].lines
    np.testing.assert_allclose(mean.get_ydata(), gamma.mean(1))
    np.testing.assert_allclose(first.get_ydata(), gamma[:, 0])
    np.testing.assert_allclose(last.get_ydata(), gamma[:, -1])
    noted = [row["value"] for row in run["notes"].to_pylist() if row["name"] == "model_gamma"]
    np.testing.assert_allclose(model.get_ydata(), noted)


def test_curves_of_measures_are_their_tables(measured: Path) -> None:
    run = raysim.load(measured)
    table = run.columns("measures/rescaling")
    line, best, _ = draw("rescaling", [run]).axes[0].lines
    np.testing.assert_allclose(curve(line), np.stack([table["factor"], table["loss"]], 1))
    assert curve(best)[0][1] == pytest.approx(table["loss"].min())
    accuracy = draw("rescaling:accuracy", [run]).axes[0].lines[0].get_ydata()
    np.testing.assert_allclose(accuracy, 100 * table["accuracy"])
    table = run.columns("measures/slice")
    np.testing.assert_allclose(draw("slice", [run]).axes[0].lines[0].get_ydata(), table["loss"])
    table = run.columns("measures/histogram")
    bars = draw("histogram", [run]).axes[0].patches[0].get_data()
    np.testing.assert_allclose(bars.values, 100 * table["share"])
    np.testing.assert_allclose(bars.edges, [*table["low"], table["high"][-1]])
    values = run.columns("measures/hessian")["eigenvalue"].reshape(2, 2)  # of rounds 1 and 3
    np.testing.assert_allclose(draw("hessian", [run]).axes[0].lines[0].get_ydata(), values[1])
    np.testing.assert_allclose(
        curve(draw("hessian:first", [run]).axes[0].lines[0]), [[2, values[0, 0]], [4, values[1, 0]]]
    )
    ratio = draw("hessian:ratio", [run]).axes[0]
    np.testing.assert_allclose(ratio.lines[0].get_ydata(), values[:, 0] / values[:, 1])
    assert ratio.get_ylabel() == "λ₁ / λ2 of the Hessian"


def test_correlation_names_pearsons_r(measured: Path) -> None:
    run = raysim.load(measured)
    table = run.columns("measures/correlation")
    for axes, column in zip(draw("correlation", [run]).axes, ("samples", "degree", "product"), strict=True):
        np.testing.assert_allclose(
            np.asarray(axes.collections[0].get_offsets()), np.stack([table[column], table["weight"]], 1)
        )
        assert axes.get_title(loc="left") == f"r = {np.corrcoef(table[column], table['weight'])[0, 1]:.3f}"


def test_simplex_marks_the_best_mixture_and_that_by_samples(measured: Path) -> None:
    run = raysim.load(measured)
    table = run.columns("measures/simplex")
    last = table["round"] == 3
    best = {n: table[f"lambda_{n}"][last][np.argmin(table["loss"][last])] for n in (1, 2, 3)}
    axes = draw("simplex", [run]).axes[0]
    square, star = axes.lines[1:3]
    np.testing.assert_allclose(curve(star), [[best[2] + best[3] / 2, best[3] * np.sqrt(3) / 2]], atol=1e-9)
    sizes = run.shares.sizes["train"][[0, 1, 2]]
    p = sizes / sizes.sum()
    np.testing.assert_allclose(curve(square), [[p[1] + p[2] / 2, p[2] * np.sqrt(3) / 2]])
    assert [text.get_text() for text in axes.texts] == ["client 0", "client 1", "client 2"]
    dots = [c for c in draw("simplex:optima", [run]).axes[0].collections if isinstance(c, PathCollection)]
    assert len(np.asarray(dots[0].get_offsets())) == 2
    np.testing.assert_allclose(np.asarray(dots[0].get_array()), [1, 4])


def test_transport_has_both_matrices(measured: Path) -> None:
    run = raysim.load(measured)
    table = run.columns("measures/transport")
    panels = draw("transport", [run]).axes
    for axes, column in zip(panels, ("data_distance", "update_distance"), strict=False):
        matrix = np.ma.filled(axes.get_images()[0].get_array(), np.nan)
        np.testing.assert_allclose(matrix[table["client"], table["other"]], table[column])
        np.testing.assert_allclose(matrix, matrix.T)
    about = tables.read(measured, "measures/transport").num_rows
    assert about == 8 * 7 / 2
    assert panels[2].get_title(loc="left").startswith("rank correlation")


def test_trajectory_draws_the_way_over_the_surface(measured: Path) -> None:
    run = raysim.load(measured)
    table = run.columns("measures/trajectory")
    axes = draw("trajectory", [run]).axes[0]
    begin, end = axes.lines[-2:]
    for line, kind in ((begin, "start"), (end, "end")):
        there = table["kind"] == kind
        np.testing.assert_allclose(curve(line), np.stack([table["x"][there], table["y"][there]], 1))
    assert [text.get_text() for text in axes.texts] == ["1", "4"]
    assert axes.get_title(loc="left") == "training loss of client 2 (nats)"


def test_two_ways_have_their_runs_names_and_colours(measured: Path, tmp_path: Path) -> None:
    for name in ("FedAvg", "FedALA"):
        shutil.copytree(measured, tmp_path / name)
    taken = Trajectory(client=2, grid=4, beside=str(tmp_path / "FedAvg"))
    write("trajectory", taken, SavedRun(tmp_path / "FedALA"))
    figure = draw("trajectory", [raysim.load(tmp_path / "FedALA")])
    (legend,) = figure.legends
    names = ["FedALA, end", "FedALA, start", "FedAvg, end", "FedAvg, start"]
    assert sorted(text.get_text() for text in legend.get_texts()) == names
    begin, end, begin_beside, end_beside = (line for line in figure.axes[0].lines if line.get_marker() == "o")
    assert begin.get_color() == end.get_color() != begin_beside.get_color() == end_beside.get_color()
    np.testing.assert_allclose(curve(end), curve(end_beside))


@pytest.mark.parametrize(("side", "losses"), [(1, [1.0]), (2, [0.0] * 4), (2, [0.5] * 4), (2, [np.nan] * 4)])
def test_a_way_over_no_surface_is_not_drawn(side: int, losses: list[float], tmp_path: Path) -> None:
    y, x = np.indices((side, side)).reshape(2, -1)
    kinds = ["grid"] * len(losses)
    columns = {"kind": [*kinds, "start", "end"], "x": [*x, 0, 1], "y": [*y, 0, 1], "loss": [*losses, 0.1, 0.1]}
    run = by_hand(tmp_path / "run", {"coherence.mean": [0.1]})
    about = {"raysim.measure": json.dumps({"client": 0, "explained": [0.9, 0.1]})}
    table = pa.table({**columns, "round": [0] * (len(losses) + 2)}).replace_schema_metadata(about)
    tables.write_table(run.folder, "measures/trajectory", table)
    with pytest.raises(NoData, match=r"no surface.*`raysim measure trajectory`"):
        draw("trajectory", [run])


def test_mixtures_whose_loss_is_no_number_are_not_drawn(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "run", {"coherence.mean": [0.1]})
    corners = {f"lambda_{i + 1}": np.eye(3)[i] for i in range(3)}
    about = {"raysim.measure": json.dumps({"clients": [0, 1, 2], "p": [0.5, 0.25, 0.25]})}
    table = pa.table({"round": [0] * 3, **corners, "loss": [0.1, 0.2, np.nan]}).replace_schema_metadata(about)
    tables.write_table(run.folder, "measures/simplex", table)
    with pytest.raises(NoData, match="client's model has diverged"):
        draw("simplex", [run])


def test_what_was_not_measured_says_how_to(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "a", {"coherence.mean": [0.1]})
    for name in ("correlation", "histogram", "rescaling", "slice", "hessian", "simplex", "transport", "trajectory"):
        with pytest.raises(NoData, match=f"raysim measure {name}"):
            draw(name, [run])
    for name in (
        "heterogeneity",
        "similarity",
        "tau-r",
        "ratios",
        "lambda-coherence",
        "shrinking",
        "classes",
        "objective",
        *(f"balance:{v}" for v in BALANCES),
    ):
        with pytest.raises(NoData):
            draw(name, [run])
