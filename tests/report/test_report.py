"""Figures and pages hold what the tables say: numbers written by hand, and a small federation's records."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from case import cases
from conftest import simulate, tiny
from matplotlib.axis import Axis, XAxis
from matplotlib.collections import FillBetweenPolyCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from typer.testing import CliRunner
from written import RESULT, by_hand

import raysim
from raysim.cli.app import app
from raysim.data import Dataset, Partition
from raysim.federation import Federation
from raysim.report import MissingExtra, NoData, ReportError, blocks, canvas, clients, costs, curves, groups, quantities
from raysim.report.canvas import COLUMN, PAGE
from raysim.report.figures import FIGURES, Comparison, available, draw, names
from raysim.report.folder import Shares
from raysim.report.groups import compare, differences
from raysim.report.page import write
from raysim.report.partition import partition_chart
from raysim.report.runs import Run, find
from raysim.report.significance import holm, paired
from raysim.report.summary import OverSeeds, summarise
from raysim.store import tables
from raysim.store.atomic import write_json
from raysim.store.documents import DamagedFile
from raysim.store.lock import take
from raysim.store.manifest import FAILED
from raysim.store.tables import Recorder, write_table

NONE = np.nan
PERSONAL = {"client_test_frac": 0.25}
STORED: dict[str, dict[str, Any]] = {
    "avg-3": {},
    "avg-4": {"seed": 4},
    "lws": {"server": ["fedlws"]},
    "ldf": {"weighting": [{"fedldf": {"top_n": 2}}]},
    "ala": {"client": ["fedala"], "data": PERSONAL, "evaluate": {"personal": "after_init"}},
    "fomo": {
        "client": ["fedfomo"], "data": PERSONAL | {"client_val_frac": 0.1},
        "evaluate": {"global": False, "personal": "after_init"},
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs of four rounds, of which every second is evaluated."""
    folder = tmp_path_factory.mktemp("stored")
    for name, changes in STORED.items():
        rounds = {"total": 4, "participation": 0.4, "evaluate_every": 2}
        simulate(tiny(name=name, rounds=rounds, **changes), folder / name)
    return folder


@pytest.fixture(scope="session")
def stored(folder: Path) -> dict[str, Run]:
    return {name: raysim.load(folder / name) for name in STORED}


# ----------------------------------------------------------------------------------------------------------- numbers


def test_scores_costs_and_their_deviation(tmp_path: Path) -> None:
    runs = [
        by_hand(tmp_path / "a", [0.2, None, 0.6, 0.8], seed=1),
        by_hand(tmp_path / "b", [0.4, None, 0.7, 0.6], seed=2),
        by_hand(tmp_path / "c", [None, None, 0.1, 0.3], seed=1, server=["fedlws"]),
    ]
    summary = summarise(compare(runs), target=0.65)
    first, plain, lws = summary.scores
    assert first == ("", "seed", "rounds", "final (%)", "best (%)")
    # sd of two numbers is their distance over √2: 20 / √2 = 14.14, 10 / √2 = 7.07
    assert plain == ("fedavg", "1, 2", "4", "70.00 ± 14.14", "75.00 ± 7.07")
    assert lws == ("fedavg + fedlws", "1", "4", "30.00", "30.00")
    first, plain, lws = summary.costs
    assert first[:5] == ("", "round to 65 %", "MB up to 65 %", "MB to 65 %", "s to 65 %")
    assert plain[1:5] == ("3.5 ± 0.7", "3.50 ± 0.71", "14.0 ± 2.8", "6.00 ± 2.83")  # round 4 and 3: 8 s and 4 s
    assert lws[1:5] == ("-", "-", "-", "-")
    assert plain[5:] == ("4.00 ± 0.00", "16.0 ± 0.0", "8.00 ± 0.00")
    assert summary.sentence == (
        "Of 2 configurations, fedavg ends highest, with a test accuracy of 70.00 ± 14.14 % (mean ± standard deviation "
        "over 2 seeds), and fedavg + fedlws lowest, with 30.00 %. Fewer than two seeds in common: the difference may be noise. "
        "Use --seeds 8,9,10."
    )
    assert summarise(compare(runs[:2]), target=0.55).costs[1][1] == "3.0 ± 0.0"  # the first time, not the last
    assert "(1 of 2)" in summarise(compare(runs[:2]), target=0.75).costs[1][1]


def test_the_default_target_is_one_that_every_run_reached(tmp_path: Path) -> None:
    runs = [by_hand(tmp_path / "a", [0.2, 0.81]), by_hand(tmp_path / "b", [0.4, 0.64], server=["fedlws"])]
    assert summarise(compare(runs)).target == 0.60  # 0.95 · 0.64 = 0.608
    assert summarise(compare([by_hand(tmp_path / "c", [None, None])])).target is None
    assert OverSeeds.of([]).show() == "-"


def test_personal_scores_are_never_held_against_global_ones(stored: dict[str, Run]) -> None:
    ala, fomo, avg = (stored[name] for name in ("ala", "fomo", "avg-3"))
    assert "personal test accuracy" in summarise(compare([ala, fomo])).sentence
    assert summarise(compare([ala, fomo])).scores[0][3] == "personal final (%)"
    mixed = summarise(compare([fomo, avg]))
    assert mixed.scores[1][3] == "-"
    assert mixed.sentence.startswith("fedavg has reached a test accuracy of")
    last = pc.filter(
        ala["rounds"]["personal_accuracy_worst10"], pc.is_valid(ala["rounds"]["personal_accuracy_worst10"])
    )
    table = summarise(compare([ala])).scores
    assert table[1][table[0].index("worst tenth (%)")] == f"{100 * last[-1].as_py():.2f}"


def test_a_mean_of_the_last_ten_needs_ten(tmp_path: Path) -> None:
    runs = [by_hand(tmp_path / f"{n}", [i / 20 for i in range(n)]) for n in (9, 10, 12)]
    of_nine, of_ten, of_twelve = (summarise(compare([run])).scores for run in runs)
    assert "mean of last 10 (%)" not in of_nine[0]
    # 0, 5, ..., 45 %; and 10, ..., 55 %
    assert [dict(zip(*table, strict=True))["mean of last 10 (%)"] for table in (of_ten, of_twelve)] == [
        "22.50",
        "32.50",
    ]


def test_the_headline_is_of_the_models_that_were_asked_for(tmp_path: Path) -> None:
    """FedALA's global model is the worse one, and its personal models are the better ones."""
    scores = {"avg": ({}, [0.8], [0.7]), "ala": ({"client": ["fedala"]}, [0.6], [0.9])}
    runs = [by_hand(tmp_path / name, a, personal=p, **changes) for name, (changes, a, p) in scores.items()]
    summary = summarise(compare(runs))
    assert summary.sentence.startswith(
        "Of 2 configurations, fedala ends highest, with a personal test accuracy of 90.00 %, and fedavg lowest"
    )
    assert summary.scores[0][3:6:2] == ("personal final (%)", "global final (%)")
    assert summary.scores[2][5] == "60.00"


