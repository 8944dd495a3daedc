"""raysim from Python: runs are started, streamed, stopped, continued and looked at, in-process as on Ray."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import simulate, table, tiny

import raysim
from raysim.api.preview import preview
from raysim.config import ConfigError, load, to_dict
from raysim.config.shipped import find
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.federation import sample
from raysim.methods import CLIENTS
from raysim.methods.fedlws import FedLWS
from raysim.report import ReportError

FOUR = {"rounds": {"total": 4, "participation": 0.4, "evaluate_every": 2, "checkpoint_every": 1}}


def settings(**changes: Any) -> dict[str, Any]:
    return to_dict(tiny(**(FOUR | changes)))


def test_all_that_is_promised_is_there() -> None:
    for name in raysim.__all__:
        assert getattr(raysim, name) is not None


def test_run_is_what_the_engine_plays(tmp_path: Path) -> None:
    run = raysim.run(settings(), out=tmp_path / "run", progress=False)
    assert run.result["sha256"] == simulate(tiny(**FOUR), tmp_path / "straight").sha256()
    assert run.state == "finished"
    assert run["rounds"].num_rows == 4


def test_settings_change_a_configuration(tmp_path: Path) -> None:
    run = raysim.run(tiny(**FOUR), out=tmp_path / "run", rounds__total=2, server=["fedlws"], local__lr=0.05)
    changed = tiny(**FOUR, server=["fedlws"])
    assert (run.rounds, run.stack, run.config["local"]["lr"]) == (2, "fedavg + fedlws", 0.05)
    assert run.config["data"] == to_dict(changed)["data"]


def test_settings_are_values_and_objects() -> None:
    """A path, NumPy's numbers, a method that was made here, and a number that YAML would take for text."""
    config = raysim.read_config(
        "quickstart", data__root=Path("/d # 2"), seed=np.int64(3), server=[FedLWS(beta=1e-5)],
        model={"name": "vit", "options": {"dropout": 1e-5}},
    )  # fmt: skip
    assert (config.data.root, config.seed, config.server) == ("/d # 2", 3, (FedLWS(beta=1e-5),))
    assert config.model.options == {"dropout": 1e-5}
    assert raysim.read_config("quickstart", seed=3) == load(find("quickstart"), ["seed=3"])


def test_a_configuration_that_comes_with_raysim(tmp_path: Path) -> None:
    assert raysim.read_config("quickstart", rounds__total=3).rounds.total == 3


def test_what_is_wrong_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        raysim.run(settings() | {"rounds": {"totl": 3}}, out=tmp_path / "run", local__lr="fast")
    assert "Did you mean 'total'" in str(error.value)
    assert "local.lr" in str(error.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="--address: engine is local"):
        raysim.run(settings(record={"dir": str(tmp_path / "runs")}), address="127.0.0.1:1")
    assert not list((tmp_path / "runs").iterdir())


def test_a_loop_is_left_and_taken_up_again(tmp_path: Path) -> None:
    whole = raysim.run(settings(), out=tmp_path / "whole")
    with raysim.stream(settings(), out=tmp_path / "run") as simulation:
        for round in simulation:
            if round.number == 2:
                break
        assert (round.rounds, round.clients_ok, round.accuracy) == (
            4,
            3,
            table(tmp_path / "whole", "rounds")["accuracy"][1],
        )
        between = {name: tensor.clone() for name, tensor in simulation.model().state_dict().items()}
        assert [round.number for round in simulation] == [3, 4]
    assert simulation.result["sha256"] == whole.result["sha256"]
    after = simulation.model().state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in whole.model().state_dict().items())
    assert any(not torch.equal(after[name], tensor) for name, tensor in between.items())


def test_a_stream_that_is_dropped_can_be_resumed(tmp_path: Path) -> None:
    whole = raysim.run(settings(), out=tmp_path / "whole")
    for round in raysim.stream(settings(), out=tmp_path / "run"):
        if round.number == 3:
            break
    gc.collect()
    run = raysim.load(tmp_path / "run")
    assert run.state == "stopped"
    assert raysim.resume(run).result["sha256"] == whole.result["sha256"]


def test_a_finished_run_is_extended(tmp_path: Path) -> None:
    short = raysim.run(settings(), out=tmp_path / "run", rounds__total=2)
    longer = raysim.resume(short, rounds__total=4)
    assert longer.result["sha256"] == raysim.run(settings(), out=tmp_path / "whole").result["sha256"]
    with pytest.warns(UserWarning, match=r"complete, so evaluate\.batch_size has no effect"):
        raysim.resume(longer, evaluate__batch_size=7)
    for change in ({"local__lr": 0.5}, {"engine__local__threads": 2}):
        with pytest.raises(ConfigError, match=r"(local\.lr|engine\.threads) was"):
            raysim.resume(longer, rounds__total=6, **change)


@dataclass(frozen=True)
class Interrupts(ClientMethod):
    """Somebody presses Ctrl-C while a client trains, in the second round."""

    client: int

    def finish(self, run: LocalRun, upload: Upload) -> None:
        if (run.t, run.client) == (1, self.client):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_for_the_round_and_the_stream_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = raysim.run(settings(), out=tmp_path / "whole")
    monkeypatch.setitem(CLIENTS, "interrupts", Interrupts)
    simulation = raysim.stream(
        settings(client=[{"interrupts": {"client": sample(3, 1, 8, 3)[0]}}]), out=tmp_path / "run"
    )
    next(simulation)
    next(simulation)  # in which it is pressed
    with pytest.raises(KeyboardInterrupt, match="raysim resume"):
        next(simulation)
    assert simulation.result is None
    assert [round.number for round in simulation] == [3, 4]
    assert simulation.result["sha256"] == whole.result["sha256"]


