"""`raysim reproduce`: a small table from its configuration to what is printed, and the list of all."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner
from written import by_hand

from raysim.cli.app import app
from raysim.config import ConfigError, shipped, to_dict
from raysim.report.runs import Run
from raysim.report.summary import GLOBAL
from raysim.store.tables import read
from raysim.sweep import running
from raysim.sweep.drawing import against_settings, canvas_of
from raysim.sweep.grid import Point
from raysim.sweep.items import Item, find, items, listing
from raysim.sweep.parallel import _outcome
from raysim.sweep.scores import SCORES, scored
from raysim.sweep.text import _cell, paper_tables

TABLE = """
data: {name: digits, partition: {iid_equal: {clients: 4}}}
model: {name: mlp, options: {hidden: [16]}}
rounds: {total: 9, participation: 0.5}
local: {batch_size: 32, lr: 0.2}
server: [fedlws]
engine: local

table:
  items: {Table 1: shrinking (raysim plot accuracy), Figure 2: its curves}
  score: {final (%): final, MB sent: MB}
  columns:
    - digits: {}
      absent: {data.name: {npz: nowhere.npz}}
    - slow: {local.lr: 0.02}
      fast: {}
  rows:
    FedAvg: {server: []}
    FedAvg + LWS: {}
    FedProx: {server: [], client: [fedprox]}
  cells:
    - {of: [FedAvg + LWS, fast], set: {server.0.fedlws.beta: 0.3}}
  paper:
    FedAvg:  [81.5, 20.0, 90.25, null,  1, 2, 3, 4]
    FedProx: [null, null, 70, null,     null, null, null, null]
  small:
    only: [digits, FedAvg + LWS, FedProx]
    set: {rounds.total: 2}
    cells:
      - {of: [FedAvg + LWS, fast], set: {server.0.fedlws.beta: 0.2}}
    score:
      final (%): final
      MB sent: MB
      error at 0.015 MB (%): {error at MB: 0.015}
      behind LWS (points): {gap: FedAvg + LWS}
    seeds: [8, 9]
    minutes: 0.5
  medium:
    only: [digits, fast]
    rows: {FedAvg: {server: []}, FedProx of its own: {client: [{fedprox: {mu: 0.5}}]}}
    set: {rounds.total: 3}
    seeds: [8]
"""


@pytest.fixture
def item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Item:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAYSIM_DATA", raising=False)
    path = Path("configs", "toy", "table1.yaml")
    path.parent.mkdir(parents=True)
    path.write_text(TABLE)
    return find("toy/table1")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configurations come with raysim, of which the list takes a while."""
    monkeypatch.setattr("raysim.sweep.items.configurations", lambda: Path("nowhere"))


def reproduce(*args: object) -> Any:
    return CliRunner().invoke(app, ["reproduce", *map(str, args)])


