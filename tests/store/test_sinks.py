"""What goes to TensorBoard, MLflow, Weights & Biases and Prometheus is what the tables hold, once, also after a resume."""

from __future__ import annotations

import math
import os
import re
import sys
import time
import urllib.request
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from conftest import simulate, table, tiny

import raysim
from raysim.config import Config, ConfigError, LocalEngineConfig, to_dict
from raysim.engine.base import StateLost
from raysim.federation import Federation, Round, RunParts, run_round
from raysim.store.sinks import MLflow, Sink, Sinks, TensorBoard, Wandb

ROUNDS = {"total": 5, "participation": 0.4, "evaluate_every": 2, "checkpoint_every": 2}


def with_sinks(*sinks: Any, **changes: Any) -> Config:
    return tiny(rounds=ROUNDS, server=["fedlws"], record={"sinks": list(sinks)}, **changes)


def recorded(folder: Path) -> dict[str, dict[int, float]]:
    """Name -> round, from 1 -> value, as the tables have it."""
    columns, notes = table(folder, "rounds"), table(folder, "notes")
    found = {
        name: {t + 1: v for t, v in enumerate(column) if not math.isnan(v)}
        for name, column in columns.items()
        if name != "round"
    }
    for name in {*notes["name"][notes["layer"] == None]}:  # noqa: E711 an array of names and None
        here = (notes["name"] == name) & (notes["layer"] == None)  # noqa: E711
        found[f"fedlws.{name}"] = {t + 1: v for t, v in zip(notes["round"][here], notes["value"][here], strict=True)}
    return {name: values for name, values in found.items() if values}


