"""Runs that end before their last round, and the model of the best evaluation."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import ManualClock
from conftest import simulate, small_files, table, tiny

import raysim
from raysim.api.functions import resume
from raysim.config import Config, ConfigError
from raysim.core.score import Score
from raysim.core.task import Classification, Regression
from raysim.federation import Federation, Round, RunParts, run_round
from raysim.federation.scoreboard import Scoreboard
from raysim.federation.scores import metric_column
from raysim.report import ReportError
from raysim.report.summary import GLOBAL
from raysim.store.documents import about_tensors
from raysim.sweep.scores import scored

MLP: dict[str, Any] = {"name": "mlp", "options": {"hidden": [4]}}


def config(until: dict[str, float] | None = None, **changes: Any) -> Config:
    rounds = {"total": 12, "participation": 0.4, "evaluate_every": 2, "checkpoint_every": 5}
    return tiny(rounds=rounds | ({"until": until} if until else {}), **{"model": MLP} | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing ends early, with the model of every round."""
    folder: Path = tmp_path_factory.mktemp("whole")
    simulate(config(record={"traces": "rounds", "keep_best": True}), folder)
    return folder


def scores(folder: Path, column: str = "accuracy") -> dict[int, float]:
    rounds = table(folder, "rounds")
    return {int(t): float(score) for t, score in zip(rounds["round"], rounds[column], strict=True) if score == score}