def rows(text: str) -> list[list[str]]:
    """The cells of the printed table, without the rule below its headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not set(line) <= set("|- ")]


def test_a_small_table_from_end_to_end(item: Item) -> None:
    done = reproduce("toy/table1", "--scale", "small", "--out", "out")
    assert done.exit_code == 0, done.output
    runs = {path.parent.name: path.parent for path in Path("out").glob("*/result.json")}
    assert len(runs) == 6  # two rows of two columns, less FedProx when slow, each with two seeds

    def score(row: str, column: str, key: str) -> list[float]:
        its = [name for name in runs if row in name and f"-{column}-" in name]
        return [json.loads((runs[name] / "result.json").read_text())[key] for name in sorted(its)]

    head, lws, prox = rows(done.output)
    scores = ("final (%)", "MB sent", "error at 0.015 MB (%)", "behind LWS (points)")
    assert head[1:] == [f"{column}, {name}" for column in ("slow", "fast") for name in scores]
    finals = [100 * value for value in score("LWS", "slow", "final")]
    assert lws[:2] == ["FedAvg + LWS", f"{mean(finals):.2f} ± {stdev(finals):.2f}"]  # no number of the paper's
    assert prox[:5] == ["FedProx", "", "", "", ""]
    ours = [100 * value for value in score("FedProx", "fast", "final")]
    assert prox[5] == f"{mean(ours):.2f} ± {stdev(ours):.2f} (paper 70)"  # a smoke run is not held against it
    sent = sum(score("FedProx", "fast", "bytes_up") + score("FedProx", "fast", "bytes_down")) / 2e6
    assert float(prox[6].partition(" ")[0]) == pytest.approx(sent, rel=0.01)
    first = [read(path, "rounds").slice(0, 1).to_pylist()[0] for name, path in runs.items() if "FedProx" in name]
    assert all(round["bytes_up"] <= 15_000 < 2 * round["bytes_up"] for round in first)
    errors = [100 * (1 - round["accuracy"]) for round in first]
    assert prox[7] == f"{mean(errors):.2f} ± {stdev(errors):.2f}"
    assert (lws[4], lws[8]) == ("0.00 ± 0.00", "0.00 ± 0.00")
    fast = [
        (name, read(path, "rounds")["accuracy"].to_numpy()) for name, path in sorted(runs.items()) if "-fast-" in name
    ]
    theirs, ours = ([curve for name, curve in fast if row in name] for row in ("LWS", "FedProx"))
    gaps = [100 * max(best - own) for best, own in zip(theirs, ours, strict=True)]  # each round sends as many MB
    assert prox[8] == f"{mean(gaps):.2f} ± {stdev(gaps):.2f}".replace("-", "−")
    for text in ("toy, Table 1: shrinking\n", "A smoke run", "Scaled", "beta=0.2 (FedAvg + LWS, fast)", "over 2 seeds"):
        assert text in done.output
    assert "Fell back" not in done.output
    beta = [
        re.search(r"beta: (\S+)", (runs[name] / "config.yaml").read_text()) for name in sorted(runs) if "LWS" in name
    ]
    assert {match.group(1) for match in beta if match} == {"0.2", "0.1"}  # fast as `small` has it, slow the default

    again = reproduce("toy/table1", "--scale", "small", "--out", "out", "--format", "latex")
    assert again.output.endswith("\ntable   out/table.tex\n")
    tex = Path("out/table.tex").read_text().splitlines()
    [row] = [line.split(" & ") for line in tex if line.startswith("FedProx & ")]
    assert row[5].replace("$\\pm$", "±").replace("$-$", "−") in (
        prox[5],
        *(f"\\{m}{{{prox[5]}}}" for m in ("textbf", "underline")),
    )
    assert "6 runs, 6 of them finished" in again.output
    assert rows(again.output) == [head, lws, prox]


def test_a_note_may_be_of_some_rounds_and_layers() -> None:
    values = {(t, layer): 10 * t + len(layer) for t in range(4) for layer in ("conv1", "block0.mlp")}
    notes = [("fedlws", "gamma", t, layer, value) for (t, layer), value in values.items()]
    notes += [("fedlws", "model_gamma", t, None, 7.0) for t in range(4)]
    columns = zip(*notes, strict=True)
    arrays = dict(zip(("method", "name", "round", "layer", "value"), map(np.array, columns), strict=True))
    run: Any = SimpleNamespace(columns=lambda table: arrays | {"index": np.full(len(notes), np.nan)})
    of = SCORES["note"][0]
    assert of(run, "fedlws.gamma") == mean([35, 40])
    assert of(run, "fedlws.gamma", rounds=(2, 3)) == mean([15, 20, 25, 30])  # the second round is 1 in tables
    assert of(run, "fedlws.gamma", rounds=(2, 4), layers="mlp") == mean([20, 30, 40])
    assert of(run, "fedlws.gamma", layers="attention") is None
    assert of(run, "fedlws.gamma", rounds=(90, 110)) is None
    clients = dict(method=["similarity"] * 4, name=["client"] * 4, round=[0, 0, 1, 1], client=[0, 2, 0, 2])
    cosines = {name: np.array(its) for name, its in (clients | {"value": [0.9, 0.2, 0.8, 0.4]}).items()}
    three: Any = SimpleNamespace(columns=lambda table: cosines | {"index": np.full(4, np.nan)})
    assert of(three, "similarity.client", client=2) == 0.4
    assert of(three, "similarity.client", client=1) is None
    silent: Any = SimpleNamespace(columns=lambda table: {name: values[:0] for name, values in arrays.items()})
    assert of(silent, "fedlws.gamma", layers="mlp") is None


class Rounds(dict[str, pa.Table]):
    """A run that has the table `rounds` alone."""

    evaluate_every = 1

    def columns(self, table: str) -> dict[str, np.ndarray]:
        return {name: self[table][name].to_numpy() for name in self[table].column_names}

    @property
    def rounds(self) -> int:
        return self["rounds"].num_rows


def of_rounds(**columns: Any) -> Any:
    """A run with these columns of the table `rounds`; NaN stands for a null."""
    n = len(columns["accuracy"])
    columns = {"round": range(n), "personal_accuracy_micro": [np.nan] * n, **columns}
    arrays = {name: pa.array(np.array(its, float), from_pandas=True) for name, its in columns.items()}
    return Rounds(rounds=pa.table(arrays))


def test_the_best_ten_evaluations_have_a_mean_and_a_deviation() -> None:
    """Of 1, 2, ..., 12 % those are 3, ..., 12 %, whose population variance is (10² − 1) / 12."""
    run = of_rounds(accuracy=[*np.random.RandomState(0).permutation(np.arange(1, 13)) / 100, np.nan])
    assert scored(run, GLOBAL, "best10") == pytest.approx(7.5)
    assert scored(run, GLOBAL, "best10 deviation") == pytest.approx((99 / 12) ** 0.5)
    few = of_rounds(accuracy=[0.1, 0.3])
    assert [scored(few, GLOBAL, name) for name in ("best10", "best10 deviation")] == pytest.approx([20, 10])


def test_a_round_without_models_takes_no_time_to_aggregate() -> None:
    others = {"seconds_reduce": [1.0, np.nan, 1.0, 1.0], "seconds_server": [1.0, np.nan, 1.0, 1.0]}
    run = of_rounds(accuracy=[0.5] * 4, seconds_plan=[2.0, np.nan, 4.0, 9.0], **others)
    assert SCORES["aggregation"][0](run) == 6


def test_a_run_that_has_an_error_exactly_is_down_to_it() -> None:
    """1 - e / 100 is above (100 - e) / 100 for a fifth of the whole numbers of %."""
    for error in range(1, 100):
        run = of_rounds(accuracy=[0.0, (100 - error) / 100], bytes_up=[1e6] * 2, bytes_down=[0] * 2)
        assert scored(run, GLOBAL, "MB to error", error) == 2


def test_accuracy_may_be_asked_for_after_some_rounds() -> None:
    run = of_rounds(round=range(4), accuracy=[np.nan, 0.2, np.nan, 0.4])
    assert [scored(run, GLOBAL, "accuracy after", t) for t in (1, 2, 4, 5)] == [None, 20, 40, None]


def test_converged_is_the_first_evaluation_that_the_next_rounds_do_not_better() -> None:
    """Evaluated every other round: 0.4 of round 4 is bettered in round 10 alone, and 0.5 of round 10 not in four more."""
    scores = {0: 0.1, 2: 0.2, 4: 0.4, 6: 0.3, 8: 0.4, 10: 0.5, 12: 0.1, 14: 0.5}
    accuracy = [scores.get(t, np.nan) for t in range(15)]
    run = of_rounds(round=range(15), accuracy=accuracy, bytes_up=[0] * 15, bytes_down=[0] * 15, wall=range(60, 960, 60))
    # the end of round t comes after t + 1 minutes
    assert [scored(run, GLOBAL, "converged", rounds) for rounds in (1, 2, 5, 6)] == [1, 5, 5, None]


def test_a_gap_is_the_greatest_at_any_number_of_bytes() -> None:
    """Ours is evaluated at 2 and 4 MB, theirs after each of 1 to 5 MB: what it knows at 3 MB is that of 2 MB."""
    ours = of_rounds(accuracy=[0.2, 0.6], bytes_up=[2e6, 2e6], bytes_down=[0, 0])
    theirs = of_rounds(accuracy=[0.9, 0.3, 0.5, 0.55, 0.99], bytes_up=[1e6] * 5, bytes_down=[0] * 5)
    of = SCORES["gap"][0]
    assert of(ours, theirs) == pytest.approx(30)  # at 3 MB; 10 at 2, −5 at 4
    assert of(theirs, ours) == pytest.approx(5)
    late = of_rounds(accuracy=[0.5], bytes_up=[6e6], bytes_down=[0])
    assert of(ours, late) is None


def test_a_choice_of_several_rows_is_compared_with_the_row_that_differs_in_it_alone(item: Item) -> None:
    item.path.write_text("""