class Enough(Exception):
    pass


def stops_after(number: int, seen: list[raysim.RoundResult]) -> Any:
    def on_round(round: raysim.RoundResult) -> None:
        seen.append(round)
        if round.number == number:
            raise Enough

    return on_round


def test_a_callback_sees_each_round_and_its_error_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    """Although checkpoints are rare: the rounds that it has seen are saved."""
    rare = settings(rounds={"total": 4, "participation": 0.4, "evaluate_every": 2, "checkpoint_every": 100})
    whole = raysim.run(rare, out=tmp_path / "whole")
    seen: list[raysim.RoundResult] = []
    with pytest.raises(Enough):
        raysim.run(rare, out=tmp_path / "run", on_round=stops_after(3, seen))
    stopped = raysim.load(tmp_path / "run")
    assert (stopped.state, stopped.rounds_done) == ("stopped", 3)
    with pytest.warns(DeprecationWarning, match="is now Run.rounds_done"):
        assert stopped.played == 3
    with pytest.warns(DeprecationWarning, match="is now raysim.RoundResult"):
        assert raysim.PlayedRound is raysim.RoundResult
    longer = raysim.resume(stopped, on_round=stops_after(5, seen))
    assert longer.result["sha256"] == whole.result["sha256"]
    assert [round.number for round in seen] == [1, 2, 3, 4]
    assert [round.accuracy for round in seen] == [
        None if np.isnan(score) else score for score in table(tmp_path / "whole", "rounds")["accuracy"]
    ]


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def modes() -> tuple[object, ...]:
    return (
        torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
    )  # fmt: skip


CALLERS: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "set": lambda: nullcontext((torch.set_grad_enabled(False), torch.set_default_dtype(torch.float64))),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_a_run_computes_whatever_the_modes_of_its_caller(tmp_path: Path, caller: str, as_before: None) -> None:
    """And leaves them: in its rounds, between them and after it."""
    config = tiny(rounds={"total": 2})
    expected = raysim.run(config, out=tmp_path / "plain").result["sha256"]
    seen = []
    with CALLERS[caller]():
        torch.set_num_threads(2)
        before = modes()
        preview(config)
        seen.append(modes())
        run = raysim.run(config, out=tmp_path / "run", on_round=lambda _: seen.append(modes()))
        seen.append(modes())
    assert run.result["sha256"] == expected and seen == [before] * 4


def test_what_a_caller_sets_between_rounds_is_not_what_a_run_computes_with(tmp_path: Path, as_before: None) -> None:
    def sets(_: raysim.RoundResult) -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)

    raysim.run(tiny(), out=tmp_path / "run", on_round=sets)
    assert modes()[:2] == (3, False)


def test_a_script_may_change_its_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is that of the moment in which it was given, and is shown as it was."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    stream = raysim.stream(tiny(), out="run")
    assert "runs/other" in repr(raysim.run(tiny(), out="runs/other")) and str(tmp_path) not in repr(stream.folder.name)
    monkeypatch.chdir(elsewhere)
    next(stream)
    monkeypatch.chdir(tmp_path)
    list(stream)
    run, dropped = raysim.load("run"), raysim.stream(tiny(), out="dropped")
    next(dropped)
    dropped.save()
    dropped.stop()
    assert str(tmp_path) not in repr(run) + run._repr_html_()
    with pytest.raises(ReportError, match=r"^dropped: has no final model yet; `raysim resume dropped` finishes"):
        raysim.load("dropped").model()
    with pytest.raises(ConfigError, match=r"^out: dropped is not empty.*`raysim resume dropped`"):
        raysim.run(tiny(), out="dropped")
    monkeypatch.chdir(elsewhere)
    assert run["rounds"].num_rows == tiny().rounds.total and run.model() and not [*elsewhere.iterdir()]
    longer = raysim.resume(run, rounds__total=tiny().rounds.total + 1)
    assert longer["rounds"].num_rows == tiny().rounds.total + 1
    assert not [*elsewhere.iterdir()]
    texts = [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".json", ".yaml")]
    assert texts and not [path for path in texts if str(tmp_path) in path.read_text()]


def test_a_run_is_played_by_one_at_a_time(tmp_path: Path) -> None:
    with raysim.stream(settings(), out=tmp_path / "run") as simulation:
        next(simulation)
        with pytest.raises(ConfigError, match="another process uses this run"):
            raysim.resume(tmp_path / "run")


def test_runs_on_ray_in_one_kernel_leak_no_cluster(tmp_path: Path, idle: Callable[[], bool]) -> None:
    """Inside a cluster that is there already, as in a notebook that has called `ray.init`."""
    import ray

    on_ray = settings(engine={"ray": {"clients_per_actor": 3}})
    run = raysim.run(on_ray, out=tmp_path / "run", progress=False)
    local = raysim.run(settings(), out=tmp_path / "local")
    assert run.result["sha256"] == local.result["sha256"]
    assert idle()
    seen: list[raysim.RoundResult] = []
    with pytest.raises(Enough):
        raysim.run(on_ray, out=tmp_path / "called", on_round=stops_after(2, seen))
    assert idle()
    resumed = raysim.resume(tmp_path / "called", on_round=stops_after(5, seen))
    assert resumed.result["sha256"] == local.result["sha256"]
    assert [round.number for round in seen] == [1, 2, 3, 4]
    simulation = raysim.stream(on_ray, out=tmp_path / "streamed")
    next(simulation)
    now = simulation.model().state_dict()
    simulation.stop()
    assert ray.is_initialized()
    assert idle()  # no actor is left
    with raysim.stream(settings(), out=tmp_path / "streamed local") as simulation:
        next(simulation)
        assert all(torch.equal(tensor, now[name]) for name, tensor in simulation.model().state_dict().items())
