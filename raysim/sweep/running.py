"""The runs of a sweep, one after another or in parallel: finished ones stay, stopped ones go on."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

from raysim.api.errors import faults_of, shown
from raysim.api.folder import make_out
from raysim.api.launch import check_address, check_joined
from raysim.api.terminal import run_in_terminal
from raysim.federation.code import check_code
from raysim.sweep.grid import Point
from raysim.sweep.parallel import carried, run_parallel


def run_all(
    points: Sequence[Point], address: str | None = None, at_once: int | None = 1, accept_changed_code: bool = False
) -> int:
    """Run what is not finished; returns the exit code. A run that fails does not keep the others from being run.

    `at_once` runs at a time, None: as many as the machine carries. One at a time they run in this process, with
    one cluster for all; several each in a process of its own. Raises `ConfigError` where no run joins
    the cluster at `address`, where their folder cannot be made, or where code of the user's has changed since a run began,
    unless that is accepted: the others would not be comparable. Raises `DataError` where data cannot be downloaded.
    """
    check_joined([point.config for point in points], address)
    left = [point for point in points if not point.finished]
    for point in points if left else ():
        if point.finished or point.saved:
            check_code(point.config, point.folder, accept_changed_code)
    for data in {
        repr((point.config.data.name, point.config.data.folder)): point.config.data for point in left
    }.values():
        data.name.fetch(data.folder)  # here, where a failure ends it, and not in every run
    for out in {point.folder.parent for point in left}:
        make_out(out)
    print(f"{len(points)} runs, {len(points) - len(left)} of them finished", flush=True)
    with ExitStack() as stack:
        joined = None
        on_ray = [ray for point in left if (ray := point.config.engine.ray)]
        if on_ray:
            from raysim.engine.ray.cluster import cluster

            check_address(address)
            object_store = max(engine.state_bytes or 0 for engine in on_ray)  # one for all
            metrics = any(sink.of_ray for point in left for sink in point.config.record.sinks)
            joined = stack.enter_context(
                cluster(address, object_store or None, any(e.dashboard for e in on_ray), metrics)
            )
        most = min(len(left), at_once or carried([point.config for point in left])) if left else 0
        if most > 1:
            print(f"{most} at a time\n", flush=True)
            failed, stopped = run_parallel(left, most, joined, accept_changed_code)
        else:
            failed, stopped = _in_turn(left, address, accept_changed_code)
    if stopped:
        print("The same command continues the sweep.", file=sys.stderr)
        return stopped
    if failed:
        print(
            shown(f"{len(failed)} runs failed: {', '.join(failed)}. The same command tries them again."),
            file=sys.stderr,
        )
    return int(bool(failed))


def _in_turn(points: Sequence[Point], address: str | None, accept_changed_code: bool) -> tuple[list[str], int]:
    """Names of the runs that failed, and the exit code where Ctrl-C stopped them, else 0."""
    failed: list[str] = []
    for number, point in enumerate(points, 1):
        print(f"\nrun {number} of {len(points)}", flush=True)
        try:
            stopped = run_in_terminal(
                point.config, point.folder, address if point.config.engine.ray else None, resume=point.saved,
                accept_changed_code=accept_changed_code,
            )  # fmt: skip
        except Exception as error:
            print(shown(f"{point.name}: {error}") if faults_of(error) else traceback.format_exc(), file=sys.stderr)
            failed.append(point.name)
            continue
        if stopped:
            return failed, stopped
    return failed, 0