data: {name: digits, partition: {iid_equal: {clients: 2}}}
model: {name: mlp, options: {hidden: [8]}}
rounds: {total: 2}
local: {lr: 0.02, batch_size: 32}
engine: local
table:
  items: {Table 1: gains}
  score: {best: best, gain: {best over: slow}}
  rows: [{FedAvg: {}, FedProx: {client: [{fedprox: {mu: 5}}]}}, {slow: {}, fast: {local.lr: 0.2}}]
  paper: {"FedProx, fast": [90, 10]}
  small: {seeds: [8]}
""")
    done = reproduce("toy/table1", "--scale", "small", "--out", "out")
    assert done.exit_code == 0, done.output
    table = {row[0]: row for row in rows(done.output)}
    best = {
        path.parent.name.removesuffix("-seed8").replace("-", ", "): 100
        * read(path.parent, "rounds")["accuracy"].to_numpy().max()
        for path in Path("out").glob("*/result.json")
    }
    assert float(table["FedAvg, fast"][2]) == pytest.approx(best["FedAvg, fast"] - best["FedAvg, slow"], abs=0.0051)
    gain = best["FedProx, fast"] - best["FedProx, slow"]
    assert table["FedProx, fast"][2].startswith(f"{gain:.2f} (paper 10")
    assert table["FedProx, slow"][2] == "0.00"


def test_all_runs_of_a_table_are_judged_by_one_score(item: Item) -> None:
    """Personal models' where every run has them: 80 % of them are not held against 40 % of the global model, which loses 10."""
    item.path.write_text("""
data: {name: digits, partition: {iid_equal: {clients: 2}}, client_test_frac: 0.2}
model: mlp
rounds: {total: 2}
local: {lr: 0.02, batch_size: 32}
engine: local
table:
  items: {Table 1: gains}
  score: {final: final, error: error, first: {accuracy after: 1}, gain: {final over: FedAvg}}
  rows: {FedAvg: {}, Ditto: {client: [ditto], evaluate.personal: after_train}}
  against: {method: {Ditto: 1}}
  over: FedAvg
  small: {seeds: [8]}
""")
    points = item.runs("small", (), (), Path("out"))
    average, ditto = points.values()
    Path("out").mkdir()
    by_hand(average.folder, [0.1, 0.4])
    by_hand(ditto.folder, [0.2, 0.3], personal=[0.7, 0.8])
    [table] = paper_tables(item, points, "small")
    found = [[entry.by_seed.get(8) for entry in column.entries] for column in table.columns]
    assert found == [pytest.approx(pair) for pair in ([40, 30], [60, 70], [10, 20], [0, -10])]
    figure = against_settings(item, {cell: Run(point.folder) for cell, point in points.items()}, "small")
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx([-10])

    both = dict.fromkeys(points, ditto)
    [table] = paper_tables(item, both, "small")
    assert [entry.by_seed.get(8) for entry in table.columns[0].entries] == pytest.approx([80, 80])


