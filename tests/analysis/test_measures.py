"""Measures of saved runs, each where the answer is known."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import OPTIONS, simulate, tiny
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import raysim
from raysim.analysis import MEASURES
from raysim.analysis.confusion import Personalization
from raysim.analysis.landscape import (
    Hessian,
    Histogram,
    Rescaling,
    Simplex,
    Slice,
    eigenpairs,
    top_eigenpairs,
    triangle,
)
from raysim.analysis.measure import MeasureError, write
from raysim.analysis.trajectory import Trajectory, plane
from raysim.analysis.transport import Transport, dataset_distance, principal, squared_wasserstein
from raysim.analysis.weights import Correlation, degrees, pearson
from raysim.cli.app import app
from raysim.core.score import Metric, correct
from raysim.core.task import Classification
from raysim.federation.saved import SavedRun
from raysim.registry import REGISTRY
from raysim.report import NoData
from raysim.report.page import write as write_page
from raysim.store import tables


def flat(folder: Path, t: int, name: str) -> torch.Tensor:
    """The parameters of a traced model, in the order of the state_dict."""
    state = load_file(folder / "traces" / f"round-{t + 1:04d}" / f"{name}.safetensors")
    return torch.cat([v.flatten() for k, v in state.items() if "running" not in k and "num_batches" not in k]).double()


# ---- algebra


def test_eigenvalues_of_a_quadratic() -> None:
    """Cross-entropy of two classes at the weights zero has the Hessian ½ [[1, −1], [−1, 1]] / 2 ⊗ XᵀX / n."""
    spectrum = np.array([5.0, 3.0, 2.0, 0.5])
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))
    x = torch.tensor(np.sqrt(4 * 2 * spectrum)[:, None] * rotation.T, dtype=torch.float32)  # ½ XᵀX / n has the spectrum
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    data = [(x[:3], torch.tensor([0, 1, 0])), (x[3:], torch.tensor([1]))]
    values, vectors = top_eigenpairs(model, Classification(), data, 3, 1e-6)
    np.testing.assert_allclose(values, spectrum[:3], rtol=1e-4)
    first = np.concatenate([rotation[:, 0], -rotation[:, 0]]) / np.sqrt(2)
    assert abs(vectors[0].numpy() @ first) == pytest.approx(1, abs=1e-4)


def test_the_plane_of_points_that_lie_in_one() -> None:
    rng = np.random.default_rng(0)
    axes, _ = np.linalg.qr(rng.standard_normal((50, 2)))  # two directions at right angles
    places = np.array([[4, 0], [-4, 0], [0, 1], [0, -1.0]])  # centred, and longest along the first
    models = torch.tensor(places @ axes.T + rng.standard_normal(50))
    found, origin, directions, share = plane(models)
    np.testing.assert_allclose(np.abs(found), np.abs(places), atol=1e-9)
    assert (found.max(0) == np.abs(found).max(0)).all()  # the farthest is on the right
    np.testing.assert_allclose(np.abs(directions.numpy() @ axes), np.eye(2), atol=1e-9)
    np.testing.assert_allclose(origin + torch.tensor(found) @ directions, models, atol=1e-9)
    np.testing.assert_allclose(share, [32 / 34, 2 / 34])


@pytest.mark.parametrize("shape", [(40, 7), (8, 60)])
def test_principal_coordinates_are_those_that_the_points_were_made_of(shape: tuple[int, int]) -> None:
    """Centred coordinates whose columns are orthogonal, in an orthonormal basis and away from the origin; fewer points
    than features, and more."""
    draw, (n, features) = np.random.RandomState(0), shape
    columns, _ = np.linalg.qr(np.column_stack([np.ones(n), draw.randn(n, 4)]))
    made = columns[:, 1:] * [9.0, 5.0, 2.0, 1.0]
    basis, _ = np.linalg.qr(draw.randn(features, 4))
    found = principal(made @ basis.T + draw.randn(features), 3)
    assert np.abs(found) == pytest.approx(np.abs(made[:, :3]))
    assert found.T @ found == pytest.approx(np.diag([81, 25, 4]), abs=1e-9)


def test_transport_between_clouds_of_known_cost() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 3)), np.arange(30) % 3
    shift = np.array([1.0, 2.0, 2.0])
    assert dataset_distance(x, y, x[::-1], y[::-1]) == pytest.approx(0, abs=1e-6)
    # Samples and the Gaussians of their classes move alike: the cost is twice ‖shift‖² = 9.
    assert dataset_distance(x, y, x + shift, y) == pytest.approx(np.sqrt(18))
    # Names of classes do not matter, what they hold does.
    assert dataset_distance(x, y, x, (y + 1) % 3) == pytest.approx(0, abs=1e-6)


def test_distance_of_gaussians() -> None:
    means, covariances = np.zeros((1, 2)), np.diag([4.0, 9.0])[None]
    others = np.array([[3.0, 4.0], [0.0, 0.0]]), np.stack([np.diag([1.0, 1.0]), np.zeros((2, 2))])
    # (2 − 1)² + (3 − 1)² where both are diagonal; a point is as far as the trace
    np.testing.assert_allclose(squared_wasserstein(means, covariances, *others), [[25 + 1 + 4, 13]])


def test_degrees_and_correlations() -> None:
    counts = np.array([[10, 0], [3, 3], [3, 1]])
    np.testing.assert_allclose(degrees(counts, 100), [4, 100, 16])  # 1 / ¼, no variance at all, 1 / ¼²
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert pearson(a, 5 - 2 * a) == pytest.approx(-1)
    assert pearson(a, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert np.isnan(pearson(a, np.ones(4)))


def test_the_triangle_has_every_mixture_once() -> None:
    points = np.array(list(triangle(50)))
    assert len(points) == 51 * 52 / 2 == len(np.unique(points, axis=0))
    assert points.min() == 0 and points.sum(1).max() == pytest.approx(1)


# ---- runs


def test_rescaling_and_histogram_of_the_final_model(measured: Path) -> None:
    """Against the model's own file and plain PyTorch."""
    run = SavedRun(measured)
    state = load_file(measured / "model.safetensors")
    trainable = {name for name, _ in run.flat.model.named_parameters()}
    rows = run.partition.server_test
    x, y = run.data.transform(torch.from_numpy(run.data.x[rows])), torch.from_numpy(run.data.y[rows])
    taken = Rescaling(points=3, low=0.5, high=1.5).take(run).columns
    model = run.flat.model.eval()
    for factor, loss, accuracy in zip(taken["factor"], taken["loss"], taken["accuracy"], strict=True):
        scaled = {name: factor * v if name in trainable else v for name, v in state.items()}
        with torch.no_grad():
            logits = torch.func.functional_call(model, scaled, (x,))
        assert loss == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
        assert accuracy == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    params = np.concatenate([state[name].flatten().numpy() for name in trainable])
    taken = Histogram(bins=4, limit=0.1, near=0.05).take(run).columns
    np.testing.assert_allclose(taken["low"], [-0.1, -0.05, 0, 0.05], atol=1e-12)
    inside = [((params >= a) & (params < a + 0.05)).mean() for a in taken["low"]]
    np.testing.assert_allclose(taken["share"], inside, atol=1e-3)
    assert taken["near_zero"][0] == pytest.approx((np.abs(params) < 0.05).mean())