def test_the_headline_says_whether_a_lead_is_more_than_chance(tmp_path: Path) -> None:
    from scipy.stats import ttest_rel  # it takes a second to import

    def ending(*methods: list[float]) -> str:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        changes = ({}, {"server": ["fedlws"]}, {"client": ["fedala"]})
        runs = [
            by_hand(place / f"{i}-{seed}", [score], seed, **changes[i])
            for i, scores in enumerate(methods)
            for seed, score in enumerate(scores)
        ]
        return summarise(compare(runs)).sentence.partition("%. ")[2]

    first, near, far = [0.80, 0.82, 0.81], [0.79, 0.825, 0.80], [0.50, 0.53, 0.51]
    close = paired(first, near)
    assert close == pytest.approx(ttest_rel(first, near).pvalue)
    assert ending(first, near) == (
        f"Its lead on fedavg + fedlws is no more than chance can make (paired t test over 3 seeds, p = {close:.2g})."
    )
    assert ending(first, far) == "It leads by more than chance (paired t test over 3 seeds, p < 0.001)."
    assert ending(first, near, far) == (
        "Its lead on fedavg + fedlws is no more than chance can make (paired t test over 3 seeds, Holm's correction, p = "
        f"{close:.2g})."
    )
    assert paired(first, first) == 1
    assert holm([0.01, 0.04, np.nan, 0.03]) == pytest.approx([0.03, 0.06, np.nan, 0.06], nan_ok=True)  # 3 p, 2 p, p


def test_who_lacks_a_seed_is_not_the_highest(tmp_path: Path) -> None:
    """Its other seed may have been the worse one: here the run has ended without a score."""
    stacks: list[dict[str, Any]] = [{}, {"server": ["fedlws"]}, {"client": ["fedala"]}]
    finals = [[0.5, 0.7], [0.4, 0.4], [0.9, None]]
    runs = [
        by_hand(tmp_path / f"{i}-{seed}", [score], seed, **stacks[i])
        for i, scores in enumerate(finals)
        for seed, score in enumerate(scores)
    ]
    some = (
        "Of 2 configurations with a score for every seed, fedavg ends highest, with a test accuracy of 60.00 ± 14.14 %"
    )
    assert summarise(compare(runs)).sentence.startswith(some)
    alone = "Only fedavg has a test accuracy for every seed, 60.00 ± 14.14 % (mean ± standard deviation over 2 seeds)."
    assert summarise(compare(runs[:2] + runs[4:])).sentence == alone


def test_a_run_that_failed_counts_as_missing(tmp_path: Path) -> None:
    """What it had scored and sent until then is not what its configuration comes to: here it is the best, for the least."""

    def failed(name: str, **changes: Any) -> Run:
        run = by_hand(tmp_path / name, [0.9], 2, finished=False, **changes)
        (run.folder / FAILED).write_text("The loss is NaN.")
        return run

    bad: dict[str, Any] = {"server": ["fedlws"]}
    runs = [by_hand(tmp_path / f"good{seed}", [0.3, 0.5], seed, personal=[0.3, 0.5]) for seed in range(3)]
    runs += [
        by_hand(tmp_path / f"bad{seed}", [0.7, s], seed, personal=[0.7, s], **bad) for seed, s in ((0, 0.6), (1, 0.8))
    ]
    runs.append(failed("bad2", **bad))
    summary = summarise(compare(runs))
    assert summary.scores[0][1:5] == ("seed", "rounds", "personal final (%)", "personal best (%)")
    assert summary.scores[2][1:5] == ("0, 1, 2", "1–2 of 3", "70.00 ± 14.14 (2 of 3)", "75.00 ± 7.07 (2 of 3)")
    assert all(cell.endswith(" (2 of 3)") for cell in summary.costs[2][1:])
    assert all(column.places()[1] == 0 for column in summary.paper_table.columns)
    assert summary.target == 0.47  # 0.95 · 0.5 = 0.475
    assert summary.sentence.startswith("Only fedavg has a personal test accuracy for every seed, 50.00 ± 0.00 %")
    assert summary.sentence.endswith(" Of 6 runs, 1 failed: a failed run has no numbers here.")
    (axes,) = draw("personal:rounds", runs).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 2]  # and not cut off where one failed
    lone = summarise(compare([failed("lone")]))
    assert (lone.sentence, lone.scores[1][3]) == ("The run failed: a failed run has no numbers here.", "-")


def test_nothing_is_highest_or_lowest_where_all_end_alike(tmp_path: Path) -> None:
    a, b, c = [{}, {"server": ["fedlws"]}, {"client": ["fedala"]}]
    runs = [
        by_hand(tmp_path / str(i), [score], **of) for i, (score, of) in enumerate([(0.25, a), (0.25, b), (0.75, c)])
    ]
    assert summarise(compare(runs[:2])).sentence == "The 2 configurations end alike, with a test accuracy of 25.00 %."
    some = "fedala ends highest, with a test accuracy of 75.00 %, and fedavg + fedlws lowest, with 25.00 %."
    assert some in summarise(compare(runs)).sentence


def test_a_method_has_its_colour_whatever_it_is_compared_with(tmp_path: Path) -> None:
    runs = [by_hand(tmp_path / case.method, [0.5], **case.changes) for case in cases().values()]
    alone = [canvas.colour(compare([run])[0].number) for run in runs]
    assert [canvas.colour(group.number) for group in compare(runs)] == alone
    assert {*alone} == {*canvas.COLOURS} and canvas.colour(0) == canvas.COLOURS[0]
    for pair in itertools.combinations(runs, 2):
        one, two = (group.number for group in compare(pair))
        assert (canvas.colour(one), canvas.dash(one)) != (canvas.colour(two), canvas.dash(two))
        assert (canvas.colour(one), canvas.mark(one)) != (canvas.colour(two), canvas.mark(two))


def test_where_methods_are_compared_dashes_tell_settings_apart_and_else_colours(tmp_path: Path) -> None:
    def plain(lr: float, server: Sequence[str] = ()) -> Run:
        return by_hand(tmp_path / f"{lr}-{len(server)}", [0.5], local={"lr": lr}, server=list(server))

    many = [plain(0.1 + i) for i in range(36)]
    held = [group.number for group in compare(many)]
    assert len({canvas.colour(group.number) for group in compare(many[:9])}) == 9
    assert len({(canvas.colour(n), canvas.dash(n)) for n in held}) == 36
    assert held == [group.number for group in compare(many[::-1])][::-1]
    shrunk = plain(0.1, ["fedlws"])
    both = [group.number for group in compare([*many[:4], shrunk])]
    assert [canvas.hue(n) for n in both[:4]] == [0] * 4
    assert len({canvas.dash(n) for n in both[:4]}) == 4
    assert both[4] == compare([shrunk])[0].number


def test_runs_are_grouped_by_all_but_the_seed_and_labelled_by_what_differs(tmp_path: Path) -> None:
    def labels(*changes: dict[str, Any]) -> list[str]:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        return [g.label for g in compare([by_hand(place / str(i), [0.5], **c) for i, c in enumerate(changes)])]

    lws = [{"server": [{"fedlws": {"beta": beta}}]} for beta in (0.1, 0.2)]
    assert labels({}, {"seed": 4}, {"name": "other", "record": {"dir": "x"}}) == ["fedavg"]
    assert labels(*lws) == ["beta 0.1", "beta 0.2"]
    assert labels({}, *lws) == ["fedavg", "fedavg + fedlws, beta 0.1", "fedavg + fedlws, beta 0.2"]
    assert labels({"local": {"lr": 0.1}}, {"local": {"lr": 0.2}}) == ["lr 0.1", "lr 0.2"]
    two = [{"data": {"partition": {"dirichlet_counts": {"alpha": a, "clients": 8}}}} for a in (0.1, 1.0)]
    iid = {"data": {"partition": {"iid_equal": {"clients": 8}}}}
    partitions = [
        f"partition {words}" for words in ("dirichlet_counts, alpha 0.1", "dirichlet_counts, alpha 1.0", "iid_equal")
    ]
    assert labels(*two, iid) == partitions