def test_only_full_and_medium_runs_are_held_against_the_papers_numbers() -> None:
    assert _cell([60, 62], "final", 70, "medium") == "61.00 ± 1.41 (paper 70, −9.00)"
    assert _cell([60, 62], "final", 70, "small") == "61.00 ± 1.41 (paper 70)"


def test_a_figure_shows_gains_at_the_places_of_a_setting(item: Item) -> None:
    item.path.write_text("""
data: {name: digits, partition: {iid_equal: {clients: 2}}}
model: {name: mlp, options: {hidden: [8]}}
rounds: {total: 2}
local: {lr: 0.02, batch_size: 32}
engine: local
table:
  items: {Figure 1: gain against the rate}
  score: {accuracy (%): final, MB: MB}
  columns: {slow: {}, middle: {local.lr: 0.2}, fast: {local.lr: 0.8}}
  rows: {FedAvg: {}, FedProx: {client: [{fedprox: {mu: 0.5}}]}}
  against: {rate: {fast: 0.8, slow: 0.02, middle: 0.2}}
  over: FedAvg
  small: {seeds: [8, 9]}
""")
    done = reproduce("toy/table1", "--scale", "small", "--out", "out")
    assert done.output.endswith("\nfigure  out/figure.png\n")
    assert Path("out/figure.png").stat().st_size > 5000
    final = {
        path.parent.name: json.loads(path.read_text())["final"] * 100 for path in Path("out").glob("*/result.json")
    }
    ours = find("toy/table1")
    points = ours.runs("small", (), (), Path("out"))
    gains, bytes_ = against_settings(ours, {cell: Run(point.folder) for cell, point in points.items()}, "small").axes
    line = gains.lines[0]  # error bars' caps come after it
    assert [*line.get_xdata()] == [0.02, 0.2, 0.8]
    expected = [
        mean(final[f"{rate}-FedProx-seed{seed}"] - final[f"{rate}-FedAvg-seed{seed}"] for seed in (8, 9))
        for rate in ("slow", "middle", "fast")
    ]
    assert line.get_ydata() == pytest.approx(expected)
    assert (gains.get_ylabel(), gains.get_xscale()) == ("gain over FedAvg (points)", "log")
    assert bytes_.get_ylabel() == "MB"


