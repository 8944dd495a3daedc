"""Sinks: where the numbers of every round go besides the tables, such as TensorBoard, MLflow, Weights & Biases.

`record.sinks` names them, with their settings:

    record: {sinks: [tensorboard, {mlflow: {uri: "http://127.0.0.1:5000"}}, {wandb: {mode: offline}}]}

A sink receives each round's row of the table `rounds` and what methods and instruments report as one number per round,
under the round's number, counted from 1. A resumed run continues the same run of the sink.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from raysim.registry import REGISTRY, Table
from raysim.store.atomic import replacing


class Writer(Protocol):
    """An open sink."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, finished: bool) -> None:
        """`finished`: the run is complete; otherwise it may be resumed."""


@dataclass(frozen=True)
class Sink:
    """An entry of `record.sinks`. The extra of raysim that installs its package has the same name."""

    package: ClassVar[str]
    of_ray: ClassVar[bool] = False
    """Whether its numbers are metrics of a Ray cluster, which has to publish them."""

    @property
    def missing(self) -> str | None:
        """The command that installs what is missing, as a sentence; None where nothing is."""
        if find_spec(self.package):
            return None
        extra = type(self).__name__.lower()
        return f"{extra} needs the package {self.package}: pip install 'raysim[{extra}]'"

    def open(self, folder: Path, name: str, settings: Mapping[str, Any], start: int) -> Writer:
        """A writer for the run `name` in `folder`. Its next round is `start`, from 0."""
        raise NotImplementedError


@dataclass(frozen=True)
class TensorBoard(Sink):
    """Event files in the run's folder: `tensorboard --logdir runs`."""

    package: ClassVar[str] = "tensorboard"

    def open(self, folder: Path, name: str, settings: Mapping[str, Any], start: int) -> Writer:
        return _Events(folder / "tensorboard", start)


class _Events:
    def __init__(self, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        # Rounds after the last checkpoint are repeated, and so written again.
        self._writer = SummaryWriter(str(folder), purge_step=start + 1, flush_secs=5)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, finished: bool) -> None:
        self._writer.close()


@dataclass(frozen=True)
class RayMetrics(Sink):
    """Gauges of Ray, `raysim_accuracy{run="..."}` and so on, which Prometheus collects from a cluster's nodes."""

    package: ClassVar[str] = "ray"
    of_ray: ClassVar[bool] = True

    def open(self, folder: Path, name: str, settings: Mapping[str, Any], start: int) -> Writer:
        return _Gauges(name)


class _Gauges:
    def __init__(self, run: str):
        from ray.util.metrics import Gauge

        self._run, self._gauge, self._gauges = run, Gauge, dict[str, Any]()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        speed = {"clients_per_second": values["clients_ok"] / values["seconds"]} if values["seconds"] else {}
        for name, value in {"round": step, **values, **speed}.items():
            metric = f"raysim_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            if metric not in self._gauges:
                self._gauges[metric] = self._gauge(metric, f"{name} of a raysim run", tag_keys=("run",))
            self._gauges[metric].set(value, {"run": self._run})

    def close(self, finished: bool) -> None:
        pass


@dataclass(frozen=True)
class MLflow(Sink):
    """A run of an MLflow experiment, with every setting as a parameter."""

    package: ClassVar[str] = "mlflow"
    uri: str | None = None
    """The address of the tracking server; null: MLFLOW_TRACKING_URI, or else MLflow's default."""
    experiment: str = "raysim"

    def open(self, folder: Path, name: str, settings: Mapping[str, Any], start: int) -> Writer:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)

        def create() -> str:
            from mlflow.entities import Param

            known = client.get_experiment_by_name(self.experiment)
            experiment = known.experiment_id if known else client.create_experiment(self.experiment)
            run: str = client.create_run(experiment, run_name=name).info.run_id
            params = [Param(path, str(value)) for path, value in _flat(settings).items()]
            for first in range(0, len(params), 100):  # the most that a server takes at once
                client.log_batch(run, params=params[first : first + 100])
            return run

        place = f"{client.tracking_uri}\n{self.experiment}"
        return _MLflowRun(client, _remembered(folder / "mlflow.id", place, create))


