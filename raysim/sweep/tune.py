"""Search with Ray Tune: a configuration as a trainable. docs/howto/sweep.md has an example."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from raysim.config import EngineConfig, LocalEngineConfig, load
from raysim.config.shipped import find
from raysim.federation import Federation
from raysim.registry import REGISTRY, OwnEntry
from raysim.store.tables import OPEN, read

REPORTED = ("accuracy", "loss", "train_loss", "personal_accuracy_micro", "personal_accuracy_macro")


def trainable(base: str | Path, overrides: Sequence[str] = ()) -> Callable[[Mapping[str, Any]], None]:
    """What `ray.tune.Tuner` takes: it runs `base`, a file or a configuration that comes with raysim, with `overrides`
    (`path=value`) and a trial's settings, a mapping of paths to values.

    After each round that is evaluated it reports `round` (from 1), what there is of `REPORTED` (fractions and nats), and
    the task's further metrics as `metric.NAME`. A trial trains its clients one after another in its own process, on a GPU
    where Tune has reserved one for it (`tune.with_resources`). Its run lies in `run` in the trial's folder, from which a
    trial that died goes on. Raises `ConfigError` for what is wrong before any trial, `ImportError` without Ray Tune, and
    `RuntimeError` where Ray cannot start a trial.
    """
    try:
        from ray.tune import get_context, report
    except ImportError:
        raise ImportError("a search needs Ray Tune: pip install 'raysim[tune]'") from None
    if " " in sys.executable:  # which Ray does not quote, so that it would wait for ever
        raise RuntimeError(
            f"Ray Tune starts no trial with {sys.executable}, whose path has a space: install raysim elsewhere"
        )
    path, here, own = find(base).resolve(), Path.cwd(), REGISTRY.own()
    load(path, overrides)

    def train(settings: Mapping[str, Any]) -> None:
        with suppress(FileNotFoundError):  # on a machine of a cluster that has no such folder
            os.chdir(here)  # where relative paths of the configuration begin
        _adopt(own)
        config = load(path, [*overrides, *settings.items()])
        if config.engine.ray:
            shared = {field.name: getattr(config.engine, field.name) for field in fields(EngineConfig)}  # of its bits
            config = replace(config, engine=LocalEngineConfig(**shared))
        trial = Path(get_context().get_trial_dir())
        folder, marker = trial / "run", trial / "reported"  # the last round, from 1, of which Tune knows
        reported = int(marker.read_text()) if marker.exists() else 0
        saved = any((folder / "checkpoints").glob("*.json"))
        federation = Federation(config, folder, resume=saved)
        try:
            for shown in _rounds(federation):
                number = shown["round"] + 1
                if number > reported and federation.evaluates(shown["round"]):
                    names = [*REPORTED, *(name for name in shown if name.startswith(OPEN["rounds"].prefix))]
                    known = {name: shown[name] for name in names if shown.get(name) is not None}
                    report({"round": number, **known})
                    marker.write_text(str(number))
            federation.finish()
        finally:
            federation.close()

    return train


def _rounds(federation: Federation) -> Iterator[Mapping[str, Any]]:
    """What is known of each round: of those that were done before, as a trial may die before it reports one, then of each that
    is run."""
    done = federation.t
    yield from (row for row in read(federation.folder, "rounds").to_pylist() if row["round"] < done)
    while (shown := federation.step()) is not None:
        yield shown


def _adopt(own: Sequence[OwnEntry]) -> None:
    """Let the trial's process know what the script has added. A function of the module, since a registry that `train`
    named would travel with it, as an unused copy."""
    REGISTRY.adopt(own)
