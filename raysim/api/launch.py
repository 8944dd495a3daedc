"""Where a run computes: in this process, or on a Ray cluster that is joined or started for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raysim.config import ENGINES, Config, ConfigError, name_in
from raysim.engine.ray.placement import Resources
from raysim.machine import answers, not_joined


def check_form(address: str | None) -> None:
    """Raises `ConfigError` where `address` or, without one, RAY_ADDRESS is none that Ray knows."""
    if (joined := address or os.environ.get("RAY_ADDRESS")) and (fault := not_joined(joined)):
        raise ConfigError(f"{_given_as(address)}: {fault}.")


def check_address(address: str | None) -> None:
    """Raises `ConfigError` as `check_form` does, and where no cluster answers there."""
    check_form(address)
    joined = address or os.environ.get("RAY_ADDRESS", "")
    if not answers(joined):  # Ray would try for many minutes, deaf to Ctrl-C
        raise ConfigError(f"{_given_as(address)}: no Ray cluster answers at {joined}.")


def _given_as(address: str | None) -> str:
    return "--address" if address else "RAY_ADDRESS"


def check_joined(configs: Sequence[Config], address: str | None) -> None:
    """Raises `ConfigError` where there is an `address`, and none of these runs is on Ray."""
    if address and configs and not any(config.engine.ray for config in configs):
        name = name_in(ENGINES, configs[0].engine)
        raise ConfigError(f"--address: engine is {name}, which joins no cluster. Use --set engine=ray.")


@contextmanager
def launcher(
    config: Config, address: str | None, resources: Resources | None
) -> Iterator[Callable[[Config, Path, bool], Any]]:
    """Yield what makes a federation of (configuration, folder, whether to resume); a cluster is there meanwhile."""
    if config.engine.ray:
        from raysim.federation.remote import session

        check_address(address)
        with session(config, address, resources) as launch:
            yield launch
        return
    check_joined([config], address)
    from raysim.federation import Federation

    yield Federation