def test_an_option_that_one_run_has_tells_it_apart_and_a_setting_that_an_older_one_lacks_does_not(
    tmp_path: Path,
) -> None:
    models = [{"name": "mlp", "options": options} for options in ({}, *[{"hidden": [32]}] * 2)] + [
        {"name": "small_cnn"}
    ]
    plain, hidden, biased, cnn = (by_hand(tmp_path / str(i), [0.5], model=model) for i, model in enumerate(models))
    biased.settings["model.options.bias"] = False
    del plain.settings["local.nesterov"]
    assert differences([plain, hidden]) == ["model.options.hidden"]
    assert [group.label for group in compare([plain, hidden])] == ["hidden -", "hidden [32]"]
    three = ["hidden -, bias -", "hidden [32]", "hidden [32], bias false"]
    assert [group.label for group in compare([plain, hidden, biased])] == three
    assert [group.label for group in compare([hidden, cnn])] == [
        "name mlp",
        "name small_cnn",
    ]  # which takes no such option
    for run in (plain, hidden):
        run.settings["data.name.torchvision.name"] = "SVHN"
    hidden.settings["data.name.torchvision.options.split"] = "extra"
    assert "data.name.torchvision.options.split" in differences([plain, hidden])


def test_a_page_looks_once_for_what_tells_its_configurations_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def counted(runs: Sequence[Run]) -> list[str]:
        looked.append(len(runs))
        return differences(runs)

    monkeypatch.setattr(groups, "differences", counted)
    settings = [{"local": {"lr": lr}, "server": server} for server in ([], ["fedlws"]) for lr in (0.1, 0.2, 0.3, 0.4)]
    runs = [by_hand(tmp_path / str(i), [0.5], **changes) for i, changes in enumerate(settings)]
    write(runs, tmp_path / "page.html")
    assert looked == [4, 4]  # each run among those of its methods, and for no figure again


# ----------------------------------------------------------------------------------------------------------- figures


def test_curves_show_mean_and_band_against_every_cost(tmp_path: Path) -> None:
    runs = [
        by_hand(tmp_path / "a", [0.2, None, 0.6, 0.8], seed=1),
        by_hand(tmp_path / "b", [0.4, None, 0.7], seed=2, finished=False),  # its fourth round is still to come
        by_hand(tmp_path / "c", [None, 0.5], seed=1, server=["fedlws"]),
    ]
    spent = {"rounds": ("round", [1, 3], [2]), "uplink": ("sent by clients (MB)", [1, 3], [2])}
    spent |= {"traffic": ("sent up and down (MB)", [4, 12], [8]), "time": ("time (s)", [1, 4], [2])}
    for against, (label, x, other) in spent.items():
        (axes,) = draw(f"accuracy:{against}", runs).axes
        assert (axes.get_xlabel(), axes.get_ylabel()) == (label, "test accuracy (%)")
        assert axes.get_xscale() == ("log" if "MB" in label else "linear")
        mean, single = axes.lines
        np.testing.assert_allclose(mean.get_xydata(), np.transpose([x, [30, 65]]))
        np.testing.assert_allclose(single.get_xydata(), [[other[0], 50]])
        (band,) = axes.collections
        assert isinstance(band, FillBetweenPolyCollection)
        corners = {tuple(corner) for corner in np.round(band.get_paths()[0].vertices, 6)}
        wanted = [(x[0], 30 - 200**0.5), (x[0], 30 + 200**0.5), (x[1], 65 - 50**0.5), (x[1], 65 + 50**0.5)]
        assert {tuple(corner) for corner in np.round(wanted, 6)} <= corners
        legend = axes.figure.legends[0]
        assert [text.get_text() for text in legend.get_texts()] == ["fedavg", "fedavg + fedlws", "± 1 std over seeds"]
    with pytest.raises(NoData, match="test loss"):
        draw("loss", runs)


def with_metric(folder: Path, values: Sequence[float | None]) -> Run:
    """A run whose task has the further metric `mean_error`."""
    run = by_hand(folder, [0.5] * len(values))
    with Recorder(run.folder) as recorder:
        for t, value in enumerate(values):
            recorder.add(
                "rounds", round=t, clients_ok=3, clients_failed=0, bytes_up=1, bytes_down=1, seconds=1.0, wall=1.0 + t,
                **{"metric.mean_error": value},
            )  # fmt: skip
    return Run(run.folder)


def test_a_metric_of_the_task_has_a_curve(tmp_path: Path) -> None:
    run = with_metric(tmp_path / "a", [4.0, None, 2.0])
    assert "metric:mean_error" in run.figures
    (axes,) = draw("metric:mean_error", [run, by_hand(tmp_path / "b", [0.5], server=["fedlws"])]).axes
    (line,) = axes.lines
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "mean error")
    np.testing.assert_allclose(line.get_xydata(), [[1, 4], [3, 2]])


def test_a_model_that_is_none_any_longer_has_no_final_score(tmp_path: Path) -> None:
    (columns, row) = summarise(compare([with_metric(tmp_path / "a", [4.0, 2.0, math.nan])])).scores
    assert row[columns.index("final mean error")] == "-"


def test_a_score_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    (columns, row) = (found := summarise(compare([by_hand(tmp_path / "a", [0.5, math.nan])]))).scores
    assert (found.target, row[columns.index("best (%)")]) == (0.47, "50.00")


def test_a_seed_that_was_played_twice_counts_once(tmp_path: Path) -> None:
    seeds = (1, 1, 2)
    runs = [by_hand(tmp_path / str(i), [0.5 if seed == 1 else 0.7], seed=seed) for i, seed in enumerate(seeds)]
    found = summarise(compare(runs))
    assert found.scores[1][3] == "60.00 ± 14.14"  # sd of 50 and 70
    assert "over 2 seeds" in found.sentence


def test_final_scores_show_every_seed(tmp_path: Path) -> None:
    runs = [by_hand(tmp_path / "a", [0.5], seed=1), by_hand(tmp_path / "b", [0.7], seed=2)]
    (axes,) = draw("scores", runs).axes
    seeds, mean = axes.lines[0], axes.lines[1]
    assert sorted(seeds.get_xdata()) == [50, 70]
    assert list(mean.get_xdata()) == [60]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fedavg"]


