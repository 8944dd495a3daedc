"""What a script or a notebook calls to start and continue runs, in the words of the command line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from raysim.api.folder import new_folder
from raysim.api.progress import progress_of_script
from raysim.api.simulation import RoundResult, Simulation
from raysim.config import STACKS, Config, ConfigError, from_dict, load, recall, remember, to_dict
from raysim.config.schema import DataConfig
from raysim.config.shipped import find
from raysim.core.hooks import HookError
from raysim.data.given import as_dataset
from raysim.data.sources import Given
from raysim.data.sources import Source as DataSource
from raysim.federation.code import saved_config
from raysim.models import ModelError
from raysim.plugins import registered
from raysim.report.runs import Run

Source = str | Path | Mapping[str, Any] | Config
OnRound = Callable[[RoundResult], object]


def read_config(config: Source, **settings: Any) -> Config:
    """A checked configuration from a YAML file, the name of one that comes with raysim ("quickstart"), a mapping, or
    a `Config`.

    `settings` change it: `rounds__total=20` is `--set rounds.total=20`. Objects may stand where names do, there and in a mapping:
    `data` is then what `as_dataset` takes, `model` a class or a function that makes one (see `raysim.model`), `client`,
    `weighting` and `server` hold methods, and `metrics` functions, `Metric`s or objects of torchmetrics: one, a list, or by
    their names in a mapping.
    Raises `ConfigError` with every fault, and `DataError`.
    """
    changes = _changes(settings)
    if isinstance(config, str | Path):
        return remember(load(find(config), changes))
    if isinstance(config, Config):
        recall(config)
    given = to_dict(config) if isinstance(config, Config) else config
    named = [_named(path, value) for path, value in given.items()]
    plain = {path: value for path, value in named if path in given}
    return remember(from_dict(plain, overrides=[*(one for one in named if one[0] not in given), *changes]))


def _changes(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [_named(name.replace("__", "."), value) for name, value in settings.items()]


def _named(path: str, value: Any) -> tuple[str, Any]:
    """A setting in which every object has a name: so that all else knows only one way."""
    if path in ("data", "model") and isinstance(value, Mapping) and "name" in value:
        return path, {**value, "name": _named(f"{path}.name", value["name"])[1]}
    if path in ("data", "data.name") and not isinstance(value, str | DataConfig | DataSource):
        if not isinstance(value, Mapping) or not {"train", "x_train"}.isdisjoint(value):
            return "data.name", Given.of(as_dataset(value))
    elif path in ("model", "model.name") and callable(value):
        return "model.name", _model(value)
    elif path in ("metrics", "evaluate.metrics"):
        given = value.items() if isinstance(value, Mapping) else [(None, one) for one in _listed(value)]
        try:
            return "evaluate.metrics", [
                one if name is None and isinstance(one, str) else registered("metric", one, name) for name, one in given
            ]
        except HookError as error:
            raise ConfigError(f"evaluate.metrics: {error}") from None
    elif path in STACKS:
        kind = STACKS[path].entries.kind
        for method in _listed(value):
            if getattr(type(method), "role", None) == kind:  # of all else the reader says what is wrong
                registered(kind, type(method))
    return path, value


def _listed(value: Any) -> Collection[Any]:
    """One entry may stand without a list."""
    return value if isinstance(value, Collection) and not isinstance(value, str | Mapping) else [value]


def _model(factory: Callable[..., Any]) -> str:
    try:
        return registered("model", factory)
    except ModelError as error:
        raise ConfigError(f"model: {error}") from None


def stream(
    config: Source, *, out: str | Path | None = None, address: str | None = None, **settings: Any
) -> Simulation:  # fmt: skip
    """A run, round by round: `for round in raysim.stream("quickstart"): print(round.accuracy)`.

    `config` and `settings` are those of `read_config`. `out` is the run's folder (default: a new one in `record.dir`),
    `address` a Ray cluster to join (default: RAY_ADDRESS, or the one that `raysim up` keeps, or a local one for this run).
    Raises `ConfigError` with all that is wrong, before anything is started.
    """
    wanted = read_config(config, **settings)
    folder = new_folder(None if out is None else Path(out), Path(wanted.record.dir), wanted.name)
    return Simulation(wanted, folder, address=address)


def run(
    config: Source, *, out: str | Path | None = None, address: str | None = None, progress: bool | None = None,
    on_round: OnRound | None = None, **settings: Any,
) -> Run:  # fmt: skip
    """Run a whole simulation, as `stream` describes it, and return the saved run.

    `progress` shows a bar, in a notebook with the run's curve; None: also without a terminal, as a line a minute on the
    standard error. `on_round` is called in this process with the result of each
    round. Where it raises, the rounds so far are saved, all is stopped, and `resume` can continue the run.
    """
    return _to_its_end(stream(config, out=out, address=address, **settings), progress, on_round)


def continued(
    run: str | Path | Run, *, address: str | None = None, accept_changed_code: bool = False, **settings: Any
) -> Simulation:
    """Continue a saved run round by round. See `resume`."""
    folder = run.folder if isinstance(run, Run) else Path(run)
    config = saved_config(folder, _changes(settings))
    simulation = Simulation(config, folder, resume=True, address=address, accept_changed_code=accept_changed_code)
    for warning in simulation.warnings:
        warnings.warn(warning, stacklevel=2)
    return simulation


def resume(
    run: str | Path | Run, *, address: str | None = None, progress: bool | None = None,
    on_round: OnRound | None = None, accept_changed_code: bool = False, **settings: Any,
) -> Run:  # fmt: skip
    """Continue a saved run to its end, to the same bits as if it had not stopped; with `rounds__total` raised, a
    finished one too. Raises `ConfigError` where `settings` would make other bits, and where a model, method, data set or
    metric of yours is not what the run began with: `accept_changed_code` goes on with it as it is now. `progress` and
    `on_round` as in `run`."""
    simulation = continued(run, address=address, accept_changed_code=accept_changed_code, **settings)
    return _to_its_end(simulation, progress, on_round)


def _to_its_end(simulation: Simulation, progress: bool | None, on_round: OnRound | None) -> Run:
    with simulation, progress_of_script(simulation.folder, progress) as shown:
        for round in simulation:
            if shown:
                shown.show(round)
            if on_round is not None:
                try:
                    on_round(round)
                except BaseException:
                    simulation.save()
                    raise
    return Run(simulation.folder)