def test_a_figure_calls_its_curves_as_the_table_calls_its_rows(item: Item) -> None:
    item.path.write_text("""
data: {name: digits, partition: {iid_equal: {clients: 2}}}
model: {name: mlp, options: {hidden: [8]}}
rounds: {total: 2}
local: {batch_size: 32}
engine: local
table:
  items: {Figure 1: a curve a row (raysim plot accuracy RUN... --out FIG)}
  score: {accuracy (%): final}
  rows: {slow clients: {local.lr: 0.02}, fast clients: {local.lr: 0.2}}
  small: {seeds: [8]}
""")
    done = reproduce("toy/table1", "--scale", "small", "--out", "out")
    assert done.output.endswith("\nfigure  out/figure.png\n")
    ours = find("toy/table1")
    runs = {cell: Run(point.folder) for cell, point in ours.runs("small", (), (), Path("out")).items()}
    (legend,) = canvas_of(ours, runs, "small").legends
    assert {text.get_text() for text in legend.get_texts()} == {"slow clients", "fast clients"}


def test_one_number_a_column_stands_beside_every_accuracy(item: Item) -> None:
    several = TABLE.replace("{final (%): final, MB sent: MB}\n  col", "{last: final, best: best, MB: MB}\n  col")
    paper = several.replace("[81.5, 20.0, 90.25, null,  1, 2, 3, 4]", "[81.5, null, 70, 60]")
    item.path.write_text(re.sub(r"    FedProx: \[null.*\n", "", paper))
    table = find("toy/table1").table
    assert table.theirs(("FedAvg",), ("digits", "slow")) == [("final", 81.5), ("best", 81.5), ("MB", None)]
    assert table.theirs(("FedAvg",), ("digits", "fast")) == [("final", None), ("best", None), ("MB", None)]
    assert table.theirs(("FedProx",), ("digits", "slow")) == []