def test_of_the_pareto_front_none_is_beaten_in_both(tmp_path: Path) -> None:
    accuracy = {"a": 0.5, "b": 0.7, "c": 0.6}  # for 1, 2 and 3 MB up
    changes = ({}, {"server": ["fedlws"]}, {"client": ["fedala"]})
    runs = [
        by_hand(tmp_path / name, [*[None] * i, score], **changes[i]) for i, (name, score) in enumerate(accuracy.items())
    ]
    (axes,) = draw("pareto", runs).axes
    *means, line = axes.lines
    assert [tuple(one.get_xydata()[0]) for one in means if len(one.get_xdata())] == [(1, 50), (2, 70), (3, 60)]
    np.testing.assert_allclose(line.get_xydata(), [[1, 50], [2, 70]])
    assert curves.front(np.array([2, 1, 1, 3]), np.array([5, 5, 4, 6])) == [1, 3]


def test_very_many_clients_are_shown_by_blocks() -> None:
    clients = 10_000
    values = np.arange(clients, dtype=float)
    ends = blocks.edges(clients)
    assert len(ends) - 1 == blocks.BLOCKS
    np.testing.assert_allclose(blocks.means(values), [values[a:b].mean() for a, b in itertools.pairwise(ends)])
    assert blocks.names(np.arange(clients) + 5)[:2] == ["5–29", "30–54"]
    np.testing.assert_array_equal(blocks.means(values[:2000]), values[:2000])
    found = blocks.cells((np.array([0, 0, 1]), np.array([1, 1, 0])), np.array([1.0, 3.0, 5.0]), (2, 2))
    np.testing.assert_array_equal(found, [[NONE, 2], [5, NONE]])


