"""One run from the command line: played, shown, and stopped when asked to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.cli.interrupts import Interrupts
from raysim.cli.lines import ending, header
from raysim.cli.progress import progress

if TYPE_CHECKING:
    from raysim.config import Config
    from raysim.engine.ray.placement import Resources


def play(
    config: Config, folder: Path, address: str | None = None, *, resume: bool, resources: Resources | None = None
) -> int:
    """Run to the end, or to Ctrl-C; returns the exit code. What was started is stopped, however it ends.

    `resources` are the run's part of a cluster that it shares; without, it takes what is free. With `resume`, `config`
    may differ from what the folder says in all that `check_extension` allows, and the folder then says so too.
    """
    from raysim.federation.extend import check_extension, rewrite
    from raysim.federation.lock import finished_result, how_to_continue, machine_changes, run_lock

    interrupts = Interrupts()
    try:
        with interrupts, run_lock(folder):
            if resume:
                check_extension(config, folder)
                for change in machine_changes(folder):
                    text = f"{change}; bits may differ from those of a run that was not stopped"
                    print(f"raysim: {text}", file=sys.stderr)
                if result := finished_result(config, folder):
                    print(f"This run is complete.\n{ending(result)}", flush=True)
                    return 0
            with engine(config, address, resources) as launch:
                interrupts.install()  # again: Ray has put its own handler of SIGTERM in place
                federation = launch(config, folder, resume)
                try:
                    if resume:
                        rewrite(config, folder)
                    print(header(config), flush=True)
                    return _rounds(federation, folder, interrupts)
                finally:
                    federation.close()
    except KeyboardInterrupt:
        print(f"\nStopped at once. {how_to_continue(folder)}", file=sys.stderr)
        return interrupts.status


def check_address(address: str | None) -> None:
    """Raises `ConfigError` where no cluster answers at `address` or, without one, at RAY_ADDRESS."""
    from raysim.cli.machine import answers
    from raysim.config import ConfigError

    joined = address or os.environ.get("RAY_ADDRESS", "")
    if not answers(joined):  # Ray would try for many minutes, deaf to Ctrl-C
        raise ConfigError(f"{'--address' if address else 'RAY_ADDRESS'}: no Ray cluster answers at {joined}.")


@contextmanager
def engine(
    config: Config, address: str | None, resources: Resources | None
) -> Iterator[Callable[[Config, Path, bool], Any]]:
    """Yield what makes a federation of (configuration, folder, whether to resume); a cluster is there meanwhile."""
    from raysim.config import ConfigError, LocalEngineConfig

    if not isinstance(config.engine, LocalEngineConfig):
        from raysim.engine.ray.ray_engine import session

        check_address(address)
        with session(config, address, resources) as launch:
            yield launch
        return
    if address:
        raise ConfigError("--address: engine is local, which joins no cluster. Use --set engine=ray.")
    from raysim.federation.federation import Federation

    yield Federation


def _rounds(federation: Any, folder: Path, interrupts: Interrupts) -> int:
    """Rounds until the run is complete or interrupted; returns the exit code."""
    from raysim.federation.lock import how_to_continue

    interrupts.patient = True
    reported: set[str] = set()
    played = accepted = 0
    with progress() as shown:
        while (summary := federation.step()) is not None:
            shown.show(summary)
            played, accepted = played + 1, accepted + summary["clients_ok"]
            for failure in summary["failures"]:
                if failure not in reported:
                    reported.add(failure)
                    print(failure, file=sys.stderr, flush=True)
            if interrupts.received is not None:
                break
    if interrupts.received is not None:
        federation.checkpoint()
        print(f"Stopped. {how_to_continue(folder)}", file=sys.stderr)
        return interrupts.status
    print(ending(federation.finish() | {"folder": folder}), flush=True)
    if played and not accepted:
        print("raysim: no client's model was accepted in any round: the global one never changed", file=sys.stderr)
    return 0
