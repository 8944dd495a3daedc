"""Ray Tune runs a configuration with each trial's settings and sees the accuracy of every evaluated round."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import needs_plain_path, simulate, table
from torch import nn

import raysim
import raysim.sweep.tune
from raysim.config import ConfigError, LocalEngineConfig, load
from raysim.registry import REGISTRY

BASE = """
data: {name: {synthetic: {samples: 60, test_samples: 20}}, partition: {iid_equal: {clients: 4}}}
model: {name: mlp, options: {hidden: [8]}}
rounds: {total: 4, participation: 0.5, evaluate_every: 2}
local: {batch_size: 5, lr: 0.1}
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    return Path("base.yaml")


@needs_plain_path
def test_trials_are_runs_that_report_every_evaluation(cluster: object, base: Path, tmp_path: Path) -> None:
    tune = pytest.importorskip("ray.tune", reason="needs raysim[tune]")
    tuner = tune.Tuner(
        raysim.sweep.tune.trainable(base, ["server=[fedlws]", "engine.ray.threads=2"]),
        param_space={"local.lr": tune.grid_search([0.05, 0.2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True, max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "trials"), verbose=0),
    )
    results = tuner.fit()
    assert results.num_errors == 0
    assert len(results) == 2
    for result in results:
        lr = result.config["local.lr"]
        straight = tmp_path / str(lr)
        simulate(load(base, ["server=[fedlws]", f"local.lr={lr}", "engine.local.threads=2"]), straight)
        rounds, seen = table(straight, "rounds"), result.metrics_dataframe
        assert seen["round"].tolist() == [2, 4]
        for name in ("accuracy", "loss", "train_loss"):
            assert seen[name].tolist() == rounds[name][[1, 3]].tolist()  # the very bits
    first = Path(results[0].path, "run/config.yaml")  # Tune puts the runs of actors that it uses again elsewhere
    assert load(first).engine == LocalEngineConfig(threads=2)
    best = results.get_best_result()
    assert best.metrics["loss"] == min(result.metrics["loss"] for result in results)


@needs_plain_path
def test_trials_know_what_the_script_has_added(cluster: object, base: Path, tmp_path: Path) -> None:
    tune = pytest.importorskip("ray.tune", reason="needs raysim[tune]")

    class Flat(nn.Module):
        def __init__(self, inputs: raysim.Inputs):
            super().__init__()
            self.features, self.head = nn.Flatten(), nn.Linear(math.prod(inputs.shape), inputs.classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x))

    REGISTRY.register("model", "our_flat", Flat)
    try:
        trials = raysim.sweep.tune.trainable(base, ["model={name: our_flat}", "rounds.total=1"])
    finally:
        del REGISTRY.table("model")["our_flat"]
    run_config = tune.RunConfig(storage_path=str(tmp_path / "trials"), verbose=0)
    results = tune.Tuner(trials, run_config=run_config).fit()
    assert results.num_errors == 0, results.errors


def test_a_trial_that_died_before_its_report_reports_once_it_goes_on(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each evaluation arrives once, although the trial dies before its second report, and after its first."""
    tune, reports = pytest.importorskip("ray.tune", reason="needs raysim[tune]"), []

    class Died(Exception):
        pass

    def report(metrics: dict[str, float]) -> None:
        if len(reports) == 1:
            reports.append(None)
            raise Died
        reports.append(metrics)

    monkeypatch.setattr(tune, "get_context", lambda: SimpleNamespace(get_trial_dir=lambda: "trial"))
    monkeypatch.setattr(tune, "report", report)
    trial = raysim.sweep.tune.trainable(base)
    Path("trial").mkdir()
    with pytest.raises(Died):
        trial({"rounds.checkpoint_every": 1})
    trial({"rounds.checkpoint_every": 1})
    rounds = table(Path("trial/run"), "rounds")
    assert [one["round"] for one in reports if one] == [2, 4]
    assert [one["accuracy"] for one in reports if one] == rounds["accuracy"][[1, 3]].tolist()


def test_what_is_wrong_shows_before_any_trial(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "some one/python")
    with pytest.raises(RuntimeError, match="some one/python, whose path has a space"):
        raysim.sweep.tune.trainable(base)
    monkeypatch.setattr(sys, "executable", "python")
    with pytest.raises(ConfigError, match="Did you mean 'lr'"):
        raysim.sweep.tune.trainable(base, ["local.lrr=1"])
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(ImportError, match=r"pip install 'raysim\[tune\]'"):
        raysim.sweep.tune.trainable(base)