def test_a_page_of_a_hundred_thousand_clients_is_as_small(tmp_path: Path) -> None:
    n, rounds, rng = 100_000, 20, np.random.default_rng(0)
    run = by_hand(tmp_path / "many", [0.5] * rounds)
    client = np.arange(n).repeat(2)
    header = {"clients": n, "classes": list("abcdefghij"), "data": "many"}
    table = pa.table({"client": client, "split": ["train", "test"] * n, "label": rng.integers(0, 10, 2 * n)})
    write_table(run.folder, "partition", table.replace_schema_metadata({"raysim.partition": json.dumps(header)}))
    with Recorder(run.folder) as recorder:
        for t in range(rounds):
            drawn = rng.permutation(n)[:1000]
            recorder.add(
                "rounds", round=t, clients_ok=1000, clients_failed=0, bytes_up=1, bytes_down=1, seconds=1.0, wall=t
            )
            recorder.add("clients", round=t, client=drawn, samples=1, weight=rng.random(1000), status="ok")
            recorder.add("notes", round=t, method="similarity", name="client", client=drawn, value=rng.random(1000))
        recorder.add("personal", round=rounds - 1, client=np.arange(n), correct=rng.integers(0, 2, n), samples=1)
    write([Run(run.folder)], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    names = {"partition", "sizes", "clients", "lambda", "lambda-size", "similarity"}
    assert names <= set(re.findall("raysim plot ([\\w-]+)", text))


def test_figures_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysim.report.page.ROOM", 5000)
    write([by_hand(tmp_path / "a", [0.5, 0.6])], tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Left out, so that the page stays small: <code>raysim plot seconds</code>." in text


def test_bubbles_are_the_partition(folder: Path, stored: dict[str, Run]) -> None:
    federation = Federation(
        tiny(rounds={"total": 4, "participation": 0.4, "evaluate_every": 2}), folder / "avg-3", resume=True
    )
    counts = federation.partition.label_counts(federation.data)  # [N, C]
    federation.close()
    figure = draw("partition", [stored["avg-3"]])
    (axes,) = figure.axes
    (bubbles,) = axes.collections
    assert isinstance(bubbles, PathCollection)
    drawn = np.zeros_like(counts, dtype=float)
    client, label = np.asarray(bubbles.get_offsets()).astype(int).T
    drawn[client, label] = bubbles.get_sizes()
    np.testing.assert_allclose(drawn / drawn.max(), counts / counts.max())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("client", "class")
    counts = np.random.default_rng(0).integers(0, 5, (300, 4))
    (image,) = partition_chart(counts, list("abcd"), "toy").axes[0].get_images()  # of many clients a map
    np.testing.assert_array_equal(np.ma.filled(image.get_array(), 0), counts.T[::-1])
    counts = federation.partition.label_counts(federation.data)
    sizes = draw("sizes", [stored["avg-3"]]).axes[0].patches[0].get_data()
    np.testing.assert_array_equal(sizes.values, sorted(counts.sum(1), reverse=True))


def test_shares_are_by_the_label_that_a_holder_sees() -> None:
    data = Dataset("toy", np.zeros((5, 2), np.float32), np.array([0, 1, 1, 0, 1]), 5, ("no", "yes"))
    rows = [np.array(one) for one in ([0, 1, 2], [3])]
    none = (np.empty(0, np.int64),) * 2
    for label_map, counts in ((None, [[1, 2], [1, 0]]), (np.array([[0, 1], [1, 0]]), [[1, 2], [0, 1]])):
        partition = Partition((rows[0], rows[1]), none, none, np.array([4]), none[0], label_map)
        shares = Shares.of(partition.to_table(data))
        np.testing.assert_array_equal(shares.counts, counts)
        assert (shares.data, shares.classes, shares.sizes["train"].tolist()) == ("toy", ("no", "yes"), [3, 1])
    with pytest.raises(NoData, match="without labels"):
        clients.partition(SimpleNamespace(shares=Shares.of(partition.to_table())))  # type: ignore[arg-type]


def test_weights_by_client_and_by_size(stored: dict[str, Run], tmp_path: Path) -> None:
    run = stored["avg-3"]
    table, sizes = run.columns("clients"), run.shares.sizes["train"]
    (image,) = draw("lambda", [run]).axes[0].get_images()
    shown = np.ma.filled(image.get_array(), np.nan)
    order = np.argsort(-sizes, kind="stable")
    wanted = np.full((8, 4), np.nan)
    for t, client, weight in zip(table["round"], table["client"], table["weight"], strict=True):
        wanted[list(order).index(client), t] = 100 * weight
    np.testing.assert_allclose(shown, wanted)
    assert np.isnan(shown).sum() == 8 * 4 - 3 * 4  # three of eight clients a round

    (dots,) = draw("lambda-size", [run]).axes[0].collections
    x, y = np.asarray(dots.get_offsets()).T
    np.testing.assert_allclose(x, y)  # FedAvg weighs by size
    odd = by_hand(tmp_path / "odd", [0.5])
    with Recorder(odd.folder, 1) as recorder:
        recorder.add("clients", round=0, client=[0, 1], samples=[30, 10], weight=[0.5, 0.5], status="ok")
    (dots,) = draw("lambda-size", [odd]).axes[0].collections
    np.testing.assert_allclose(np.asarray(dots.get_offsets()), [[75, 50], [25, 50]])


def test_layers_are_maps_of_what_was_recorded(stored: dict[str, Run]) -> None:
    run = stored["lws"]
    table = run.columns("layers")
    axes, bar = draw("layers:fedlws.gamma", [run]).axes
    image = axes.get_images()[0].get_array()
    wanted = table["fedlws.gamma"].reshape(4, -1).T  # [L, T]
    np.testing.assert_allclose(image, wanted)
    assert tuple(axes.get_images()[0].get_extent()) == (0.5, 4.5, len(wanted) - 0.5, -0.5)  # rounds count from 1
    assert [label.get_text() for label in axes.get_yticklabels()] == table["name"][: len(wanted)].tolist()
    assert (axes.get_title(loc="left"), axes.get_xlabel()) == ("fedlws: shrink factor γ", "round")
    assert bar.get_ylim() == pytest.approx((wanted.min(), wanted.max()))
    (line,) = draw("notes:fedlws.model_gamma", [run]).axes[0].lines
    notes = run.columns("notes")
    np.testing.assert_array_equal(line.get_ydata(), notes["value"][notes["name"] == "model_gamma"])
    assert next(name for name in available([run]) if name.startswith("layers:")).startswith("layers:fedlws.")


def test_all_that_is_reported_has_words_and_places() -> None:
    """Of every note in the source, so that no figure has a bare name on its axis."""
    root = Path(raysim.__file__).parent
    sources = "".join(path.read_text() for part in ("methods", "analysis") for path in (root / part).glob("*.py"))
    found = re.findall(r'\.note\((?:server, )?(?:(?:self|FedADP\(\)), )?"(\w+)", [^\n]*', sources)
    assert len(found) > 25
    known = {name.rpartition(".")[2] for name in quantities.WORDS}
    assert {*found} <= known
    further = re.findall(r'"(\w+)", [^"\n]*(?:"client", )?"(?:peer|epoch|position|class)"', sources)
    assert len(further) >= 7
    assert {*further} <= {*quantities.PLACES}
    assert quantities.words("fedlws.model_gamma") == "fedlws: shrink factor γ of the model"
    assert quantities.words("fedlws.norm") != quantities.words("norm")
    assert quantities.words("mine.some_thing") == "mine: some thing"


def test_maps_of_both_signs_are_as_dark_as_far_from_zero() -> None:
    figure = canvas.Canvas(COLUMN, 2)
    canvas.heat_map(figure.add_subplot(), np.array([[-1.0, 3.0], [np.nan, 0.0]]), "x")
    (image,) = figure.axes[0].get_images()
    assert (image.norm.vmin, image.norm.vmax) == (-3, 3)
    figure = canvas.Canvas(COLUMN, 2)
    canvas.heat_map(figure.add_subplot(), np.array([[1.0, 3.0]]), "x")
    assert figure.axes[0].get_images()[0].norm.vmin == 1


def test_uploads_by_round_and_by_client(stored: dict[str, Run]) -> None:
    run = stored["ldf"]
    left, right = (axes.get_images()[0].get_array() for axes in draw("layers:fedldf.uploads", [run]).axes[:2])
    np.testing.assert_allclose(left, 100 * 2 / 3)  # two of three clients send each layer
    notes = run.columns("notes")
    names = run.columns("layers")["name"][: len(left)].tolist()
    for row, client in itertools.product(range(len(left)), sorted(set(notes["client"].astype(int)))):
        mine = (notes["name"] == "uploads") & (notes["layer"] == names[row]) & (notes["client"] == client)
        column = sorted(set(notes["client"].astype(int))).index(client)
        assert right[row, column] == pytest.approx(100 * notes["value"][mine].mean())
    assert len(np.unique(right)) > 1


def test_client_accuracy_is_a_distribution_with_its_worst_tenth(stored: dict[str, Run]) -> None:
    run = stored["ala"]
    table = run.columns("personal")
    last = table["round"] == 3
    share = np.sort(100 * table["correct"][last] / table["samples"][last])
    axes = draw("clients", [run]).axes[0]
    step, worst = axes.lines
    x, y = np.asarray(step.get_xydata()).T
    for value in share:
        assert y[x <= value].max() == pytest.approx(100 * (share <= value).mean())
    assert worst.get_xdata()[0] == pytest.approx(share[0])  # a tenth of eight clients is one
    with pytest.raises(NoData, match=r"evaluate\.personal"):
        draw("clients", [stored["avg-3"]])


def test_bytes_and_seconds_are_those_of_the_tables(stored: dict[str, Run]) -> None:
    run = stored["ldf"]
    sent = run.columns("traffic")
    axes = draw("traffic", [run]).axes[0]
    ends = {round(bar.get_y() + bar.get_height() / 2, 1): 0.0 for bar in axes.patches}
    for bar in axes.patches:
        ends[round(bar.get_y() + bar.get_height() / 2, 1)] += bar.get_width()
    up, down = (sum(v.sum() for k, v in sent.items() if k.startswith(way)) for way in ("up_", "down_"))
    assert list(ends.values()) == pytest.approx([up / 1e6, down / 1e6], rel=5 * costs.VISIBLE)
    assert up < down  # FedLDF sends a part of the layers back

    rounds = run.columns("rounds")
    axes = draw("seconds", [run]).axes[0]
    unit = {"time of a round (ms)": 1000, "time of a round (s)": 1}[axes.get_xlabel()]
    assert axes.patches[0].get_width() == pytest.approx(unit * rounds["seconds_train"].mean())
    whole = pytest.approx(unit * rounds["seconds"].mean(), rel=costs.VISIBLE)
    assert sum(bar.get_width() for bar in axes.patches) == whole


def test_all_bytes_that_are_counted_are_drawn(tmp_path: Path) -> None:
    kinds = [field for field in tables.TABLES["traffic"] if field.name.startswith(("up_", "down_"))]
    sent = {field.name: [10**6, None if field.nullable else 10**6] for field in kinds}  # an older row lacks some
    run = by_hand(tmp_path / "a", [0.5])
    with Recorder(run.folder, 1) as recorder:
        recorder.add("traffic", round=0, client=[0, 1], bytes=0, **sent)
    bars = draw("traffic", [Run(run.folder)]).axes[0].patches
    assert sum(bar.get_width() for bar in bars) == 2 * (5 * 2 + 2)  # MB, both ways


def test_models_per_client_are_of_those_that_took_part(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "a", [0.5])
    sent = {
        f"{way}_{kind}": 0 for way in ("up", "down") for kind in ("params", "buffers", "vectors", "scalars", "masks")
    }
    sent |= {"up_params": [400, 0, 0], "down_params": 400}
    with Recorder(run.folder, 1) as recorder:
        recorder.add("layers", round=0, layer=0, name="all", parameters=100, norm=1.0, update_norm=1.0)
        recorder.add("clients", round=0, client=[0, 1, 2], status=["ok", "asked", "late"])
        recorder.add("traffic", round=0, client=[0, 1, 2], bytes=0, **sent)
    bars = draw("parameters", [Run(run.folder)]).axes[0].patches
    assert [bar.get_width() for bar in bars] == [1, 1]  # up and down: 400 bytes are a model of 100 floats


def test_legends_name_what_is_drawn_and_nothing_else(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "a", [0.5, 0.6])  # trains for 0.5 s of each round, which last 1 s
    assert draw("scores", [run]).legends == []
    assert draw("scores", [run, by_hand(tmp_path / "b", [0.5, 0.7], seed=4)]).legends
    with Recorder(run.folder, 2) as recorder:
        spans = {"start": [0.0, 0.6], "stop": [0.5, 0.6005]}
        recorder.add("timeline", round=1, host=[0, 0], node="n", phase=["train", "reduce"], **spans)
    for name, shown in {
        "seconds": ["train", "other"], "timeline": ["train", "end of a round"], "utilisation": ["train", "wait"],
    }.items():  # fmt: skip
        assert [text.get_text() for text in draw(name, [Run(run.folder)]).legends[0].get_texts()] == shown


def test_timeline_and_utilisation(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "a", [0.5, 0.6])  # round 0 lasts 1 s, round 1 from 1 s to 2 s
    with Recorder(run.folder, 2) as recorder:
        recorder.add("timeline", round=0, host=[0, 1], node="n", phase="train", start=0.0, stop=[1.0, 0.5])
        recorder.add("timeline", round=1, host=[0, 1], node="n", phase=["train", "reduce"], start=1.0, stop=[1.5, 1.25])
    run = Run(run.folder)
    spans = {
        (round(box.x0, 6), round(box.x1, 6), round(box.y0 + 0.4, 6))
        for collection in draw("timeline", [run]).axes[0].collections
        for box in (path.get_extents() for path in collection.get_paths())
    }
    assert spans == {(0, 1, 0), (0, 0.5, 1), (1, 1.5, 0), (1, 1.25, 1)}
    axes = draw("utilisation", [run]).axes[0]
    train, reduce, wait = (patch.get_data() for patch in axes.patches)
    np.testing.assert_allclose(train.values, [75, 25])
    np.testing.assert_allclose(reduce.values - reduce.baseline, [0, 12.5])
    np.testing.assert_allclose(wait.values - wait.baseline, [25, 62.5])
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["train", "reduce", "wait"]


CLOCK: dict[str, Any] = {"speed": {"lognormal": {"median": 9, "sigma": 1}}, "up": 2000, "down": 4000, "latency": 1}


def boxes(axes: Any) -> dict[str, list[tuple[float, float, int]]]:
    """Of each colour in the legend: from when to when, and in which row."""
    [legend] = axes.figure.legends
    names = {
        patch.get_facecolor(): text.get_text()
        for patch, text in zip(legend.get_patches(), legend.get_texts(), strict=False)
    }
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names.values()}
    for collection in axes.collections:
        for box in (path.get_extents() for path in collection.get_paths()):
            found[names[tuple(collection.get_facecolor()[0])]].append((box.x0, box.x1, round((box.y0 + box.y1) / 2)))
    return {name: sorted(spans) for name, spans in found.items()}


def test_what_clients_do_in_simulated_time(tmp_path: Path) -> None:
    """The parts of a client follow one another, from the start of its round until its end; then it waits, or it is marked."""
    clock = CLOCK | {
        "over_select": 0.7,
        "availability": {"markov": {"available": 40, "away": 20}},
        "interrupt": "ignore",
    }
    config = tiny(clock=clock, rounds={"total": 5, "participation": 0.5})
    run = Run(simulate(config, tmp_path).folder)
    axes = draw("sim-timeline", [run]).axes[0]
    assert axes.get_xlabel() == "simulated time since the run's start (s), rounds 1 to 5"
    found = {name: np.array(spans) for name, spans in boxes(axes).items()}
    rows, rounds = run.columns("clients"), run.columns("rounds")
    begins = (rounds["sim_clock"] - rounds["sim_seconds"])[rows["round"]]
    np.testing.assert_allclose(rows["sim_start"], begins)
    used = rows["status"] == "ok"
    clients = np.unique(rows["client"]).tolist()
    at, ends = begins, rounds["sim_clock"][rows["round"]]
    assert (at + rows["sim_down"] + rows["sim_train"] + rows["sim_up"] > ends + 1)[~used].any()  # after the end
    for name, column in (("download", "sim_down"), ("training", "sim_train"), ("upload", "sim_up")):
        until = at + rows[column]
        spans = zip(at, np.minimum(until, ends), rows["client"], strict=True)
        np.testing.assert_allclose(
            found[name], sorted((a, b, clients.index(c)) for a, b, c in spans if a < b), rtol=1e-6
        )
        at = until
    assert set(found["waits"][:, 1].round(3)) <= set(ends.round(3))
    assert len(found["waits"]) + 5 == used.sum()  # the last of a round does not
    lost = [(a, b, clients.index(c)) for a, b, c in zip(begins[~used], ends[~used], rows["client"][~used], strict=True)]
    np.testing.assert_allclose(found["late or lost"], sorted(lost), rtol=1e-6)
    for start, stop, row in found["away"]:
        middle = np.array([(start + stop) / 2])
        assert not config.clock.state(config.seed, np.array([clients[round(row)]]), middle)[0]


def test_clients_of_asynchronous_rounds_begin_when_they_are_sent_a_model(tmp_path: Path) -> None:
    rounds = {"total": 9, "participation": 0.6, "selection": {"fedbuff": {"buffer": 2}}}
    run = Run(simulate(tiny(clock=CLOCK | {"jitter": 0.5}, rounds=rounds), tmp_path).folder)
    rows, clock = run.columns("clients"), run.columns("rounds")["sim_clock"]
    returned = rows["sim_start"] + rows["sim_down"] + rows["sim_train"] + rows["sim_up"]
    np.testing.assert_allclose([returned[rows["round"] == t].max() for t in range(9)], clock)
    moments = np.array([0.0, *returned])
    assert all(np.isclose(moments, start).any() for start in rows["sim_start"])  # when another has returned
    assert (rows["sim_start"] > 0).any()
    assert {"download", "training", "upload", "waits"} <= boxes(draw("sim-timeline", [run]).axes[0]).keys()


def test_updates_that_are_too_stale_are_marked_until_they_are_in(tmp_path: Path) -> None:
    rounds = {"total": 9, "participation": 0.6, "selection": {"fedbuff": {"buffer": 2, "max_staleness": 0}}}
    run = Run(simulate(tiny(clock=CLOCK, rounds=rounds), tmp_path).folder)
    rows = run.columns("clients")
    stale = (rows["status"] == "stale") & (rows["round"] > 0)
    back = rows["sim_start"] + rows["sim_down"] + rows["sim_train"] + rows["sim_up"]
    clients = np.unique(rows["client"]).tolist()
    spans = zip(rows["sim_start"][stale], back[stale], rows["client"][stale], strict=True)
    marked = boxes(draw("sim-timeline", [run]).axes[0])["late or lost"]
    assert stale.any()
    shown = {(round(b, 3), row) for _, b, row in marked}
    assert {(round(b, 3), clients.index(c)) for _, b, c in spans} >= shown and shown


def test_curves_over_rounds_take_another_axis(stored: dict[str, Run], tmp_path: Path) -> None:
    run = Run(simulate(tiny(clock={"speed": 10}), tmp_path).folder)
    [line] = draw("norm:clock", [run]).axes[0].lines
    np.testing.assert_allclose(line.get_xdata(), run.columns("rounds")["sim_clock"])
    assert draw("norm:uplink", [run]).axes[0].get_xlabel() == "sent by clients (MB)"
    with pytest.raises(
        ReportError, match="partition is no curve over rounds, so it has no other axis: leave out 'clock'"
    ):
        draw("partition:clock", [run])
    with pytest.raises(NoData, match="its clock is not set"):
        draw("sim-timeline", [stored["ldf"]])


def tick_labels(axis: Axis) -> list[Text]:
    """Those that are drawn: matplotlib keeps some beyond the limits of the axis."""
    low, high = sorted(axis.get_view_interval())
    place = 0 if isinstance(axis, XAxis) else 1
    return [t for t in axis.get_majorticklabels() if t.get_text() and low <= t.get_position()[place] <= high]


def drawn(runs: list[Run]) -> Iterator[tuple[str, Figure]]:
    """Every figure, of the first run that has it and of all runs together."""
    seen = set()
    for some in (*([run] for run in runs), runs):
        for name in names(some[0]):
            alone = len(some) == 1
            if (name, alone) in seen or not (alone or isinstance(FIGURES[name.partition(":")[0]], Comparison)):
                continue
            with suppress(NoData):
                yield name, draw(name, some)
                seen.add((name, alone))


def test_every_figure_has_labels_that_fit(stored: dict[str, Run], measured: Path, tmp_path: Path) -> None:
    shown = set()
    timed = Run(simulate(tiny(clock=CLOCK), tmp_path / "timed").folder)
    for name, figure in drawn([raysim.load(measured), *stored.values(), with_metric(tmp_path / "a", [0.5]), timed]):
        shown.add(name.partition(":")[0])
        figure.draw_without_rendering()
        assert figure.get_figwidth() in (COLUMN, PAGE), name
        texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
        for axes in figure.axes:
            texts += [*axes.texts, *axes.findobj(lambda a, t=axes: a is t._left_title)]
            if not axes.axison:  # a triangle, whose corners have texts
                continue
            assert axes.get_xlabel() or axes.get_label() == "<colorbar>", name
            texts += [axes.xaxis.label, axes.yaxis.label]
            for side, axis in enumerate((axes.xaxis, axes.yaxis)):
                labels = tick_labels(axis)
                texts += labels
                spans = sorted(text.get_window_extent().get_points()[:, side].tolist() for text in labels)
                assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(spans)), f"{name}: tick labels overlap"
        for text in texts:
            box, frame = text.get_window_extent(), figure.bbox.padded(1)
            fits = frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1)
            assert fits or not text.get_text(), f"{name}: {text.get_text()!r} does not fit"
    assert shown == set(FIGURES)