def test_a_target_ends_the_run_at_the_first_evaluation_that_meets_it(whole: Path, tmp_path: Path) -> None:
    for column, meets in (("accuracy", float.__ge__), ("loss", float.__le__)):
        found = scores(whole, column)
        target = sorted(found.values())[len(found) // 2]
        last = next(t for t, score in found.items() if meets(score, target))
        assert 0 < last < 11
        run = simulate(config({column: target}), tmp_path / column)
        rounds = {"total": last + 1, "participation": 0.4, "evaluate_every": 2}
        shorter = simulate(tiny(rounds=rounds, model=MLP), tmp_path / f"{column}-")
        result = json.loads((tmp_path / column / "result.json").read_text())
        assert result["rounds"] == len(table(tmp_path / column, "rounds")["round"]) == last + 1
        assert result["ended"].startswith(f"{column} {found[last]:.4f}")
        assert run.sha256() == shorter.sha256()


def test_patience_counts_evaluations_without_a_better_score(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"participation": 0.4, "evaluate_every": 1, "checkpoint_every": 5}
    local = {"lr": 0.9}
    simulate(tiny(rounds=settings | {"total": 12}, local=local, model=MLP), tmp_path / "whole")
    found = list(scores(tmp_path / "whole").values())
    ends = next(t for t in range(2, 12) if max(found[t - 1 : t + 1]) <= max(found[: t - 1]))
    assert ends < 11
    ended = settings | {"total": 12, "until": {"patience": 2}}
    simulate(tiny(rounds=ended, local=local, model=MLP), tmp_path / "ended")
    assert json.loads((tmp_path / "ended/result.json").read_text())["rounds"] == ends + 1


def test_a_test_that_a_longer_run_would_not_have_made_does_not_end_it(tmp_path: Path) -> None:
    """A model that stands still is tested after 2, 4 and 6 rounds, and then no evaluation of the last two was the best. One
    that ended after 3 rounds was tested there as well."""
    settings: dict[str, Any] = {"participation": 0.4, "evaluate_every": 2, "until": {"patience": 2}}
    still: dict[str, Any] = {"local": {"lr": 1e-12}, "model": MLP}
    once = simulate(tiny(rounds=settings | {"total": 10}, **still), tmp_path / "once")
    simulate(tiny(rounds=settings | {"total": 3}, **still), tmp_path / "extended")
    run = resume(tmp_path / "extended", rounds__total=10)
    assert run.result["rounds"] == once.t == 6
    assert run.result["sha256"] == once.sha256()


def test_a_test_that_a_longer_run_would_not_have_made_is_in_no_mean(tmp_path: Path) -> None:
    rounds = {"participation": 0.4, "evaluate_every": 2}
    simulate(tiny(rounds=rounds | {"total": 6}, model=MLP), tmp_path / "longer")
    simulate(tiny(rounds=rounds | {"total": 3}, model=MLP), tmp_path / "extended")
    resume(tmp_path / "extended", rounds__total=6)
    longer, extended = map(raysim.load, (tmp_path / "longer", tmp_path / "extended"))
    assert 2 in scores(tmp_path / "extended") and 2 not in scores(tmp_path / "longer")
    assert extended.result["last10"] == longer.result["last10"]
    for name in ("last10", "best10", "best10 deviation"):
        assert scored(extended, GLOBAL, name) == scored(longer, GLOBAL, name)


def test_an_extended_run_that_is_tested_no_more_ends_without_a_score(tmp_path: Path) -> None:
    simulate(tiny(rounds={"total": 3, "evaluate_every": 5}, model=MLP), tmp_path)
    result = resume(tmp_path, rounds__total=4, evaluate={"global": False}).result
    assert result["rounds"] == 4 and result["final"] is None and result["last10"] is None


def test_the_best_model_may_be_that_of_a_test_that_does_not_count() -> None:
    board = Scoreboard(config({"patience": 2}), Classification())
    for t, (score, counts) in enumerate([(0.5, True), (0.9, False), (0.6, True), (0.6, True)]):
        board.add(t, {"accuracy": score}, 1.0, counts)
    assert board.best == (1, 0.9)
    assert board.ended is None  # 0.6 was better than 0.5, and one evaluation followed
    board.add(4, {"accuracy": 0.6}, 1.0)
    assert "the last 2" in str(board.ended)


def test_a_score_that_is_no_number_is_never_the_best() -> None:
    for task, scores, best in (
        (Classification(), [math.nan, 0.25, math.nan, 0.75, 0.5], (3, 0.75)),
        (Regression(), [math.nan, 4.0, math.nan, 2.0, 3.0], (3, 2.0)),
    ):
        board, metric = Scoreboard(config({"patience": 2}), task), task.metrics[0]
        column = metric_column(metric.name)
        better = [board.add(t, {column: score}, 1.0) for t, score in enumerate(scores)]
        assert better == [False, True, False, True, False]
        assert (board.best, board.since_best) == (best, 1)
        assert metric.best(scores) == best[1]
    assert math.isnan(metric.best([math.nan]))
    board = Scoreboard(config({"patience": 2}), task)
    assert [board.add(t, {column: math.nan}, 1.0) or board.ended is not None for t in range(2)] == [False, True]


def ten_seconds(run: RunParts, t: int, **options: Any) -> Round:
    """A round that takes so long, by the clock of the run."""
    run.spec.clock.sleep(10)
    return run_round(run, t, **options)


def test_time_ends_the_run_at_an_evaluation(tmp_path: Path) -> None:
    """Which every second round has: 25 s are over in the third."""
    simulate(config({"seconds": 25}), tmp_path, run_round=ten_seconds, clock=ManualClock())
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rounds"] == 4 and result["final"] is not None and "seconds" in result["ended"]
    assert table(tmp_path, "rounds")["wall"].tolist() == [10, 20, 30, 40] and result["seconds"] == 40


def test_simulated_time_ends_the_run_at_an_evaluation_and_after_a_resume(tmp_path: Path) -> None:
    """Rounds of 2 s, every second one evaluated: 5 s are over in the third."""
    clock = {"latency": 2.0}
    ended = simulate(config({"sim_seconds": 5}, clock=clock), tmp_path / "once")
    result = json.loads((tmp_path / "once/result.json").read_text())
    assert result["rounds"] == 4 and result["ended"] == "5 simulated seconds are over"
    assert table(tmp_path / "once", "rounds")["sim_clock"].tolist() == [2, 4, 6, 8]
    died = Federation(config({"sim_seconds": 5}, clock=clock), tmp_path / "died")
    while died.step() is not None:
        pass
    died.close()
    assert resume(tmp_path / "died").result["sha256"] == ended.sha256()
    with pytest.raises(ConfigError, match=r"rounds.until.sim_seconds: needs a clock"):
        config({"sim_seconds": 5})


def test_time_between_rounds_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(raysim.federation, "Federation", partial(Federation, run_round=ten_seconds, clock=clock))
    simulation = raysim.stream(config({"seconds": 121}), out=tmp_path / "run")
    for round in simulation:
        clock.sleep(3600)  # the work of the loop's body
        if round.number == 3:
            simulation.save()
    assert simulation.result is not None
    assert (simulation.result["rounds"], simulation.result["ended"]) == (12, None)
    assert table(tmp_path / "run", "rounds")["wall"].tolist() == [10 * t for t in range(1, 13)]
    assert simulation.result["seconds"] == 120


def test_a_run_that_died_before_it_ended_ends_where_it_would_have(whole: Path, tmp_path: Path) -> None:
    target = sorted(scores(whole).values())[3]
    reference = simulate(config({"accuracy": target}), tmp_path / "reference")
    died = Federation(config({"accuracy": target}), tmp_path / "died")
    while died.step() is not None:
        pass
    died.close()  # the model and result.json are not written
    run = resume(tmp_path / "died")
    assert run.result["sha256"] == reference.sha256() and run.result["rounds"] == reference.t
    assert resume(tmp_path / "died").result["seconds"] == run.result["seconds"]  # it is complete


def test_a_run_that_failed_says_so_until_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    simulation = raysim.stream(config(), out=tmp_path / "run")
    for round in simulation:
        if round.number == 6:
            monkeypatch.setattr(Federation, "step", broken)
            with pytest.raises(OSError, match="disk"):
                next(simulation)
            break
    run = raysim.load(tmp_path / "run")
    assert run.state == "failed" and (run.folder / "failed.txt").read_text() == "the disk is gone\n"
    monkeypatch.undo()
    assert resume(tmp_path / "run").state == "finished"
    assert not (tmp_path / "run/failed.txt").exists()


def test_an_ended_run_goes_on_when_it_is_asked_to(whole: Path, tmp_path: Path) -> None:
    assert simulate(config({"seconds": 10}), tmp_path, run_round=ten_seconds, clock=ManualClock()).t == 2
    run = resume(tmp_path, rounds__until__seconds=None)
    assert run.result["rounds"] == 12 and run.result["ended"] is None
    assert run.result["sha256"] == json.loads((whole / "result.json").read_text())["sha256"]


def test_the_best_model_is_that_of_the_best_evaluation(whole: Path, tmp_path: Path) -> None:
    found = scores(whole)
    best = max(found, key=lambda t: (found[t], -t))
    run = raysim.load(whole)
    assert run.result["best_round"] == best
    from safetensors.torch import load_file

    traced = load_file(whole / "traces" / f"round-{best + 1:04d}" / "after.safetensors")
    model = run.model("best").state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in traced.items())
    simulate(config(), tmp_path)
    with pytest.raises(Exception, match=r"record\.keep_best"):
        raysim.load(tmp_path).model("best")


