"""One run in a terminal: its progress, and how it stops."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.api.errors import shown
from raysim.api.interrupts import Interrupts
from raysim.api.lines import ending, header
from raysim.api.progress import progress

if TYPE_CHECKING:
    from raysim.api.simulation import Simulation
    from raysim.config import Config
    from raysim.engine.ray.placement import Resources


def run_in_terminal(
    config: Config, folder: Path, address: str | None = None, *, resume: bool, resources: Resources | None = None,
    accept_changed_code: bool = False,
) -> int:  # fmt: skip
    """Run to the end, or to Ctrl-C or SIGTERM; returns the exit code. What was started is stopped, however it ends.

    `resources` are the run's part of a cluster that it shares; without, it takes what is free. With `resume`, `config`
    may differ from what the folder says in all that `check_unchanged` allows, and the folder then says so too.
    """
    from raysim.api.simulation import Simulation
    from raysim.federation.lock import how_to_continue
    from raysim.store.manifest import read_manifest

    interrupts = Interrupts(signal.SIGINT, signal.SIGTERM)
    try:
        with (
            interrupts,
            Simulation(
                config,
                folder,
                address=address,
                resume=resume,
                resources=resources,
                interrupts=interrupts,
                accept_changed_code=accept_changed_code,
            ) as run,
        ):
            for warning in run.warnings:
                print(shown(f"raysim: {warning}"), file=sys.stderr)
            if run.result:
                print(f"This run is complete.\n{ending(run.result)}", flush=True)
                return 0
            run.start()
            print(header(config, read_manifest(folder)), flush=True)
            return _rounds(run, interrupts)
    except KeyboardInterrupt:
        print(f"\n{shown(f'Stopped at once. {how_to_continue(folder)}')}", file=sys.stderr)
        return interrupts.status


def _rounds(run: Simulation, interrupts: Interrupts) -> int:
    """Rounds until the run is complete or interrupted; returns the exit code."""
    from raysim.api.simulation import Stopped

    reported: set[str] = set()
    try:
        with progress() as rounds:
            for round in run:
                rounds.show(round)
                for message in round.messages:
                    if message not in reported:
                        reported.add(message)
                        print(shown(message), file=sys.stderr, flush=True)
    except Stopped as stopped:
        print(shown(f"Stopped. {stopped}"), file=sys.stderr)
        return interrupts.status
    assert run.result is not None
    print(ending(run.result), flush=True)
    return 0