def test_an_eigenvector_in_the_order_of_the_flat_model(measured: Path) -> None:
    """H v = λ v, with the product by torch's double differentiation; and the slice steps along v. (Second differences of
    the loss would be no check: its many kinks, ReLU's, bend it where the Hessian sees nothing.)"""
    run = SavedRun(measured)
    rows, value = run.rows("test", 100), run.model()
    (top,), directions = eigenpairs(run, value, rows, 1, 1e-5)
    padded = torch.cat([directions[0], torch.zeros(run.layers.B)])
    v = run.layers.unflatten(padded)
    run.load(value)
    x, y = run.samples(rows)
    named = dict(run.flat.model.named_parameters())
    slopes = torch.autograd.grad(F.cross_entropy(run.flat.model(x), y), list(named.values()), create_graph=True)
    along = torch.stack([(slope * v[name]).sum() for name, slope in zip(named, slopes, strict=True)]).sum()
    product = torch.autograd.grad(along, list(named.values()))
    for name, part in zip(named, product, strict=True):
        torch.testing.assert_close(part, float(top) * v[name], atol=1e-3 * float(top), rtol=1e-3)
    assert padded.norm() == pytest.approx(1, abs=1e-5)
    taken = Slice(points=3, reach=0.5, samples=100, tolerance=1e-5).take(run).columns
    score = run.score(rows)
    steps = sorted(score(value + step * padded)[0] for step in (-0.5, 0, 0.5))  # v and −v are both right
    np.testing.assert_allclose(sorted(taken["loss"]), steps, rtol=1e-4)
    assert taken["loss"][1] == pytest.approx(score(value)[0])