def test_absent_data_are_named_before_anything_starts(item: Item, alone: None) -> None:
    done = reproduce("toy/table1", "--out", "out")
    assert done.exit_code == 2
    assert "nowhere.npz" in done.output
    for data in ("elsewhere", "my data #2", "2024", "null", "größe 😀: [1"):  # as it is, whatever YAML would make of it
        assert f"data.root is {data})" in reproduce("toy/table1", "--data", data, "--out", "out").output
    assert not Path("out").exists()
    listed = reproduce("--list")
    assert "full: 9 runs × 3 seeds; digits, nowhere.npz (absent)" in listed.output
    assert "small: 3 runs × 2 seeds; digits; took 0.5 minutes of one core" in listed.output
    assert "medium: 2 runs × 1 seed; digits" in listed.output


def test_a_scale_may_have_rows_of_its_own(item: Item) -> None:
    ours, theirs = item.runs("medium", (), (), Path("out")).items()
    assert [cell.row for cell, _ in (ours, theirs)] == [("FedAvg",), ("FedProx of its own",)]
    assert [(point.config.rounds.total, point.config.seed) for _, point in (ours, theirs)] == [(3, 8)] * 2
    assert [[method.mu for method in point.config.client] for _, point in (ours, theirs)] == [[], [0.5]]
    assert item.table.theirs(*((cell := ours[0]).row, cell.column)) == [("final", 90.25), ("MB", None)]
    item.path.write_text(TABLE.replace("    rows: {FedAvg:", "    rows: {digits: {}, FedAvg:"))
    with pytest.raises(ConfigError, match=r"table\.'digits' names two choices"):
        find("toy/table1").runs("medium", (), (), Path("out"))


def test_rows_and_columns_may_be_named(item: Item) -> None:
    found = item.runs("full", [8], (), Path("o"), ["slow", "FedAvg", "FedProx", "digits"])
    assert [(cell.row, cell.column) for cell in found] == [
        (("FedAvg",), ("digits", "slow"))
    ]  # FedProx has no slow cell
    assert len(item.runs("small", [8], (), Path("o"), ["fast"])) == 2  # the rows that the scale has
    done = reproduce("toy/table1", "--scale", "small", "--only", "fastt")
    message = "--only: toy/table1 has no row or column 'fastt'. Did you mean 'fast'? There are digits, slow, fast,"
    assert (done.exit_code, done.stderr.startswith(message)) == (2, True)


def test_an_option_of_a_method_reaches_the_runs_that_have_it(item: Item) -> None:
    """It made FedAvg's row FedLWS as well, where the rows differed in something else."""
    changes = ["server.1.fedlws.beta=0.7", "local.batch_size=8"]  # at any place
    stacks = {
        cell.row[0]: to_dict(point.config)["server"]
        for cell, point in item.runs("small", (), changes, Path("o")).items()
    }
    assert stacks.keys() == {"FedAvg + LWS", "FedProx"} and stacks["FedProx"] == []
    assert stacks["FedAvg + LWS"][0]["fedlws"]["beta"] == 0.7
    for wrong, message in (
        ("server.0.fedlwss.beta=0.7", "no run has fedlwss in its server. Did you mean 'fedlws'?"),
        ("client.0.feddyn.alpha=0.1", "no run has feddyn in its client."),
    ):
        with pytest.raises(ConfigError) as refused:
            item.runs("small", (), [wrong], Path("o"))
        assert refused.value.faults == (f"--set {wrong}: {message}",)