def test_a_model_that_is_not_of_the_best_round_is_not_taken_for_it(tmp_path: Path) -> None:
    """Rounds 1 to 3 are run with `record.keep_best`, 4 to 6 without, 7 to 9 with it: at the end 8 is the best, or 4."""
    for last, said in ((0.5, None), (0.3, r"is not of round 4, the best, whose model was not saved")):
        scores = [0.1, 0.3, 0.2, 0.4, 0.2, 0.2, 0.3, last, 0.1]
        folder = tmp_path / str(last)

        def scored(run: RunParts, t: int, scores: list[float] = scores, **options: Any) -> Round:
            return replace(run_round(run, t, **options), score=Score(10, 1.0, {"accuracy": (10 * scores[t], 10)}))

        messages: list[str] = []
        for kept, rounds in ((True, 3), (False, 3), (True, 3)):
            settings = tiny(rounds={"total": 9, "evaluate_every": 1}, record={"keep_best": kept}, model=MLP)
            run = Federation(settings, folder, resume=folder.exists(), run_round=scored)
            for _ in range(rounds):
                messages += run.step()["messages"]
            run.checkpoint()
            if run.complete:
                run.finish()
            run.close()
        (message,) = messages
        assert "record.keep_best: the model of round 4, the best so far, was not saved" in message
        if said is None:
            raysim.load(folder).model("best")
            assert about_tensors(folder / "best.safetensors") == {"round": "7"}
        else:
            with pytest.raises(ReportError, match=said):
                raysim.load(folder).model("best")


def test_a_run_that_died_after_its_best_round_says_nothing(tmp_path: Path) -> None:
    settings = tiny(rounds={"total": 6, "evaluate_every": 1}, record={"keep_best": True}, model=MLP)

    def scored(run: RunParts, t: int, **options: Any) -> Round:
        return replace(run_round(run, t, **options), score=Score(10, 1.0, {"accuracy": (t, 10)}))

    run = Federation(settings, tmp_path, run_round=scored)
    run.step()
    run.checkpoint()
    run.step()
    run.close()  # its second round is not saved, but its best model is
    again = Federation(settings, tmp_path, resume=True, run_round=scored)
    assert again.t == 1
    assert not again.step()["messages"]
    again.close()


def test_a_full_disk_is_named_and_keeps_the_best_model_before(tmp_path: Path) -> None:
    federation = Federation(config(record={"keep_best": True}), tmp_path)
    federation.writer.keep_best(1)
    before = (tmp_path / "best.safetensors").read_bytes()
    with small_files(len(before) - 1), pytest.raises(OSError, match=r"best\.safetensors"):
        federation.writer.keep_best(3)
    assert [path.name for path in tmp_path.glob("*best*")] == ["best.safetensors"]
    assert not [*tmp_path.glob(".*")]
    assert (tmp_path / "best.safetensors").read_bytes() == before
    federation.close()


def test_what_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    for changes, place in (
        ({"evaluate": {"global": False}, "until": {"loss": 0.1}}, "rounds.until.loss"),
        ({"evaluate": {"global": False}, "until": {"patience": 2}}, "rounds.until.patience"),
        ({"evaluate": {"global": False}, "record": {"keep_best": True}}, "record.keep_best"),
    ):
        with pytest.raises(ConfigError, match=place):
            config(changes.pop("until", None), **changes)
    regression = {"data": {"name": "diabetes", "partition": {"iid_equal": {"clients": 8}}}, "model": {"name": "mlp"}}
    with pytest.raises(ConfigError, match=r"rounds.until.accuracy: regression"):
        Federation(config({"accuracy": 0.9}, **regression), tmp_path)