def test_figures_that_cannot_be_drawn_say_why(stored: dict[str, Run]) -> None:
    run = stored["avg-3"]
    for name, runs, words in (
        ("acuracy", [run], r"no figure 'acuracy'\. Did you mean 'accuracy'\?"),
        ("accuracy:miles", [run], "no variant 'miles'; there are rounds, uplink, traffic, time"),
        ("scores:x", [run], "scores has no variants"),
        ("timeline", [run, stored["lws"]], "shows one run, but 2 were given"),
        ("layers:fedlws.gamma", [run], r"no variant 'fedlws.gamma'; there are relative_update"),
        ("notes", [run], "recorded nothing that notes shows"),
    ):
        with pytest.raises(ReportError, match=words):
            draw(name, runs)


# -------------------------------------------------------------------------------------------------------------- page


class Page(HTMLParser):
    """Elements, ids, references and texts of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        styles = re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", text)
        self.references += [reference for pair in styles for reference in pair if reference]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id" and value]
        at = ("href", "xlink:href", "src", "srcset", "data", "action", "poster", "background")
        self.references += [value for name, value in attributes if name in at and value]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="session")
def page(stored: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on four runs, two of which differ in the seed alone."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    write([stored[name] for name in ("avg-3", "avg-4", "ldf", "lws")], path)
    return path


def headings(path: Path) -> list[str]:
    return re.findall("<h2.*?>(.*?)</h2>", path.read_text(encoding="utf-8"))


def test_a_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert not {"link", "iframe", "object", "embed", "base", "img", "form"} & set(parsed.tags)
    assert page.stat().st_size < 2_000_000
    assert all(reference.startswith(("#", "data:")) for reference in parsed.references)
    assert len(set(parsed.ids)) == len(parsed.ids), "ids of several figures mix"
    assert {reference[1:] for reference in parsed.references if reference.startswith("#")} <= set(parsed.ids)
    figures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', text).group(1))["of"]
    assert len(figures) + len(charts) == parsed.tags.count("figure") > 20
    assert [chart["label"] for chart in charts][:2] == ["test accuracy (%)", "test loss (nats)"]
    for figure in figures:
        ElementTree.fromstring(figure)
    assert "final test accuracy (%)" in parsed.text, "texts of figures are not texts"


def test_a_page_has_the_sections_for_which_there_are_data(
    page: Path, stored: dict[str, Run], measured: Path, tmp_path: Path
) -> None:
    shared = ["Scores", "Bytes and time"]  # weights by size, and the r of FedLWS over τ, are straight lines
    each = [
        "Data distribution over clients, seed 3",
        "fedavg, seed 3",
        "fedldf",
        "fedavg + fedlws",
    ]  # one partition, shown once
    assert headings(page) == [*shared, *each, "Reproduce this report"]
    write([stored["ala"]], tmp_path / "ala.html")
    its = ["The clients&#39; own models", "Data distribution over clients", "fedala", "Reproduce this report"]
    assert [heading for heading in headings(tmp_path / "ala.html") if heading not in shared] == its
    write([raysim.load(measured)], tmp_path / "measured.html")
    seen = ["Aggregation weights", "The clients&#39; updates", "Shrinking", "The loss around the model"]
    assert [heading for heading in headings(tmp_path / "measured.html") if heading in seen] == seen
    write([by_hand(tmp_path / "a", [None])], tmp_path / "a.html")
    assert headings(tmp_path / "a.html") == ["Bytes and time", "Reproduce this report"]


def test_a_page_tells_how_to_do_it_again(page: Path, stored: dict[str, Run]) -> None:
    parsed = Page(page.read_text(encoding="utf-8"))
    runs = [stored[name] for name in ("avg-3", "avg-4", "ldf", "lws")]
    for run in runs:
        assert run.result is not None
        assert {run.result["sha256"], run.manifest["partition_sha256"], run.manifest["config_hash"]} <= set(parsed.text)
    for name in ("avg-3", "ldf", "lws"):  # one run of each configuration
        assert (stored[name].folder / "config.yaml").read_text() in parsed.text
    assert runs[0].manifest["versions"]["torch"] in parsed.text
    summary = summarise(compare(runs))
    assert summary.sentence in parsed.text
    assert {cell for row in (*summary.scores, *summary.costs) for cell in row if cell} <= set(parsed.text)


def test_a_page_says_what_to_doubt(tmp_path: Path) -> None:
    half = by_hand(tmp_path / "half", [0.5], finished=False)
    with Recorder(half.folder, 1) as recorder:
        recorder.add("clients", round=0, client=[0, 1, 2], status=["ok", "non-finite update <of> conv1", "asked"])
    write([half, by_hand(tmp_path / "twin", [0.5])], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Not finished: fedavg, seed 3 (1 of 3 rounds)." in text
    assert "fedavg: seed 3 appears more than once, which makes the standard deviation too small." in text
    assert "non-finite update &lt;of&gt; conv1" in text
    assert "<td>asked</td>" not in text  # for its loss: nothing went wrong


def test_a_page_leaves_out_what_has_nothing_to_draw(tmp_path: Path) -> None:
    """A quantity that is never a number, seeds that noted it in other rounds, and classes that cannot be set side by side."""
    runs = [by_hand(tmp_path / f"{seed}", [0.5, 0.6], seed) for seed in (1, 2)]
    runs.append(by_hand(tmp_path / "other", [0.5, 0.6], server=["fedlws"]))
    for t, (run, classes) in enumerate(zip(runs, (2, 2, 3), strict=True)):
        with Recorder(run.folder, 2) as recorder:
            recorder.add("notes", round=t % 2, method="balance", name="norm", value=1.0 if t < 2 else NONE)
            recorder.add("notes", round=0, method="feddf", name="loss", value=NONE)
        label, predicted = np.indices((classes, classes)).reshape(2, -1)
        table = pa.table({"label": label, "predicted": predicted, "samples": np.ones(classes**2, int)})
        write_table(run.folder, "measures/confusion", table.replace_schema_metadata({"raysim.measure": "{}"}))
    runs = [Run(run.folder) for run in runs]
    for name, some in (("balance:norm", runs), ("notes:feddf.loss", runs[:1]), ("class-accuracy", runs)):
        with pytest.raises(NoData):
            draw(name, some)
    write(runs, tmp_path / "page.html")
    assert "raysim plot accuracy" in (tmp_path / "page.html").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ notebook, command line


def test_load_gives_tables_and_figures(stored: dict[str, Run], tmp_path: Path) -> None:
    run = stored["lws"]
    assert repr(run) == f"Run({str(run.folder)!r}): fedavg + fedlws, 4 of 4 rounds"
    assert run["rounds"].num_rows == 4
    assert {"rounds", "partition"} <= set(run.tables)
    assert "layers:fedlws.gamma" in run.figures
    assert "personal:rounds" not in run.figures
    assert run.figure("accuracy")._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(KeyError, match="there are rounds, clients"):
        run["cliens"]
    with pytest.raises(ReportError, match="not the folder of a run"):
        raysim.load(tmp_path)


def test_a_run_is_running_finished_or_stopped(tmp_path: Path) -> None:
    run = by_hand(tmp_path / "a", [0.5], finished=False)
    assert (run.state, run.result) == ("stopped", None)
    with (run.folder / ".lock").open("a") as lock:
        take(lock.fileno())
        assert run.state == "running"
        assert run.state == "running"  # the question has not changed the answer
    assert run.state == "stopped"
    write_json(run.folder / "result.json", RESULT)
    assert (run.state, run.result) == ("finished", RESULT)


def test_find_looks_into_folders(folder: Path, tmp_path: Path) -> None:
    assert [run.folder.name for run in find([folder])] == sorted(STORED)
    assert len(find([folder / "lws", folder])) == len(STORED)
    with pytest.raises(ReportError, match="no runs found"):
        find([tmp_path])


@pytest.mark.parametrize(
    ("table", "column", "number"),
    [("layers", "layer", -1), ("layers", "layer", 10**12), ("clients", "client", -2), ("timeline", "host", 10**9)],
)
def test_a_number_that_no_run_has_is_named(table: str, column: str, number: int, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "lws", run)
    rows = tables.read(run, table)
    place = rows.schema.get_field_index(column)
    numbers = pa.array([number, *rows[column].to_pylist()[1:]], rows.schema.field(place).type)
    rewritten(run, table, rows.set_column(place, rows.schema.field(place), numbers))
    shown = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "page.html")])
    assert isinstance(shown.exception, SystemExit), shown.exception
    assert f"{run / table} is damaged: it has a {column} {number}." in shown.output


def test_a_run_without_layers_has_a_report(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "lws", run)
    rewritten(run, "layers", tables.read(run, "layers").slice(0, 0))
    write([raysim.load(run), raysim.load(folder / "avg-3")], tmp_path / "page.html")
    assert {"accuracy:rounds", "loss:rounds"} <= {*available([raysim.load(run)])}


def rewritten(run: Path, table: str, rows: pa.Table) -> None:
    """A table with these rows in place of its own."""
    shutil.rmtree(run / table)
    write_table(run, table, rows)


def test_find_takes_no_other_configuration_for_a_run(tmp_path: Path) -> None:
    """Neither what lies in a run's folder nor another project's; a run from its first moment on, and a damaged one."""
    run = by_hand(tmp_path / "run", [0.5]).folder
    for other in (run / "wandb/run-1/files", tmp_path / "project"):
        other.mkdir(parents=True)
        (other / "config.yaml").write_text("learning_rate: {value: 0.1}\n")
    starting = tmp_path / "starting"
    starting.mkdir()
    (starting / ".lock").touch()
    shutil.copy(run / "config.yaml", starting)
    assert [one.folder for one in find([tmp_path])] == [run, starting]
    with pytest.raises(ReportError, match="project: no runs found"):
        find([tmp_path / "project"])
    (starting / "config.yaml").write_text("seed: many\n")
    with pytest.raises(DamagedFile, match=r"starting/config\.yaml is damaged"):
        find([tmp_path])


def raysim_(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_plot_and_report_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    starts = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}
    for kind, start in starts.items():
        for name in ("one", "two"):
            result = raysim_(
                "plot", "accuracy:traffic", folder / "avg-3", folder / "lws", "--out", tmp_path / f"{name}.{kind}"
            )
            assert result.exit_code == 0, result.output
        one, two = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "two"))
        assert one.startswith(start)
        assert one == two, "the same figure is another file"
    assert b"/Type3" not in (tmp_path / "one.pdf").read_bytes()  # publishers refuse such fonts
    wrong = raysim_("plot", "accuracy", folder / "lws", "--out", tmp_path / "x.doc")
    assert (wrong.exit_code, wrong.stderr) == (
        1,
        f"raysim: {tmp_path}/x.doc: the name of a figure ends with .pdf, .svg or .png.\n",
    )
    assert "shows one run" in raysim_("plot", "timeline", folder, "--out", tmp_path / "x.pdf").stderr

    result = raysim_("report", folder / "lws", "--out", tmp_path / "lws.html", "--target", "0.5")
    assert result.exit_code == 0, result.output
    assert "round to 50 %" in (tmp_path / "lws.html").read_text(encoding="utf-8")
    lines = raysim_("list", "figures").output.splitlines()
    assert [line.split()[1] for line in lines] == list(FIGURES)
    assert all(line.endswith((".", ":")) for line in lines), "a sentence is cut"


@pytest.mark.parametrize("missing", ["matplotlib.figure", "jinja2"])
def test_without_the_extra_it_says_what_to_install(
    missing: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    result = raysim_("report", folder / "lws", "--out", tmp_path / "x.html")
    package = missing.partition(".")[0]
    assert (result.exit_code, result.stderr) == (
        1,
        f"raysim: figures and reports need {package}: pip install 'raysim[report]'\n",
    )
    assert not (tmp_path / "x.html").exists()
    if package == "matplotlib":
        with pytest.raises(MissingExtra):
            raysim.load(folder / "lws").figure("accuracy")


def test_reports_need_neither_torch_nor_engine() -> None:
    heavy = "{'torch', 'ray', 'raysim.engine', 'raysim.core', 'raysim.config', 'raysim.federation'}"
    code = (
        "import sys, raysim; print({'numpy', 'pyarrow', 'torch', 'ray'} & set(sys.modules));"
        f"import raysim.report.figures, raysim.report.page; print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nset()\n"