class _MLflowRun:
    def __init__(self, client: Any, run: str):
        self._client, self._run = client, run
        client.update_run(run, "RUNNING")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in values.items()])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


@dataclass(frozen=True)
class Wandb(Sink):
    """A run of a Weights & Biases project, with the configuration."""

    package: ClassVar[str] = "wandb"
    project: str = "raysim"
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run's folder; `wandb sync` sends it later."""

    def open(self, folder: Path, name: str, settings: Mapping[str, Any], start: int) -> Writer:
        import wandb

        return _WandbRun(
            wandb.init(
                project=self.project, name=name, mode=self.mode, dir=str(folder), config=dict(settings), resume="allow",
                id=_remembered(folder / "wandb.id", self.project, lambda: secrets.token_hex(4)),
                settings=wandb.Settings(silent=True, console="off"),
            )
        )  # fmt: skip


class _WandbRun:
    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)  # wandb ignores a step that it has already

    def close(self, finished: bool) -> None:
        self._run.finish()


SINKS: Table[type[Sink]] = REGISTRY.table("sink").fill(
    {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb, "ray_metrics": RayMetrics}
)


class Sinks:
    """The open sinks of a run. One that fails is closed to further rounds, with a complaint; the run goes on without it."""

    def __init__(self, sinks: tuple[Sink, ...], folder: Path, name: str, settings: Mapping[str, Any], start: int):
        self._opening = {type(sink).__name__: partial(sink.open, folder, name, settings) for sink in sinks}
        self._open: dict[str, Writer] = {}
        self._complaints: list[str] = []
        self._open_at(start, self._opening)

    def _open_at(self, start: int, kinds: Iterable[str]) -> None:
        for kind in kinds:
            writer = self._try(kind, partial(self._opening[kind], start))
            if writer is not None:
                self._open[kind] = writer

    def go_back(self, t: int) -> None:
        """Rounds from `t` on, from 0, will be written again: as after a resume, to the sinks that have not failed."""
        for kind, writer in list(self._open.items()):
            self._try(kind, partial(writer.close, False))
        self._open_at(t, [*self._open])

    def write(self, t: int, values: Mapping[str, float | str | None]) -> None:
        """Write the numbers of round `t`, from 0."""
        known = {name: float(value) for name, value in values.items() if not isinstance(value, str | None)}
        for kind, writer in list(self._open.items()):
            self._try(kind, partial(writer.write, t + 1, known))

    def close(self, finished: bool) -> list[str]:
        """End all of them. Returns what has failed since the last call of `complaints`."""
        for kind, writer in list(self._open.items()):
            self._try(kind, partial(writer.close, finished))
        self._open.clear()
        return self.complaints()

    def complaints(self) -> list[str]:
        """What has failed since the last call."""
        complaints, self._complaints = self._complaints, []
        return complaints

    def _try(self, kind: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._open.pop(kind, None)
            self._complaints.append(f"{kind} failed and receives no more of this run: {error}")
            return None


def _remembered(path: Path, place: str, make: Callable[[], str]) -> str:
    """The sink's identifier of this run at `place`. It is made once and stored in a file, so that a resumed run has the same,
    but at another place, which does not know it. Of the place a hash is stored: an address may hold a password."""
    here = hashlib.sha256(place.encode()).hexdigest()
    known = path.read_text(encoding="utf-8").split() if path.is_file() else []
    if known and here in (known[1:] or [here]):  # raysim 0.1 stored no place
        return known[0]
    identifier = make()
    with replacing(path) as temporary:
        temporary.write_text(f"{identifier}\n{here}\n", encoding="utf-8")
    return identifier


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Settings by their paths."""
    if not isinstance(value, Mapping):
        return {path: value}
    inside = f"{path}." if path else ""
    return {key: leaf for name, one in value.items() for key, leaf in _flat(one, f"{inside}{name}").items()}