def test_tensorboard_has_every_round_once_after_a_crash(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = with_sinks("tensorboard")
    crashed = Federation(config, tmp_path / "run")
    for _ in range(3):
        crashed.step()
    crashed.write_down()  # round 2, which is after the last checkpoint
    crashed.writer.sinks._open["TensorBoard"]._writer.flush()  # type: ignore[attr-defined]
    crashed.engine.close()
    simulate(config, tmp_path / "run", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = recorded(tmp_path / "run")
    assert found.keys() == expected.keys() >= {"accuracy", "train_loss", "bytes_up", "fedlws.model_gamma"}
    assert [step for step, _ in found["accuracy"]] == [2, 4, 5]
    for tag, values in expected.items():
        assert [step for step, _ in found[tag]] == list(values)
        assert [value for _, value in found[tag]] == pytest.approx(list(values.values()), rel=1e-6)


def test_tensorboard_has_every_round_once_after_states_were_lost(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran: list[int] = []

    def lossy(run: RunParts, t: int, **options: Any) -> Round:
        ran.append(t)
        done = run_round(run, t, **options)
        if len(ran) == 4:
            raise StateLost("gone")
        return done

    simulate(with_sinks("tensorboard"), tmp_path, run_round=lossy)
    assert ran == [0, 1, 2, 3, 2, 3, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [1, 2, 3, 4, 5]


def test_mlflow_has_every_round_and_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs raysim[mlflow]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    config = with_sinks({"mlflow": {"uri": uri, "experiment": "tests"}})
    stopped = Federation(config, tmp_path / "run")
    for _ in range(2):
        stopped.step()
    stopped.checkpoint()
    stopped.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests").experiment_id
    assert [run.info.status for run in client.search_runs([experiment])] == ["KILLED"]
    simulate(config, tmp_path / "run", resume=True)
    (run,) = client.search_runs([experiment])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    assert run.data.params["local.lr"] == str(to_dict(config)["local"]["lr"])
    for name, values in recorded(tmp_path / "run").items():
        found = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        assert found == pytest.approx(values)


def test_wandb_gets_every_round_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs raysim[wandb]")
    logged: list[tuple[int, dict[str, float]]] = []
    real = wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda run, data, step: (logged.append((step, data)), real(run, data, step=step))
    )
    simulate(with_sinks({"wandb": {"mode": "offline", "project": "tests"}}), tmp_path / "run")
    (events,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    identity = (tmp_path / "run" / "wandb.id").read_text().split()[0]
    assert events.name == f"run-{identity}.wandb"
    assert b"model_gamma" in events.read_bytes()
    for name, values in recorded(tmp_path / "run").items():
        assert {step: data[name] for step, data in logged if name in data} == pytest.approx(values)


def test_a_run_has_one_identifier_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server, experiment or project does not know that of the first."""
    opened: list[tuple[str, str]] = []

    class Client:
        def __init__(self, tracking_uri: str):
            self.tracking_uri = tracking_uri

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id=name)

        def create_run(self, experiment: str, run_name: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}@{self.tracking_uri}"))

        def log_batch(self, run: str, **_: Any) -> None: ...

        def update_run(self, run: str, status: str) -> None:
            opened.append((self.tracking_uri, run))

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Param=tuple))
    (tmp_path / "mlflow.id").write_text("before")  # as raysim 0.1 did
    for server, experiment in (("a", "x"), ("b", "x"), ("b", "x"), ("b", "y")):
        MLflow(server, experiment).open(tmp_path, "run", {}, 0)
        if server == "a":
            (tmp_path / "mlflow.id").unlink()
            MLflow(server, experiment).open(tmp_path, "run", {}, 0)
    assert opened == [("a", "before"), ("a", "x@a"), ("b", "x@b"), ("b", "x@b"), ("b", "y@b")]

    ids: list[str] = []
    wandb = SimpleNamespace(init=lambda id, **_: ids.append(id), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for project in ("one", "one", "other"):
        Wandb(project).open(tmp_path, "run", {}, 0)
    assert ids[0] == ids[1] != ids[2]


def test_a_sink_changes_no_bit_and_its_failure_ends_no_run(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Broken(Sink):
        package: ClassVar[str] = "torch"

        def open(self, *_: Any) -> Any:
            class Full:
                def write(self, step: int, values: object) -> None:
                    if step == 2:
                        raise OSError("the disk is full")

                def close(self, finished: bool) -> None:
                    raise AssertionError("it was given up")

            return Full()

    federation = Federation(tiny(rounds=ROUNDS, server=["fedlws"]), tmp_path / "run")
    federation.writer.sinks = Sinks((Broken(),), tmp_path, "run", {}, 0)
    failures = []
    while (shown := federation.step()) is not None:
        failures += shown["messages"]
    digest = federation.finish()["sha256"]
    federation.close()
    assert failures == ["Broken failed and receives no more of this run: the disk is full"]
    assert len(table(tmp_path / "run", "rounds")["round"]) == 5
    assert digest == simulate(with_sinks("tensorboard"), tmp_path / "with").sha256()


@pytest.mark.parametrize("fails", ["write", "close"])
def test_a_sink_that_fails_at_the_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """No round is left whose messages could say so."""

    class Full:
        def write(self, step: int, values: object) -> None:
            if fails == "write" and step == 2:
                raise OSError("the disk is full")

        def close(self, finished: bool) -> None:
            raise OSError("the disk is full")

    monkeypatch.setattr(TensorBoard, "open", lambda *_: Full())
    config = tiny(rounds={"total": 2, "participation": 0.4}, record={"sinks": ["tensorboard"]}, engine="local")
    with pytest.warns(UserWarning, match="TensorBoard failed and receives no more of this run: the disk is full"):
        run = raysim.run(config, out=tmp_path / "finished", progress=False)
    assert run.state == "finished"
    complaint = {"round": 1, "message": "TensorBoard failed and receives no more of this run: the disk is full"}
    assert [{name: row[name] for name in complaint} for row in run["events"].to_pylist()] == [complaint]
    with raysim.stream(config, out=tmp_path / "stopped") as stopped:
        next(stopped)
        if fails == "write":
            next(stopped)
    said = [row["message"] for row in raysim.load(tmp_path / "stopped")["events"].to_pylist()]
    assert said == [complaint["message"]]


def test_of_a_row_the_numbers_are_sent(tmp_path: Path) -> None:
    """Columns from outside may be text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    row = {"accuracy": 0.5, "clients_ok": 3, "metric.auc": None, "weather": "fine"}
    Sinks((), tmp_path, "run", {}, 0).write(0, row)
    sinks = Sinks((TensorBoard(),), tmp_path, "run", {}, 0)
    sinks.write(0, row)
    sinks.close(finished=True)
    assert sinks.complaints() == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]} == {"accuracy": 0.5, "clients_ok": 3}


def test_a_missing_package_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wandb, "package", "wandb_that_nobody_has")
    with pytest.raises(ConfigError, match=r"record\.sinks: wandb needs the package .*pip install 'raysim\[wandb\]'"):
        Federation(with_sinks("wandb"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="tensorboard"):
        with_sinks("tensorbord")


def test_sinks_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"record\.sinks\.1: 'mlflow' is listed twice"):
        with_sinks({"mlflow": {"uri": "http://a"}}, {"mlflow": {"uri": "http://b"}})
    with pytest.raises(ConfigError, match=r"record\.sinks\.0: ray_metrics is of a Ray cluster.*Set engine: ray"):
        with_sinks("ray_metrics")


def test_ray_metrics_have_a_cluster_that_publishes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a run starts does; one that was started without is refused."""
    import ray

    from raysim.engine.ray.cluster import cluster
    from raysim.engine.ray.private import METRICS, private
    from raysim.federation import remote

    monkeypatch.delenv(METRICS, raising=False)
    published = {}
    for asked in (False, True):
        with private(asked):
            published[asked] = os.environ[METRICS]
    assert published == {False: "0", True: "1"}
    assert METRICS not in os.environ
    asked_for: list[bool] = []
    monkeypatch.setattr(remote, "cluster", lambda *args: asked_for.append(args[3]) or nullcontext())
    monkeypatch.setattr(remote, "stored", lambda data: data)
    for sinks in (["ray_metrics"], ["tensorboard"]):
        with remote.session(with_sinks(*sinks, engine="ray")):
            pass
    assert asked_for == [True, False]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setenv(METRICS, "0")
    with pytest.raises(ConfigError, match=METRICS), cluster("somewhere:6379", metrics=True):
        pass


def test_prometheus_finds_the_numbers_of_a_run(tmp_path: Path, cluster: Any) -> None:
    import ray

    config = replace(with_sinks("ray_metrics", engine="ray"), engine=LocalEngineConfig())
    simulate(config, tmp_path)  # this process is connected to the cluster, as a driver is
    numbers = {name: values[5] for name, values in recorded(tmp_path).items() if 5 in values}
    numbers |= {"round": 5, "clients_per_second": numbers["clients_ok"] / numbers["seconds"]}
    names = ("round", "accuracy", "loss", "train_loss", "bytes_up", "clients_ok", "clients_per_second")
    expected = {name: pytest.approx(numbers[name]) for name in names}
    [node] = [node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    found: dict[str, float] = {}
    while {
        name: found.get(name) for name in names
    } != expected:  # processes report now and then, at any moment of a run
        print(found)
        time.sleep(0.1)
        with urllib.request.urlopen(url) as answer:
            gauges = re.findall(
                r'^\w*raysim_(\w+)\{[^}]*run="tiny"[^}]*\} (\S+)$', answer.read().decode(), re.MULTILINE
            )
        found = {name: float(value) for name, value in gauges}