def test_a_scale_that_a_table_does_not_have_is_refused(item: Item) -> None:
    item.path.write_text(TABLE.partition("  medium:")[0])
    done = reproduce("toy/table1", "--scale", "medium", "--out", "out")
    assert done.exit_code == 2
    assert "toy/table1 has no scale medium. There are full, small." in done.output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("FedAvg:  [81.5, 20.0,", "FedAvg:  [81.5,", "table.paper.FedAvg: has 7 numbers for 8 columns"),
        ("FedProx: [null", "FedPrx: [null", "table.paper: there is no row 'FedPrx'"),
        ("only: [digits,", "only: [digit,", "table.small.only: there is no choice 'digit'"),
        ("of: [FedAvg + LWS, fast]", "of: [FedAvg + LWS, faster]", "table.cells: there is no choice 'faster'"),
        ("{error at MB: 0.015}", "{error at: 0.015}", "table.score: there is no 'error at'"),
        (
            "      MB sent: MB\n",
            "      MB sent: error at MB\n",
            "table.score: write 'error at MB' as {HEADING: {error at MB: VALUE}}",
        ),
        ("{gap: FedAvg + LWS}", "{gap: FedAvg + LAW}", "table.score: gap: there is no choice 'FedAvg + LAW'"),
        ("{error at MB: 0.015}", "{error at MB: 0.015, rounds: [1, 2]}", "score: error at MB takes no 'rounds'"),
        *(
            ("{error at MB: 0.015}", score, f"table.score: {fault}")
            for score, fault in (
                ("{note: gamma}", "note: must be METHOD.NAME, such as fedlws.gamma, but is 'gamma'"),
                ("{note: ccn.factor, client: third}", "client: must be a client's number, from 0, but is 'third'"),
                ("{accuracy after: two}", "accuracy after: must be a whole number > 0, but is 'two'"),
                ("{error at MB: many}", "error at MB: must be a number > 0, but is 'many'"),
                *(
                    (
                        f"{{note: fedlws.gamma, rounds: {rounds}}}",
                        f"rounds: must be the first and the last round, from 1, such as [90, 110], but is {shown}",
                    )
                    for rounds, shown in ((5, "5"), ([0, 9], "(0, 9)"), ([9, 8], "(9, 8)"))
                ),
                ("{note: fedlws.gamma, layers: '['}", "layers: must be a regular expression, but is '['"),
            )
        ),
        ("  small:\n", "  against: {speed: {quick: 1}}\n  small:\n", "table.speed: there is no choice 'quick'"),
        ("small:\n", "smal:\n", "table.smal: "),
        ("{Table 1: shrinking (raysim plot accuracy), Figure 2: its curves}", "{}", "table.items: names no table"),
        ("seeds: [8, 9]", "seeds: []", "table.small.seeds: names no seed"),
        ("    fast: {}", "    digits: {}", "'digits' names two choices"),
    ],
)
def test_a_wrong_table_is_refused(item: Item, old: str, new: str, message: str) -> None:
    assert old in TABLE
    item.path.write_text(TABLE.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(message)):
        find("toy/table1").plan(False, (), ())