def test_curvature_of_a_model_with_frozen_parameters(tmp_path: Path) -> None:
    """Against the whole Hessian of what is trained, by torch.autograd.functional: what is frozen has no part in it."""

    @raysim.model(head="head")
    def part_frozen(inputs: raysim.Inputs) -> nn.Module:
        model = nn.Sequential()
        for name, layer in (("body", nn.Linear(4, 6)), ("bend", nn.Tanh()), ("head", nn.Linear(6, inputs.classes))):
            model.add_module(name, layer)
        model.body.weight.requires_grad_(False)
        return model

    try:
        data = {
            "name": {"synthetic": {"samples": 60, "test_samples": 30, "shape": [4], "classes": 3}},
            "partition": {"iid_equal": {"clients": 3}},
        }
        simulate(tiny(data=data, model={"name": "part_frozen"}, rounds={"total": 1}), tmp_path)
        run = SavedRun(tmp_path)
        rows, value = run.rows("test", 30), run.model()
        values, directions = eigenpairs(run, value, rows, 3, 0)
        taken = Slice(points=3, reach=0.5, tolerance=0).take(run).columns
        found = Hessian(top=3, tolerance=0).take(run).columns
        run.load(value)
        x, y = run.samples(rows)
        model = run.network
        assert run.layers.P == 6 + 3 * 6 + 3  # the bias of the body, and the head

        def loss(trained: torch.Tensor) -> torch.Tensor:
            views = run.layers.unflatten(trained)
            return F.cross_entropy(torch.func.functional_call(model, dict(views), (x,)), y)

        exact, basis = np.linalg.eigh(torch.autograd.functional.hessian(loss, value.clone()).double().numpy())
        np.testing.assert_allclose(values, exact[:-4:-1], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(found["eigenvalue"], exact[:-4:-1], rtol=1e-3, atol=1e-5)
        assert abs(directions[0].numpy() @ basis[:, -1]) == pytest.approx(1, abs=1e-3)
        along = torch.tensor(basis[:, -1], dtype=torch.float32)
        losses = sorted(float(loss(value + step * along)) for step in (-0.5, 0, 0.5))  # v and −v are both right
        np.testing.assert_allclose(sorted(taken["loss"]), losses, rtol=1e-3)
    finally:
        del REGISTRY.table("model")["part_frozen"]


def test_corners_of_the_simplex_are_the_clients(measured: Path) -> None:
    run = SavedRun(measured)
    taken = Simplex(rounds=(3,), clients=(1, 4, 6), step=0.5, samples=500).take(run)
    losses = {
        point: loss
        for *point_, loss in zip(*list(taken.columns.values())[1:], strict=True)
        for point in [tuple(point_)]
    }
    score = run.score(run.rows("test", 500))
    corners = {1: (1, 0, 0), 4: (0, 1, 0), 6: (0, 0, 1)}
    for client, corner in corners.items():
        assert losses[corner] == pytest.approx(score(run.read(2, f"client-{client:04d}"))[0], rel=1e-4)
    between = (run.read(2, "client-0001") + run.read(2, "client-0004")) / 2
    assert losses[0.5, 0.5, 0] == pytest.approx(score(between)[0], rel=1e-4)
    sizes = np.array([len(run.partition.train[c]) for c in corners])
    np.testing.assert_allclose(taken.facts["p"], sizes / sizes.sum())


def test_updates_are_compared_by_their_angle(measured: Path) -> None:
    taken = Transport(round=2, clients=(0, 3, 5), samples=10).take(SavedRun(measured)).columns
    updates = {c: flat(measured, 1, f"client-{c:04d}") - flat(measured, 1, "before") for c in (0, 3, 5)}
    for one, other, found in zip(taken["client"], taken["other"], taken["update_distance"], strict=True):
        assert found == pytest.approx(1 - float(F.cosine_similarity(updates[one], updates[other], dim=0)), abs=1e-6)


def test_what_goes_by_class_or_accuracy_is_not_taken_without(tmp_path: Path) -> None:
    data = {"name": "diabetes", "partition": {"iid_equal": {"clients": 3}}, "client_test_frac": 0.25}
    rounds = {"total": 1, "participation": 1.0}
    changes = {"data": data, "model": {"name": "mlp"}, "rounds": rounds, "evaluate": {"personal": "after_init"}}
    simulate(tiny(record={"traces": [1]}, **changes), tmp_path)
    run = SavedRun(tmp_path)
    for measure in (Transport(), Correlation()):
        with pytest.raises(MeasureError, match="its task is regression; the measure compares data class by class"):
            measure.take(run)
    with pytest.raises(MeasureError, match="its task is regression; it has no accuracy"):
        Personalization().take(run)


def test_personalization_is_of_accuracies_whatever_the_headline(tmp_path: Path) -> None:
    """A task that is judged by the share of samples whose class is among the two most likely."""

    def top2(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.topk(2, 1).indices == y[:, None]).any(1).double()

    @raysim.task("by_two")
    @dataclass(frozen=True)
    class ByTwo(Classification):
        metrics: tuple[Metric, ...] = (Metric.mean("top2", top2), Metric("accuracy", correct))

    try:
        data = {"task": "by_two", "client_test_frac": 0.25}
        rounds = {"total": 1, "participation": 1.0}
        simulate(tiny(data=data, rounds=rounds, evaluate={"personal": "after_init"}), tmp_path)
        run = SavedRun(tmp_path)
        taken = Personalization().take(run).columns
        run.load(run.model())
        for client, before in zip(taken["client"], taken["before"], strict=True):
            x, y = run.samples(run.test_rows(client), client)
            with torch.no_grad():
                assert before == pytest.approx(float((run.network(x).argmax(1) == y).double().mean()))
    finally:
        del REGISTRY.table("task")["by_two"]


def test_the_way_of_a_client(measured: Path) -> None:
    taken = Trajectory(client=2, grid=2, samples=1000).take(SavedRun(measured))
    kinds, x, y = (np.array(taken.columns[name]) for name in ("kind", "x", "y"))
    ends = [flat(measured, t, f"client-0002{end}") for t in range(4) for end in (".init", "")]
    found = np.stack([x, y], 1)[kinds != "grid"]
    # Distances in the plane are never longer than those between the models, and for the most distant nearly as long.
    apart = torch.cdist(torch.stack(ends), torch.stack(ends)).numpy()
    shown = np.linalg.norm(found[:, None] - found, axis=-1)
    assert (shown <= apart + 1e-5).all()
    assert shown.max() > 0.9 * apart.max()
    assert sum(taken.facts["explained"]) == pytest.approx(
        np.var(found, axis=0).sum() / np.var(ends, axis=0).sum(), rel=1e-4
    )
    run = SavedRun(measured)
    score = run.score(run.partition.train[2], 2)
    assert taken.columns["loss"][1] == pytest.approx(score(run.read(0, "client-0002"))[0], rel=1e-5)


def test_two_runs_in_one_plane(measured: Path, tmp_path: Path) -> None:
    """The principal plane of both runs' models; another model or other samples of the client have no place there."""
    run, plain, held_out = SavedRun(measured), tmp_path / "plain", {"client_test_frac": 0.25}
    both = {"total": 2, "participation": 1.0}
    simulate(tiny(rounds=both, data=held_out, record={"traces": "rounds"}), plain)
    taken = Trajectory(client=2, grid=2, beside=str(plain)).take(run).columns
    way, points = np.array(taken["way"]), np.stack([taken["x"], taken["y"]], 1)[np.array(taken["kind"]) != "grid"]
    assert np.bincount(way).tolist() == [2 * 4 + 2 * 2, 2 * 2]  # with the grid; starts and ends of 4 rounds, and of 2
    places = [(measured, t, end) for t in range(4) for end in (".init", "")] + [
        (plain, t, end) for t in range(2) for end in (".init", "")
    ]
    models = np.stack([flat(folder, t, f"client-0002{end}").numpy() for folder, t, end in places])
    u, s, _ = np.linalg.svd(models - models.mean(0), full_matrices=False)
    wanted = u[:, :2] * s[:2]
    wanted *= np.sign(np.take_along_axis(wanted, np.abs(wanted).argmax(0)[None], 0))  # as the plane is turned
    np.testing.assert_allclose(points, wanted, atol=1e-5 * s[0])
    rounds = {"total": 1}
    for name, changes, why in (
        ("other model", {"model": {"name": "mlp", "options": {"hidden": [4]}}}, "has another model"),
        ("other seed", {"seed": 4}, "client 2 has other samples"),
    ):
        simulate(tiny(rounds=rounds, data=held_out, **changes), tmp_path / name)
        with pytest.raises(MeasureError, match=why):
            Trajectory(client=2, beside=str(tmp_path / name)).take(run)


def test_weights_are_summed_over_the_rounds(measured: Path) -> None:
    taken = Correlation().take(SavedRun(measured)).columns
    rows = tables.read(measured, "clients").to_pylist()
    wanted = [sum(row["weight"] for row in rows if row["client"] == client) for client in taken["client"]]
    np.testing.assert_allclose(taken["weight"], wanted)
    assert list(taken["client"]) == list(range(8))


def test_every_measure_is_a_table_of_the_run(measured: Path) -> None:
    run = raysim.load(measured)
    assert set(OPTIONS) == set(MEASURES)
    for name, options in OPTIONS.items():
        assert f"measures/{name}" in run.tables
        table = run[f"measures/{name}"]
        assert table.num_rows
        about = json.loads(table.schema.metadata[b"raysim.measure"])
        assert {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}.items() <= about[
            "options"
        ].items()


def test_what_was_measured_of_a_run_is_not_shown_of_a_longer_one(tmp_path: Path) -> None:
    """But for measures of rounds that they name, whose models stay what they were."""
    rounds = {"total": 2, "participation": 1.0, "evaluate_every": 1}
    run = raysim.run(tiny(rounds=rounds, record={"traces": [1, 2]}), out=tmp_path / "run", progress=False)
    taken: dict[str, dict[str, Any]] = {"confusion": {}, "correlation": {}, "rescaling": {"points": 3}}
    taken |= {"trajectory": {"grid": 4}, "histogram": {"rounds": (1,)}}
    taken["transport"] = {"round": 1, "samples": 20, "components": 4}
    for name, options in taken.items():
        write(name, MEASURES[name](**options), SavedRun(run.folder))
    assert {*taken, "class-accuracy"} <= {name.partition(":")[0] for name in run.figures}
    longer = raysim.resume(run, rounds__total=3, progress=False)
    assert {*taken} & {name.partition(":")[0] for name in longer.figures} == {"histogram", "transport"}
    for name in ("confusion", "class-accuracy", "rescaling"):
        measure = name.replace("class-accuracy", "confusion")
        with pytest.raises(NoData, match=rf"`raysim measure {measure} .*run` was run after round 2, .* Run it again"):
            longer.figure(name)
    write_page([longer], tmp_path / "page.html")
    warning = "measured before the run went on to round 3 (confusion, correlation, rescaling, trajectory)."
    assert warning in (tmp_path / "page.html").read_text(encoding="utf-8")
    write("confusion", MEASURES["confusion"](), SavedRun(run.folder))
    assert "confusion" in raysim.load(run.folder).figures


def test_a_run_of_the_last_release_counts_its_traced_rounds_from_0(tmp_path: Path) -> None:
    """It is measured, and goes on, as one of this release."""
    run, old = tmp_path / "run", tmp_path / "old"
    simulate(tiny(rounds={"total": 2}, record={"traces": "rounds"}), run)
    shutil.copytree(run, old)
    (old / "traces").rename(old / "trace")
    for t in (0, 1):
        (old / "trace" / f"round-{t + 1:04d}").rename(old / "trace" / f"round-{t:04d}")
    settings = old / "config.yaml"
    settings.write_text(settings.read_text().replace("traces: rounds", "trace: [0, 1, 2]"))
    with pytest.warns(FutureWarning, match=r"write record.traces=\[1, 2, 3\] for \[0, 1, 2\]"):
        raysim.resume(old, rounds__total=3, progress=False)
    before, after = SavedRun(run), SavedRun(old)
    assert torch.equal(after.model(0), before.model(0)) and after.cohort(1) == before.cohort(1)
    assert after.traced == [0, 1, 2] and (old / "traces" / "round-0003").is_dir()


def test_the_final_model_is_of_the_round_that_was_the_last(tmp_path: Path) -> None:
    until = {"total": 9, "evaluate_every": 1, "until": {"seconds": 1e-6}}  # the first evaluation ends the run
    simulate(tiny(rounds=until), tmp_path / "run")
    assert [t for t, _ in SavedRun(tmp_path / "run").models(())] == [0]


# ---- on the command line


def test_measure_on_the_command_line(tmp_path: Path) -> None:
    simulate(tiny(), tmp_path / "run")

    def measure(*words: Any) -> Any:
        return CliRunner().invoke(app, ["measure", *map(str, words)])

    done = measure("rescaling", tmp_path / "run", "--set", "points=3")
    assert done.exit_code == 0 and "the loss is lowest at" in done.output
    assert raysim.load(tmp_path / "run")["measures/rescaling"].num_rows == 3
    for words, message in (
        (("rescalling", tmp_path), "there is no measure 'rescalling'. Did you mean 'rescaling'?"),
        (("rescaling", tmp_path, "--set", "point=3"), "measure.rescaling.point: unknown field"),
        (("rescaling", tmp_path, "--set", "points=many"), "measure.rescaling.points: must be a whole number"),
        (("rescaling", tmp_path, "--set", "samples=0"), "measure.rescaling.samples: must be a whole number > 0"),
        (("trajectory", tmp_path, "--set", "grid=1"), "measure.trajectory.grid: must be a whole number >= 2"),
        (("simplex", tmp_path, "--set", "step=0"), "measure.simplex.step: must be a number > 0"),
        (("trajectory", tmp_path), "no round's models were saved. record.traces"),
        (("histogram", tmp_path, "--set", "rounds=[1]"), "the models of round 1 were not saved (none were saved)"),
    ):
        failed = measure(*words)
        assert failed.exit_code and message in failed.output
    (tmp_path / "run" / "model.safetensors").unlink()
    assert "has no final model" in measure("histogram", tmp_path).output


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from raysim.analysis import measure

    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["measure", "hessian", str(tmp_path)])
    assert "the measure hessian needs curvlinops: pip install 'raysim[analysis]'" in done.output


def test_data_that_have_changed_are_refused(tmp_path: Path) -> None:
    simulate(tiny(rounds={"total": 1, "evaluate_every": 1}), tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("samples: 260", "samples: 280"))
    with pytest.raises(MeasureError, match="partitioned differently"):
        SavedRun(tmp_path)
