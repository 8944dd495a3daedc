"""Several runs at a time. Each is a process of its own (`raysim.sweep.child`), which writes what it prints to `log.txt` in
the run's folder and ends with the process that started it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, Any

from raysim import machine
from raysim.api.lines import fallbacks, scored
from raysim.config import Config, to_dict
from raysim.engine.ray.placement import HOST_BYTES, Node, Resources
from raysim.printable import printable
from raysim.store.atomic import open_to_append
from raysim.store.documents import read_result
from raysim.store.manifest import FAILED
from raysim.sweep.grid import Point

LOG = "log.txt"
POLL = 0.1  # seconds between looks at whether a run has ended


def run_parallel(
    points: Sequence[Point], at_once: int, address: str | None, accept_changed_code: bool = False
) -> tuple[list[str], int]:
    """Execute these runs, `at_once` at a time, those on Ray on equal parts of the cluster at `address`.

    Returns the names of those that failed, and the exit code where Ctrl-C or SIGTERM stopped all of them after their
    rounds in progress (a second one: at once), else 0.
    """
    share = _share(at_once) if address else None
    waiting, failed, width = list(points), [], len(str(len(points)))
    running: dict[subprocess.Popen[str], tuple[Point, IO[str], float]] = {}
    done = 0
    with _forwarded(running) as received:
        while running or (waiting and not received):
            while waiting and len(running) < at_once and not received:
                point = waiting.pop(0)
                process, log = start(point, address, share, accept_changed_code)
                running[process] = (point, log, time.monotonic())
                if received:  # while it was being started
                    process.send_signal(received[-1])
            time.sleep(POLL)
            for process in [process for process in running if process.poll() is not None]:
                point, log, began = running.pop(process)
                log.close()
                assert process.stdin is not None
                process.stdin.close()
                if received and process.returncode:
                    continue
                done += 1
                failed += [point.name] * bool(process.returncode)
                if process.returncode < 0 and (point.folder / "config.yaml").exists():  # it could not say so itself
                    (point.folder / FAILED).write_text(f"killed by signal {-process.returncode}\n", encoding="utf-8")
                said = f"{point.name}   {_outcome(point, process.returncode)}   {time.monotonic() - began:.1f} s"
                print(f"{done:>{width}} of {len(points)}   {printable(said)}", flush=True)
    return failed, 128 + received[-1] if received else 0


def carried(configs: Sequence[Config]) -> int:
    """How many of these runs at a time the CPUs and the memory carry, at least one; on GPUs, as many as there are.

    A run is taken to need the CPUs of one actor and twice the memory that its processes have before they hold data and
    models. Call it inside `ray_engine.cluster` where a run is on Ray.
    """
    cpus, gpus, processes = float(machine.cpus()), 0.0, 1
    if any(config.engine.ray for config in configs):
        from raysim.engine.ray.cluster import free_resources

        free = free_resources()
        cpus, gpus, processes = free.cpus, free.gpus, 3  # of the command line, of the federation, of its clients
    elif not all(config.engine.only_cpus() for config in configs):
        gpus = 1.0  # all of them would take the first one
    memory = machine.free_memory()
    limits = [cpus / max(config.engine.threads for config in configs)]
    limits += [gpus] if gpus else []
    limits += [memory / (2 * processes * HOST_BYTES)] if memory is not None else []
    return max(1, int(min(limits)))


def _share(at_once: int) -> Resources:
    from raysim.engine.ray.cluster import free_resources

    free = free_resources()

    def part(whole: float) -> float:
        return math.floor(1000 * whole / at_once) / 1000  # rounded up by Ray, the last part would not be there

    nodes = (Node(n.id, part(n.cpus), part(n.gpus), n.memory / at_once) for n in free.nodes)
    return Resources(tuple(nodes))


def _outcome(point: Point, code: int) -> str:
    if not code:
        result = read_result(point.folder) or {}
        personal, metric = result.get("personal"), result.get("headline") or "accuracy"
        fallen = f"   fell back: {fallbacks(result['fell_back'])}" if result.get("fell_back") else ""
        if result.get("final") is None and personal:
            return f"personal {metric} {scored(metric, personal['final'])}{fallen}"
        return f"{metric} {scored(metric, result.get('final'))}{fallen}"
    lines = (point.folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    reason = f"killed by signal {-code}" if code < 0 or not lines else lines[-1]
    return f"failed: {reason} (see {point.folder / LOG})"


@contextmanager
def _forwarded(running: dict[subprocess.Popen[str], Any]) -> Iterator[list[int]]:
    """Signals that ask to stop go to every process of `running`; yields those that have come."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        again = "" if len(received) > 1 else "Stopping after the rounds in progress; once more stops at once.\n"
        os.write(2, f"\n{again}".encode())  # print is not safe in a signal handler
        for process in list(running):
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -------------------------------------------------------------------------------------------------------- one process


def start(
    point: Point, address: str | None, share: Resources | None, accept_changed_code: bool = False
) -> tuple[subprocess.Popen[str], IO[str]]:
    """The run's process, which ends when its standard input is closed, and its log."""
    on_ray = point.config.engine.ray
    task = {
        "config": to_dict(point.config), "folder": str(point.folder), "resume": point.saved,
        "address": address if on_ray else None, "resources": asdict(share) if share and on_ray else None,
        "accept_changed_code": accept_changed_code,
    }  # fmt: skip
    point.folder.mkdir(parents=True, exist_ok=True)
    log = os.fdopen(open_to_append(point.folder / LOG), "a", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "raysim.sweep.child"], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
        process_group=0,  # a terminal's Ctrl-C reaches only this process, which passes it on
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()  # and stays open: when it closes, the process ends
    return process, log