def test_what_is_said_of_settings_seeds_and_fallbacks(item: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that counts is how far a client is from uniform, FedDisco leaves no client a weight. Two runs at a time are
    asked for, and run in turn: to start a process takes longer than a run."""
    asked: list[int] = []

    def in_turn(points: Sequence[Point], at_once: int, *rest: Any) -> tuple[list[str], int]:
        asked.append(at_once)
        return running._in_turn(points, *rest)

    monkeypatch.setattr(running, "run_parallel", in_turn)
    changes = ["rounds.total=1", "server=[]", "weighting=[{feddisco: {a: 1.0e+6, b: 0.0, normalize_kl: false}}]"]
    options = [word for change in changes for word in ("--set", change)]
    done = reproduce("toy/table1", "--scale", "medium", "--out", "out", "--parallel", 2, *options)
    assert done.exit_code == 0, done.output
    assert "smoke" not in done.output
    assert (
        f"Settings other than at full scale: {', '.join(changes)}." in done.output
    )  # not that there were three rounds
    assert "Each cell: one run of raysim's (the paper's number" in done.output
    assert asked == [2]
    points = item.runs("medium", (), changes, Path("out")).values()
    said = [_outcome(point, 0) for point in points]
    assert [re.sub(r"[\d.]+ %", "S %", line) for line in said] == [
        "accuracy S %   fell back: feddisco 1 of 1 times"
    ] * 2
    assert re.search(
        r"Fell back in every round: FedAvg, digits, fast \(feddisco\); FedProx of its own, .* \(feddisco\)\.$",
        done.output.strip(),
    )


def test_an_unknown_item_is_met_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no configs here, so that those beside the package count
    with pytest.raises(ConfigError, match="Did you mean 'fedlws/table1'"):
        find("fedlws/tabel1")
    with pytest.raises(ConfigError, match=r"There are ccn/figure1, ccn/table1, ccn/table2, ccn/table3\."):
        find("ccn")


def test_own_tables_stand_beside_those_of_the_papers(item: Item) -> None:
    """Other configurations may lie there as well."""
    (Path("configs/toy") / "plain.yaml").write_text("seed: 3\n")
    assert items()["toy/table1"].path == Path("configs/toy/table1.yaml")
    assert find("fedlws/table1").path == shipped.folder() / "fedlws/table1.yaml"
    assert "toy/plain" not in items()


def test_foreign_files_take_nothing_down(item: Item, alone: None) -> None:
    Path("configs/toy/latin.yaml").write_bytes("name: Größe\n".encode("latin-1"))
    Path("configs/toy/latin_table.yaml").write_bytes("table: Größe\n".encode("latin-1"))
    Path("configs/toy/desk.yaml").write_text("table: made of wood\n")
    Path("configs/toy/elsewhere.yaml").write_text(TABLE.replace("data: {name: digits,", "data: {kind: digits,"))
    assert "toy/latin" not in items()
    listed = reproduce("--list")
    assert listed.exit_code == 0, listed.output
    said = listed.output.splitlines()
    for name, sentence in (
        ("desk", "table: Input should"),
        ("latin_table", "cannot be read"),
        ("elsewhere", "data.name"),
    ):
        assert sentence in said[said.index(f"  toy/{name}") + 1]
    assert "    full: 9 runs × 3 seeds; digits, nowhere.npz (absent)" in said
    assert find("toy/table1").path == item.path


def test_the_list_has_every_file_and_every_table_and_figure() -> None:
    there = items()
    text = "\n".join(listing(there))
    names = {f"{path.parent.name}/{path.stem}" for path in shipped.folder().glob("*/*.yaml")}
    assert set(there) == {name for name in names if not name.startswith("cluster/")}
    for name in there:
        assert f"\n  {name}\n" in text
    of_papers = {
        "ccn": (["Table I", "Table II", "Table III"], 2),
        "fedala": ([f"Table {n}" for n in (1, 2, 3, "4, left", "4, right", 5, 6, "7, left", "7, right")], 9),
        "fedlaw": ([f"Table {n}" for n in range(1, 12)], 17),
        "fedldf": (["Theorem 1", "Algorithm 1"], 4),
        "fedlws": ([f"Table {n}" for n in range(1, 13)], 11),
    }
    for paper, (others, figures) in of_papers.items():
        places = [place for item in there.values() if item.path.parent.name == paper for place in item.table.items]
        assert len(places) == len(set(places)), f"{paper}: something is listed twice"
        assert set(others) <= set(places)
        numbers = {int(match.group(1)) for place in places if (match := re.match(r"Figure (\d+)", place))}
        assert numbers == set(range(1, figures + 1)), paper
